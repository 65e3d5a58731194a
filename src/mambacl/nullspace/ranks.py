"""The rank rules: how many directions of a spectrum count as null.

A spectrum is descending and non-negative: the eigenvalues of an uncentred covariance (its singular values are the
same).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mambacl.errors import UserError
from mambacl.nullspace.settings import parse_rank

if TYPE_CHECKING:
    from torch import Tensor

Spectrum = NDArray[np.floating]


def null_rank(spectrum: Tensor | Spectrum, rule: str = "corner") -> int:
    """R, the number of trailing directions that count as null, by one of these rules:

    - "corner": the paper's formula, R = J - argmax_j (l_{j-1} - 2 l_j + l_{j+1}) with j from 1: the corner is protected
    - "smoothed-corner": as in the public code, in the precision of the spectrum (float32 in the public code)
    - "energy:0.99": all but the leading directions that hold this share of the trace
    - "fraction:0.5": this share of the directions
    - "tolerance:1e-12": directions whose eigenvalue is at most this share of the largest, i.e. zero up to rounding
    - "multiple:10": directions whose eigenvalue is at most this many times the smallest, or zero up to rounding (NSCL)

    In a spectrum of zeros all directions are null, except with "fraction".
    """
    values = _values(spectrum)
    if values.ndim != 1 or len(values) == 0:
        raise UserError(f"A spectrum must be a vector with at least one value, got shape {values.shape}.")
    if not np.isfinite(values).all():
        raise UserError("A spectrum holds NaN or infinite values: check the features for overflow.")
    name, share = parse_rank(rule)
    if not values.any() and name != "fraction":
        return len(values)
    return RULES[name](values) if share is None else RULES[name](values, share)


def null_ranks(spectra: Sequence[Tensor | Spectrum], rule: str, together: bool = False) -> list[int]:
    """The ranks of several spectra: each separately or, with `together`, by one threshold for all, relative to their
    traces.

    A flat spectrum has no corner, and the paper's formula would protect two directions; here all are protected.
    """
    if not together or rule.startswith("fraction"):
        return [0 if rule == "corner" and _flat(spectrum) else null_rank(spectrum, rule) for spectrum in spectra]
    arrays = [_values(spectrum) for spectrum in spectra]
    if not all(np.isfinite(values).all() for values in arrays):
        raise UserError("A spectrum holds NaN or infinite values: check the features for overflow.")
    ranks = [len(values) for values in arrays]  # all null for a spectrum of zeros
    some = [number for number, values in enumerate(arrays) if values.any()]
    if not some:
        return ranks
    pooled = np.concatenate([arrays[number] / arrays[number].sum(dtype=np.float64) for number in some])
    owner = np.repeat(some, [len(arrays[number]) for number in some])
    order = np.argsort(-pooled, kind="stable")
    null = order[len(pooled) - (0 if rule == "corner" and _flat(pooled[order]) else null_rank(pooled[order], rule)) :]
    counts = np.bincount(owner[null], minlength=len(arrays))
    return [int(counts[number]) if number in some else rank for number, rank in enumerate(ranks)]


def _values(spectrum: Tensor | Spectrum) -> Spectrum:
    return np.asarray(spectrum.detach().cpu() if hasattr(spectrum, "detach") else spectrum)


def _flat(spectrum: Tensor | Spectrum) -> bool:
    """Whether all values are equal, up to rounding, and not zero."""
    high, low = float(spectrum[0]), float(spectrum[-1])
    return high > 0 and high - low <= 1e-6 * high


def corner(spectrum: Spectrum) -> int:
    if len(spectrum) < 3:
        return 0  # no value has two neighbours
    return len(spectrum) - (int(np.argmax(second_difference(spectrum))) + 2)


def smoothed_corner(spectrum: Spectrum) -> int:
    """The corner of the spectrum; from 128 values on, of the smoothed spectrum and away from both ends.

    The value at the corner is the threshold; null directions start at the *last* index that reaches it.
    """
    length = len(spectrum)
    if length < 3:
        return length - 1
    smooth, margin = spectrum, 0
    if length >= 128:
        smooth, margin = gaussian_filter(spectrum, sigma=10.0), int(0.015 * length)
    curvature = second_difference(smooth)
    curvature = curvature[margin : len(curvature) - margin]
    threshold = spectrum[int(np.argmax(curvature)) + margin + 1]
    return length - int(np.flatnonzero(spectrum >= threshold)[-1])


def energy(spectrum: Spectrum, share: float) -> int:
    cumulative = np.cumsum(np.maximum(spectrum, 0), dtype=np.float64)
    if cumulative[-1] == 0.0:
        return len(spectrum)
    kept = int(np.searchsorted(cumulative, share * cumulative[-1])) + 1 if share > 0 else 0
    return len(spectrum) - kept


def fraction(spectrum: Spectrum, share: float) -> int:
    return int(share * len(spectrum) + 1e-9)  # 0.29 of 100 is 29


def tolerance(spectrum: Spectrum, share: float) -> int:
    return int((spectrum <= share * spectrum[0]).sum())


def multiple(spectrum: Spectrum, factor: float) -> int:
    zero = len(spectrum) * np.finfo(np.float64).eps * spectrum[0]
    return int((spectrum <= factor * max(spectrum[-1], zero)).sum())


RULES: dict[str, Callable[..., int]] = {
    "corner": corner,
    "smoothed-corner": smoothed_corner,
    "energy": energy,
    "fraction": fraction,
    "tolerance": tolerance,
    "multiple": multiple,
}


def second_difference(values: Spectrum) -> Spectrum:
    """l_{j-1} - 2 l_j + l_{j+1} as a difference of slopes, in the precision of the values."""
    slopes = values[:-1] - values[1:]
    return slopes[:-1] - slopes[1:]


def gaussian_filter(values: Spectrum, sigma: float) -> Spectrum:
    """Gaussian smoothing, cut off at four standard deviations and mirrored at the ends. Computed in float64, returned
    in the input's dtype."""
    radius = int(4.0 * sigma + 0.5)
    offsets = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    padded = np.pad(values.astype(np.float64), radius, mode="symmetric")
    return np.convolve(padded, kernel / kernel.sum(), mode="valid").astype(values.dtype)


def as_spectrum(eigenvalues: Tensor) -> Tensor:
    """Turns ascending eigenvalues into a descending spectrum, with negative rounding errors set to zero."""
    return eigenvalues.flip(-1).clamp(min=0)
