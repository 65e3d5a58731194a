"""Which features a classifier gets. No PyTorch here: options are checked before it is imported."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mambacl.options import Must, Options, at_least

POOLS = ("class", "mean", "std", "quadrants")


def _are_depths(depths: str | int | list[int]) -> bool:
    if isinstance(depths, str):
        return depths in ("auto", "final", "all")
    return depths > 0 if isinstance(depths, int) else bool(depths)


@dataclass(frozen=True)
class FeatureOptions(Options):
    """What a classifier sees."""

    depths: Annotated[
        int | list[int] | str, Must("be auto, final, all, a number of depths or a list of their indices", _are_depths)
    ] = "auto"
    """depths of the backbone whose pooled tokens are features beside the final one: final for none of them, all, a
    number of evenly spaced ones, or a list of indices from 0; auto is the method's"""
    pool: Annotated[
        list[str], Must(f"be a list of {', '.join(POOLS)}", lambda pool: bool(pool) and set(pool) <= set(POOLS))
    ] = field(default_factory=lambda: ["class", "mean"])
    """what becomes of a depth's tokens: the class token, the mean and the standard deviation over the others, and their
    means over the four quadrants of the image"""
    mirror: Literal["none", "learning", "both"] = "none"
    """learning: the classifier is computed from each image and its mirror image; both: also at test, where the scores
    of the two are added, which takes twice as long"""
    kept: Annotated[int, at_least(0)] = 500
    """images whose features stay in the state, drawn from all tasks, to calibrate probabilities with; 0: none, and no
    calibration. An image takes about as many bytes as it has features, twice that with mirror images"""
