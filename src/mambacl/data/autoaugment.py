"""The operations of AutoAugment on batches (n, 3, h, w) of uint8, each image with its own magnitude.

On any device, each returns the same bits as torchvision's function of the same name for a tensor on the CPU. Fractions
are rounded where torchvision rounds them. Where its kernels round a product and a sum only once, `_fma` does so here.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mambacl.data.image_cache import on_device

NONE = -1  # in place of an operation's number: do nothing


def autoaugment(
    images: Tensor,
    names: tuple[str, ...],
    ops: NDArray[np.int64],
    magnitudes: NDArray[np.float64],
    bilinear: bool = False,
) -> Tensor:
    """Applies the columns of `ops` in turn. `ops` has one row per image and holds positions in `names`, or NONE.
    `bilinear`: geometric operations interpolate; otherwise they take the nearest pixel.

    Each operation runs only on the images that need it. Both arrays are on the host, so nothing waits for the device.
    """
    images = images.clone()
    warps = [number for number, name in enumerate(names) if name in GEOMETRIC]
    for column, strengths in zip(ops.T, magnitudes.T, strict=True):
        geometric = np.isin(column, warps)
        if geometric.any():
            chosen = on_device(np.flatnonzero(geometric), images.device)
            pairs, which = np.unique(np.stack([column[geometric], strengths[geometric]]), axis=1, return_inverse=True)
            matrices = np.array([inverse_matrix(names[int(op)], float(m), *images.shape[-2:]) for op, m in pairs.T])
            warped = warp(images.index_select(0, chosen), matrices, which.reshape(-1), bilinear)
            images.index_copy_(0, chosen, warped)
        for number in np.unique(column[~geometric & (column != NONE)]):
            places = np.flatnonzero(column == number)
            chosen, strength = (on_device(part, images.device) for part in (places, strengths[places]))
            made = OPERATIONS[names[number]](images.index_select(0, chosen), strength.view(-1, 1, 1, 1))
            images.index_copy_(0, chosen, made)
    return images


# Geometric operations: the nearest pixel, or the four around it weighted by nearness; black outside the image


GEOMETRIC = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")


def inverse_matrix(name: str, magnitude: float, height: int, width: int) -> tuple[float, ...]:
    """Maps a point of the result to a point of the source, relative to the centre: x = m0 x + m1 y + m2, ..."""
    if name in ("ShearX", "ShearY"):  # about the upper left corner
        slope = math.tan(math.radians(math.degrees(math.atan(magnitude))))
        if name == "ShearX":
            return 1.0, slope, slope * height * 0.5, 0.0, 1.0, 0.0
        return 1.0, 0.0, 0.0, slope, 1.0, slope * width * 0.5
    if name == "TranslateX":
        return 1.0, 0.0, -float(int(magnitude)), 0.0, 1.0, 0.0
    if name == "TranslateY":
        return 1.0, 0.0, 0.0, 0.0, 1.0, -float(int(magnitude))
    angle = -math.radians(magnitude % 360)
    return math.cos(angle), math.sin(angle), 0.0, -math.sin(angle), math.cos(angle), 0.0


def warp(images: Tensor, matrices: NDArray[np.float64], which: NDArray[np.int64], bilinear: bool = False) -> Tensor:
    """Warps each image by the matrix that `which` selects."""
    height, width = images.shape[-2:]
    column, line = source_grid(matrices, height, width, images.device)
    chosen = on_device(which, images.device)

    def pixels(column: Tensor, line: Tensor) -> Tensor:
        inside = (column >= 0) & (column < width) & (line >= 0) & (line < height)
        index = torch.where(inside, line * width + column, -1).long().flatten(1)
        return gather_pixels(images, index.index_select(0, chosen), height, width)

    if not bilinear:
        return pixels(column.round().long(), line.round().long())
    left, upper = column.floor(), line.floor()
    east, south = column - left, line - upper
    west, north = 1 - east, 1 - south
    corners = [(0, 0, west * north), (1, 0, east * north), (0, 1, west * south), (1, 1, east * south)]
    total: Tensor | None = None
    for right, down, share in corners:
        values = pixels((left + right).long(), (upper + down).long())
        weights = share.index_select(0, chosen).unsqueeze(1)
        total = values * weights if total is None else _fma(values, weights, total)
    assert total is not None
    return total.round_().to(torch.uint8)


def source_grid(matrices: NDArray[np.float64], height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The source column and line of each pixel of the result, per matrix: (matrices, height, width)."""
    rows = on_device(matrices.astype(np.float32), device).view(-1, 2, 3, 1, 1)
    x = torch.arange(width, dtype=torch.float32, device=device) - (width - 1) * 0.5
    y = (torch.arange(height, dtype=torch.float32, device=device) - (height - 1) * 0.5).view(-1, 1)

    def source(row: Tensor, size: int) -> Tensor:
        """Uses the order, units and precision of torchvision's grid. They decide which of two pixels is nearer and
        where a grey level is rounded up."""
        scaled = row / (0.5 * torch.full((), size, dtype=torch.float32, device=device))
        place = x * scaled[:, 0] + y * scaled[:, 1] + scaled[:, 2]
        half, back = (torch.full((), value, dtype=torch.float32, device=device) for value in (size * 0.5, -0.5))
        return _fma(place + 1, half, back)

    return source(rows[:, 0], width), source(rows[:, 1], height)


