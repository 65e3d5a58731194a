"""What a user can predict from: image files, Pillow images and tensors, as uint8 (3, h, w)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard, get_args

import torch
from PIL import Image
from torch import Tensor

from mambacl.data.images import DAMAGE, reason, rgb, try_decode
from mambacl.errors import UserError

Source = str | Path | Image.Image | Tensor  # one image
KINDS = "a path, a Pillow image, a tensor (3, h, w), a list of these, or a batch (n, 3, h, w)"


def listed(images: Source | Iterable[Source]) -> list[Source]:
    """The images one by one. A tensor with four dimensions is a batch."""
    if isinstance(images, Tensor) and images.dim() == 4:
        return list(images)
    if is_source(images):
        return [images]
    if not isinstance(images, Iterable):
        raise _refused(images)
    found = list(images)
    for image in found:
        if not is_source(image):
            raise _refused(image)
    return found


def is_source(image: Any) -> TypeGuard[Source]:
    return isinstance(image, get_args(Source))


def pixels(source: Source) -> Tensor:
    """The image as uint8 (3, h, w)."""
    if isinstance(source, Tensor):
        return _checked(source)
    if isinstance(source, Image.Image):
        try:
            found = rgb(source)
        except DAMAGE as error:
            raise UserError(f"This Pillow image cannot be read ({reason(error)}): use another.") from None
    else:
        made = try_decode(Path(source))
        if isinstance(made, str):
            raise UserError(f"{source} {made}: repair or remove it.")
        found = made
    return torch.from_numpy(found).permute(2, 0, 1)


def _checked(image: Tensor) -> Tensor:
    if image.dim() != 3 or image.shape[0] != 3 or not image.numel():
        raise UserError(f"A tensor must have the shape (3, h, w) or (n, 3, h, w), but one has {tuple(image.shape)}.")
    if image.dtype == torch.uint8:
        return image.cpu()
    if not image.is_floating_point():
        raise UserError(f"A tensor must hold uint8 or floating-point pixels, not {image.dtype}: convert it.")
    if not (float(image.min()) >= 0 and float(image.max()) <= 1):  # also catches NaN
        raise UserError(
            "A floating-point image must have values from 0 to 1; images that are already normalised go to `scores`."
        )
    return (image.float() * 255).round().to(torch.uint8).cpu()


def _refused(given: object) -> UserError:
    return UserError(f"An image must be {KINDS}, not {type(given).__name__}.")
