"""How many directions of a spectrum count as null: the rules, by name.

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
    """R, the number of trailing directions that count as null, by one of the rules:

    - "corner": the paper's formula, R = J - argmax_j (l_{j-1} - 2 l_j + l_{j+1}); the corner itself counts as null
    - "smoothed-corner": what the public code does, in the precision of the spectrum given (the public code's is
    float32)
    - "energy:0.99": all but the leading directions that hold that share of the trace
    - "fraction:0.5": that share of the directions
    - "tolerance:1e-12": those whose eigenvalue is at most that share of the largest, zero but for rounding

    All directions of a spectrum of zeros are null, except by "fraction".
    """
    values = _values(spectrum)
    if values.ndim != 1 or len(values) == 0:
        raise UserError(f"A spectrum is a vector with at least one value, got shape {values.shape}.")
    if not np.isfinite(values).all():
        raise UserError("A spectrum holds NaN or infinite values: check the features for overflow.")
    count = parse_rule(rule)
    return len(values) if not values.any() and not rule.startswith("fraction") else count(values)


def null_ranks(spectra: Sequence[Tensor | Spectrum], rule: str, together: bool = False) -> list[int]:
    """The ranks of several spectra: each by itself, or `together`, by one threshold for all of them, each taken
    relative to its trace.

    A spectrum without any corner, where the paper's formula would protect a single direction, is protected whole.
    """
    if not together or rule.startswith("fraction"):
        return [0 if rule == "corner" and _flat(spectrum) else null_rank(spectrum, rule) for spectrum in spectra]
    arrays = [_values(spectrum) for spectrum in spectra]
    if not all(np.isfinite(values).all() for values in arrays):
        raise UserError("A spectrum holds NaN or infinite values: check the features for overflow.")
    ranks = [len(values) for values in arrays]  # of zeros, all is null
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
    """All values alike, to rounding, and not zero."""
    high, low = float(spectrum[0]), float(spectrum[-1])
    return high > 0 and high - low <= 1e-6 * high


def parse_rule(rule: str) -> Callable[[Spectrum], int]:
    """The function behind a rule's name; a wrong name or share is a `UserError`."""
    name, share = parse_rank(rule)
    if share is None:
        return RULES[name]
    return lambda spectrum: RULES[name](spectrum, share)


def corner(spectrum: Spectrum) -> int:
    if len(spectrum) < 3:
        return len(spectrum) - 1
    return len(spectrum) - (int(np.argmax(second_difference(spectrum))) + 1)


def smoothed_corner(spectrum: Spectrum) -> int:
    """From 128 values on, the corner of the smoothed spectrum, away from both ends; then a rule for ties.

    The corner's value is the threshold, and the null directions start at the *last* index that reaches it.
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


RULES: dict[str, Callable[..., int]] = {
    "corner": corner,
    "smoothed-corner": smoothed_corner,
    "energy": energy,
    "fraction": fraction,
    "tolerance": tolerance,
}


def second_difference(values: Spectrum) -> Spectrum:
    """l_{j-1} - 2 l_j + l_{j+1} as a difference of slopes, in the precision of the values."""
    slopes = values[:-1] - values[1:]
    return slopes[:-1] - slopes[1:]


def gaussian_filter(values: Spectrum, sigma: float) -> Spectrum:
    """Gaussian smoothing cut off at four deviations, mirrored at the ends; summed in float64, kept in the input's
    precision."""
    radius = int(4.0 * sigma + 0.5)
    offsets = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    padded = np.pad(values.astype(np.float64), radius, mode="symmetric")
    return np.convolve(padded, kernel / kernel.sum(), mode="valid").astype(values.dtype)


def as_spectrum(eigenvalues: Tensor) -> Tensor:
    """Ascending eigenvalues, with the rounding below zero removed, as a descending spectrum."""
    return eigenvalues.flip(-1).clamp(min=0)
