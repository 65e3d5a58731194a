"""Images that strangers send: refused by size before anything is decoded."""

from __future__ import annotations

import io

import torch
from PIL import Image
from torch import Tensor

from mambacl.data.images import DAMAGE, reason, rgb
from mambacl.deploy.serve_options import Refusal

# Pillow reads more, but to read EPS, for example, it starts another program.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")


def decoded(name: str, data: bytes, max_pixels: int) -> Tensor:
    """The image as uint8 (3, h, w). Only the header is read before its size is checked."""
    if not data:
        raise Refusal(422, f"{name} is empty (0 bytes): send the image's bytes.")
    Image.init()  # loads the readers of all formats; Image.open asks only those that are loaded
    try:
        image = Image.open(io.BytesIO(data), formats=[known for known in FORMATS if known in Image.OPEN])
        width, height = image.size
    except Image.DecompressionBombError:  # far above any limit, says Pillow
        raise _too_many(name, "too many", max_pixels) from None
    except Image.UnidentifiedImageError:
        raise Refusal(415, f"{name} is no image that can be read: send JPEG, PNG, WebP, GIF, BMP or TIFF.") from None
    except DAMAGE as error:
        raise _broken(name, error) from None
    if width * height > max_pixels:
        raise _too_many(name, f"{width * height / 1e6:.1f} million", max_pixels)
    try:
        return torch.from_numpy(rgb(image)).permute(2, 0, 1)
    except DAMAGE as error:
        raise _broken(name, error) from None


def _broken(name: str, error: Exception) -> Refusal:
    return Refusal(422, f"{name} is broken ({reason(error)}): send it again, or repair it.")


def _too_many(name: str, count: str, most: int) -> Refusal:
    return Refusal(413, f"{name} has {count} pixels, and at most {most / 1e6:g} million are accepted: shrink it.")
