"""The options that `mambacl tune` searches, and the points that it tries. Pure functions; no run is trained here."""

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from mambacl.config import RunConfig
from mambacl.errors import UserError
from mambacl.options import Option, OptionError, read_yaml, walk
from mambacl.sweeps.plan import points

DIGITS = 3  # of a drawn number: more would only be noise
CLOSE = 0.05  # share of a range, on its logarithmic scale, that counts as its end
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
Point = dict[str, Any]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, drawn uniformly on a logarithmic scale."""

    low: float
    high: float
    whole: bool = False
    """whole numbers only"""

    def at(self, share: float) -> float | int:
        """The number at this share of the way from the lowest to the highest."""
        value = self.low * (self.high / self.low) ** share
        return round(value) if self.whole else float(f"{value:.{DIGITS}g}")

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"


Space = Mapping[str, "list[Any] | Range"]


def space_of(search: Mapping[str, Any]) -> dict[str, "list[Any] | Range"]:
    """The values of each option: a list, a pair of numbers for a range, or the text of the command line."""
    if not search:
        raise UserError("Name what to search, as in --search training.lr=1e-4,3e-4,1e-3.")
    return {name: _values(name, given) for name, given in search.items()}


def parse(words: Sequence[str]) -> dict[str, str]:
    """What the command line gives: "training.lr=1e-4,3e-4", or "training.lr=1e-5:1e-2" for a range."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip().removeprefix("--")
        if not (name and equals and text.strip()):
            raise UserError(f"--search takes OPTION=VALUE,VALUE or OPTION=LOW:HIGH, got '{word}'.")
        if name in found:
            raise UserError(f"--search has {name} twice: put all its values into one.")
        found[name] = text.strip()
    return found


def _values(name: str, given: Any) -> "list[Any] | Range":
    if isinstance(given, tuple) and len(given) == 2:
        return _range(name, *given)
    if isinstance(given, str):
        ends = re.fullmatch(f"({NUMBER}):({NUMBER})", given)
        if ends:
            return _range(name, read_yaml(ends[1]), read_yaml(ends[2]))
        try:
            given = read_yaml(f"[{given}]")
        except (yaml.YAMLError, ValueError):
            raise UserError(f"The values of {name} cannot be read: separate them by commas, got '{given}'.") from None
    if not isinstance(given, list) or not given:
        raise UserError(f"The search takes a list of values or a range for {name}, got {given!r}.")
    return given


def _range(name: str, low: Any, high: Any) -> Range:
    if not all(isinstance(end, (int, float)) for end in (low, high)) or not 0 < low < high < math.inf:
        raise UserError(
            f"The range of {name} must go from a positive number to a larger one, as in 1e-5:1e-2, got {low}:{high}."
        )
    option = _options().get(name)
    whole = isinstance(low, int) and isinstance(high, int) and (option is None or option.kind is not float)
    return Range(low, high, whole)


@cache
def _options() -> dict[str, Option]:
    return dict(walk(RunConfig))


def chosen_points(space: Space, trials: int | None, seed: int = 0) -> list[Point]:
    """The points to try: all of a grid, or as many random ones as `trials`. The first ones stay the same if there are
    to be more."""
    ranges = [name for name, values in space.items() if isinstance(values, Range)]
    if trials is None:
        if ranges:
            raise UserError(f"{ranges[0]} has a range, from which points are drawn: say how many with --trials N.")
        return points({name: values for name, values in space.items() if isinstance(values, list)})
    found: list[Point] = []
    for number in range(100 * trials):  # a small grid has fewer points
        rng = random.Random(f"{seed} {number}")
        point = {name: _drawn(values, rng.random()) for name, values in space.items()}
        if point not in found:
            found.append(point)
        if len(found) == trials:
            break
    return found


def _drawn(values: "list[Any] | Range", share: float) -> Any:
    return values.at(share) if isinstance(values, Range) else values[int(share * len(values))]


def ends(space: Space, point: Point) -> list[tuple[str, str, Any]]:
    """The options whose value in this point is the smallest or largest that was searched, although the option allows
    others beyond it: name, "smallest" or "largest", value."""
    found = []
    for name, values in space.items():
        value = point[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if isinstance(values, Range):
            low, high = values.at(CLOSE), values.at(1 - CLOSE)
        else:
            known = [other for other in values if isinstance(other, (int, float))]
            low, high = min(known), max(known)
            if low == high:
                continue
        beyond: tuple[str, Callable[[float], float]] | None = None
        if value <= low:
            beyond = "smallest", (lambda v: v - 1) if isinstance(value, int) else (lambda v: v / 2)
        elif value >= high:
            beyond = "largest", (lambda v: v + 1) if isinstance(value, int) else (lambda v: v * 2)
        if beyond is not None and _allowed(name, beyond[1](value)):
            found.append((name, beyond[0], value))
    return found


def _allowed(name: str, value: float) -> bool:
    option = _options().get(name)
    try:
        return option is None or option.check(value) is not None
    except OptionError:
        return False


def first_best(values: Sequence[float | None], better: str) -> int | None:
    """The place of the best value, of equals the first; None if there is none."""
    known = [(value if better == "max" else -value, -place) for place, value in enumerate(values) if value is not None]
    return -max(known)[1] if known else None


def as_json(space: Space) -> dict[str, Any]:
    return {
        name: {"low": values.low, "high": values.high, "whole": values.whole} if isinstance(values, Range) else values
        for name, values in space.items()
    }
