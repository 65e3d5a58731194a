"""Options of the ridge classifier, the rules that give their defaults, and the width that a size limit allows."""

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from mambacl.classifiers import factor
from mambacl.classifiers.drift import DriftOptions
from mambacl.classifiers.gram import stored_values
from mambacl.classifiers.lift import Activation, Distribution
from mambacl.errors import UserError
from mambacl.options import Must, at_least, between

DEFAULT_UNITS = 5000
UNITS_PER_FEATURE = 32  # more than that per feature add little
FACTOR_BELOW = 200 * 10**6  # bytes; solving takes 2.8 times as long as with the units of int24, minutes on a CPU
SIZES = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
BYTES = {"float64": 8, "float32": 4, "int24": 3, "int16": 2}
NOT_NEGATIVE = Must("be at least 0", lambda value: isinstance(value, str) or value >= 0)

RULES: dict[str, dict[str, Any]] = {
    "ours": {
        "activation": "fourier",
        "bandwidth": 0.2,
        "distribution": "normal",
        "standardize": "first-task",
        "ridge": "auto",
    },
    "ranpac": {
        "width": 10000,
        "activation": "relu",
        "distribution": "unit-normal",
        "standardize": "none",
        "ridge": "current-task",
    },
    "acil": {
        "width": 8192,
        "activation": "relu",
        "distribution": "uniform",
        "standardize": "none",
        "ridge": 0.1,
        "storage": "float64",
    },
    "dpcr": {
        "width": 0,
        "activation": "none",
        "distribution": "normal",
        "standardize": "none",
        "ridge": 200.0,
        "storage": "float64",
        "unit": True,
    },
}


@dataclass(frozen=True)
class RidgeOptions(DriftOptions):
    """Options of the ridge classifier. Null is the rule's value."""

    rule: Literal["ours", "ranpac", "acil", "dpcr"] = "ours"
    """where the other options' defaults come from: ours, RanPAC's, ACIL's or DPCR's"""
    width: Annotated[int, NOT_NEGATIVE] | Literal["auto"] | None = None
    """units of the lift; 0: no lift; auto: as many as state_limit allows; null: auto if there is a state_limit,
    otherwise the rule's (ours: 5000, or 32 per feature if that is less)"""
    activation: Activation | None = None
    """activation of the lift; fourier: the cosine and the sine of each projection"""
    bandwidth: Annotated[float, Must("be positive", lambda value: value > 0)] | None = None
    """factor of the lift's weights: with fourier, the inverse of the Gaussian kernel's width (ours: 0.2, RanPAC's and
    ACIL's: 1)"""
    distribution: Distribution | None = None
    """of the lift's weights: normal with variance 1 / features, unit-normal, or uniform as in a linear layer"""
    standardize: Literal["none", "first-task"] | None = None
    """first-task: subtract each feature's mean in the first task and divide by its deviation"""
    ridge: Annotated[float, NOT_NEGATIVE] | Literal["auto", "current-task"] | None = None
    """the ridge; auto: by generalised cross-validation over the images of all tasks so far; current-task: by a share of
    the current task's images when it ends, as RanPAC does (auto before the first task ends)"""
    held_out: Annotated[float, between(0.01, 0.99)] = 0.2
    """with ridge current-task: the share of the task's images, its last ones, that judge the ridge"""
    balanced: bool = False
    """give every class the same weight in Q, whatever its number of images"""
    unit: bool | None = None
    """divide each class's weights by their length, as DPCR does (the other rules: false)"""
    storage: Literal["float32", "float64", "int24", "int16", "factor"] | None = None
    """how G is stored; int24 takes three quarters of the space of float32, int16 half of it, but int16 needs a larger
    ridge; factor, the Cholesky factor with 12 bits per value, takes three eighths; null: float64 with the rules acil
    and dpcr; ours with a state_limit: factor below 200MB if width, ridge, blocks and drift are the defaults, otherwise
    int24; else float32"""
    blocks: Annotated[int, at_least(1)] = 1
    """independent lifts that share the width, with one G each; their scores are averaged"""
    state_limit: str | None = None
    """largest size of the state, e.g. 500MB; the features that `features.kept` keeps come on top"""
    expected_classes: Annotated[int, at_least(1)] = 200
    """number of classes for which state_limit leaves room"""
    seed: Annotated[int, at_least(0)] = 0
    """seed of the lift's weights"""

    def check(self) -> None:
        super().check()
        if self.drift != "none" and self.blocks > 1:
            raise UserError(
                "A ridge classifier with several blocks cannot follow a drift: set blocks to 1 or drift to none."
            )
        if self.storage == "factor" and self.blocks > 1:
            raise UserError("The storage factor is for one block: set blocks to 1 or storage to int24.")
        if self.state_limit is not None:
            parsed_size(self.state_limit)
        elif self.width == "auto":
            raise UserError("The width auto of a ridge classifier needs a state_limit, such as 500MB.")


def parsed_size(text: str) -> int:
    """Bytes of a text such as "500MB"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kMG]B)\s*", text)
    if found is None:
        raise UserError(f"state_limit must be a number with kB, MB or GB, such as 500MB, got '{text}'.")
    return int(float(found[1]) * SIZES[found[2]])


def state_size(features: int, units: int, storage: str, blocks: int, classes: int) -> int:
    """Bytes of the state at rest, or slightly more."""
    each = 8 if storage == "float64" else 4
    if storage == "factor":
        gram = sum(factor.sections(units))
    else:
        gram = BYTES[storage] * stored_values(units, blocks) + (8 * units if storage.startswith("int") else 0)
    return gram + 2 * each * (units * classes + features) + 8 * classes + 64


def default_storage(options: RidgeOptions) -> str:
    """If the rule has none. What a user sets for the lift of today's width keeps int24: a ridge may be too small for a
    factor, blocks have none, and following a drift takes 120 bytes per unit squared."""
    if options.rule != "ours" or options.state_limit is None:
        return "float32"
    small = parsed_size(options.state_limit) < FACTOR_BELOW
    plain = options.width in (None, "auto") and options.ridge in (None, "auto")
    return "factor" if small and plain and options.blocks == 1 and options.drift == "none" else "int24"


def resolved(options: RidgeOptions, features: int) -> RidgeOptions:
    """The options with the rule's values and a number as width."""
    rule = dict(RULES[options.rule])
    if options.state_limit is not None:
        rule |= {"width": "auto"}
    rule.setdefault("storage", default_storage(options))
    rule.setdefault("bandwidth", 1.0)
    rule.setdefault("unit", False)
    rule.setdefault("width", min(DEFAULT_UNITS, UNITS_PER_FEATURE * features))
    options = replace(options, **{name: value for name, value in rule.items() if getattr(options, name) is None})
    if options.state_limit is None:
        return options
    limit = parsed_size(options.state_limit)

    def size(units: int) -> int:
        return state_size(features, units, str(options.storage), options.blocks, options.expected_classes)

    if options.width == "auto":
        options = replace(options, width=largest_within(limit, size))
    units = int(options.width or 0) or features
    if size(units) > limit:
        raise UserError(
            f"A ridge classifier with {units} units and room for {options.expected_classes} classes needs "
            f"{size(units) / 1e6:.1f} MB, more than the state_limit of {options.state_limit}: raise it, or set a "
            "smaller width, expected_classes or storage."
        )
    return options


def largest_within(limit: int, size: Any) -> int:
    """The largest number whose size is within the limit, at least 1. `size` is a rising function."""
    low, high = 1, 2
    while size(high) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle)
    return low