def gather_pixels(images: Tensor, index: Tensor, height: int, width: int) -> Tensor:
    """New images made of the pixels at `index` (n, height * width) in the flattened old ones; black where it is -1."""
    flat = images.flatten(2)
    found = flat.gather(2, index.clamp(min=0).unsqueeze(1).expand(-1, flat.shape[1], -1))
    return found.masked_fill_((index < 0).unsqueeze(1), 0).unflatten(2, (height, width))


# Operations on values


def _fma(images: Tensor, factor: Tensor, addend: Tensor) -> Tensor:
    """images * factor + addend in float32, rounded once, as PyTorch's kernels for `add` with a factor do."""
    return (images.double() * factor.float().double() + addend.double()).float()


def _bytes(values: Tensor) -> Tensor:
    return values.clamp_(0, 255).to(torch.uint8)


def _blend(images: Tensor, other: Tensor, ratio: Tensor) -> Tensor:
    return _bytes(_fma(other, 1.0 - ratio, images.float() * ratio.float()))


def grey(images: Tensor) -> Tensor:
    """Grey levels (n, 1, h, w): integers in float32."""
    red, green, blue = images.unbind(1)
    weights = [torch.full((), weight, device=images.device) for weight in (0.2989, 0.587, 0.114)]
    return _fma(blue, weights[2], _fma(green, weights[1], red.float() * weights[0])).floor_().unsqueeze(1)


def color(images: Tensor, magnitude: Tensor) -> Tensor:
    return _blend(images, grey(images), 1.0 + magnitude)


def contrast(images: Tensor, magnitude: Tensor) -> Tensor:
    pixels = torch.full((), images.shape[-2] * images.shape[-1], dtype=torch.float32, device=images.device)
    mean = grey(images).sum((1, 2, 3), keepdim=True, dtype=torch.float64).float() / pixels
    return _blend(images, mean, 1.0 + magnitude)


def sharpness(images: Tensor, magnitude: Tensor) -> Tensor:
    if min(images.shape[-2:]) <= 2:
        return images
    levels = images.short()
    lines = levels[..., :-2, :] + levels[..., 1:-1, :] + levels[..., 2:, :]
    nine = lines[..., :-2] + lines[..., 1:-1] + lines[..., 2:]
    inner = levels[..., 1:-1, 1:-1]
    blurred = torch.div(2 * (nine + 4 * inner) + 13, 26, rounding_mode="floor")  # thirteenths, rounded
    sharp = images.clone()
    sharp[..., 1:-1, 1:-1] = _bytes(_fma(blurred - inner, 1.0 - (1.0 + magnitude), inner))
    return sharp


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    low, high = (images.float().amin((2, 3), keepdim=True), images.float().amax((2, 3), keepdim=True))
    flat = high == low
    unit = torch.where(flat, 1.0, (high - low) * torch.full_like(low, 1.0 / 255.0))
    return _bytes((images - torch.where(flat, 0.0, low)) / unit)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """torchvision's function, which treats each image separately."""
    from torchvision.transforms.v2 import functional as TF

    return TF.equalize(images)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Brightness": lambda images, magnitude: _bytes(images.float() * (1.0 + magnitude).float()),
    "Color": color,
    "Contrast": contrast,
    "Sharpness": sharpness,
    "Posterize": lambda images, bits: images & ((255 << (8 - bits.int())) & 255).to(torch.uint8),
    "Solarize": lambda images, share: torch.where(images >= (255.0 * share).float(), ~images, images),
    "AutoContrast": autocontrast,
    "Equalize": equalize,
    "Invert": lambda images, _: ~images,
}
