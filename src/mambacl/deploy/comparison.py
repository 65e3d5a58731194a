"""What `mambacl compare` finds, and the limits that an update must keep. Needs no PyTorch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from mambacl.config import parse_yaml
from mambacl.deploy.paired import Pairs
from mambacl.errors import UserError
from mambacl.files import expanded
from mambacl.options import Options, between, build_config, finite_from

Rate = Annotated[float | None, between(0, 1)]
Points = Annotated[float | None, between(0, 100)]
Amount = Annotated[float | None, finite_from(0)]


@dataclass(frozen=True)
class Limits(Options):
    """What an update may cost; null is no limit."""

    max_negative_flips: Rate = None
    """largest share of old classes' images right before, wrong now"""
    max_drop: Points = None
    """largest loss of accuracy on the old classes, in points"""
    max_class_drop: Points = None
    """largest loss of accuracy on an old class, in points"""
    max_drift: Amount = None
    """largest relative change of a block's output"""
    max_slowdown: Amount = None
    """most additional time per image: 0.2 is a fifth more"""


def read_limits(path: str | Path) -> dict[str, Any]:
    """The limits in a YAML file, by name; max-drop and max_drop are the same."""
    place = expanded(path)
    try:
        text = place.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"The file {path} with limits does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): write it as UTF-8 text.") from None
    values = {str(name).replace("-", "_"): value for name, value in parse_yaml(text, str(path)).items()}
    return dataclasses.asdict(build_config(Limits, values, str(path)))


@dataclass(frozen=True)
class Side:
    """One of the two models. Confidence and calibration are on the images of the classes that both know."""

    path: str
    method: str
    backbone: str
    classes: int
    confidence: float
    """mean probability of the best class"""
    calibration_error: float
    """expected calibration error in 15 bins"""
    images_per_second: float
    """of the model alone, without reading images"""
    bytes: int
    """of the tensors that it needs to predict"""


@dataclass(frozen=True)
class ClassPairs:
    """One class of the test folder."""

    name: str
    is_new: bool
    """whether only the new model knows it"""
    pairs: Pairs


@dataclass(frozen=True)
class Flip:
    """An image that was right before and is wrong now."""

    file: str
    """relative to the test folder"""
    truth: str
    predicted: str


@dataclass(frozen=True)
class Comparison:
    """An old and a new model on the same test images; `mambacl.compare` makes it."""

    old: Side
    new: Side
    test: str
    shared: Pairs
    """images of the classes that both models know"""
    all: Pairs
    """all images; the old model is always wrong on new classes"""
    classes: tuple[ClassPairs, ...]
    flips: tuple[Flip, ...]
    """all negative flips"""
    drift: Mapping[str, float] | None
    """relative change of each block's pooled output, |new - old| / |old|; None if backbones or input sizes differ"""
    unreadable: tuple[str, ...] = ()
    """one sentence per image that could not be read; these count nowhere"""
    untested: tuple[str, ...] = ()
    """classes of the old model without test images"""

    @property
    def drop(self) -> float:
        """Loss of accuracy on the classes that both know, in points; negative if it rose."""
        return _points_lost(self.shared)

    @property
    def slowdown(self) -> float:
        """Time per image of the new model relative to the old one, minus 1."""
        return self.old.images_per_second / self.new.images_per_second - 1

    def broken(self, limits: Limits | Mapping[str, Any]) -> list[str]:
        """One sentence per limit that the new model exceeds; none if it may be shipped."""
        bounds = limits if isinstance(limits, Limits) else build_config(Limits, limits, "limits")
        found: list[str] = []
        pairs, most = self.shared, bounds.max_negative_flips
        if most is not None and pairs.negative_flip_rate > most:
            found.append(
                f"{pairs.lost} of {pairs.images} images of old classes were right before and are wrong now "
                f"({pairs.negative_flip_rate:.2%}), more than the limit of {most:.2%}."
            )
        if bounds.max_drop is not None and self.drop > bounds.max_drop:
            found.append(
                f"The accuracy on the old classes fell by {self.drop:.2f} points, more than the limit of "
                f"{bounds.max_drop:g}."
            )
        if bounds.max_class_drop is not None:
            found += self._classes_that_fell(bounds.max_class_drop)
        if bounds.max_drift is not None:
            found += self._drifted(bounds.max_drift)
        if bounds.max_slowdown is not None and self.slowdown > bounds.max_slowdown:
            found.append(
                f"The new model takes {self.slowdown:.0%} more time per image, more than the limit of "
                f"{bounds.max_slowdown:.0%}."
            )
        return found

    def _classes_that_fell(self, most: float) -> list[str]:
        falls = [(_points_lost(row.pairs), row.name) for row in self.classes if not row.is_new and row.pairs.images]
        past = sorted((fall for fall in falls if fall[0] > most), reverse=True)
        if not past:
            return []
        points, name = past[0]
        others = f"; {len(past) - 1} more of the classes are past it" if len(past) > 1 else ""
        return [f"The accuracy on '{name}' fell by {points:.1f} points, more than the limit of {most:g}{others}."]

    def _drifted(self, most: float) -> list[str]:
        if self.drift is None:
            return ["The drift is not known, because the backbones or their input sizes differ: leave out max_drift."]
        block = max(self.drift, key=self.drift.__getitem__, default="")
        if not block or self.drift[block] <= most:
            return []
        return [f"The output of {block} changed by {self.drift[block]:.2%}, more than the limit of {most:.2%}."]

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file: the counts and the figures made from them. Rates are shares from 0 to 1."""
        return {
            "test": self.test,
            "old": dataclasses.asdict(self.old),
            "new": dataclasses.asdict(self.new),
            "shared": _figures(self.shared),
            "all": _figures(self.all),
            "drop": self.drop,
            "slowdown": self.slowdown,
            "classes": [{"name": row.name, "is_new": row.is_new, **_figures(row.pairs)} for row in self.classes],
            "drift": None if self.drift is None else dict(self.drift),
            "flips": [dataclasses.asdict(flip) for flip in self.flips],
            "unreadable": list(self.unreadable),
            "untested": list(self.untested),
        }


def _points_lost(pairs: Pairs) -> float:
    """From the counts, so that 1 of 200 images is 0.5 points and not a rounding error more."""
    return 100 * (pairs.lost - pairs.gained) / pairs.images if pairs.images else math.nan


def _figures(pairs: Pairs) -> dict[str, Any]:
    low, high = pairs.interval
    figures = {
        "old_accuracy": pairs.old_accuracy,
        "new_accuracy": pairs.new_accuracy,
        "change": pairs.change,
        "change_low": low,
        "change_high": high,
        "negative_flip_rate": pairs.negative_flip_rate,
        "positive_flip_rate": pairs.positive_flip_rate,
        "p_value": pairs.p_value,
    }
    known = {name: None if math.isnan(value) else value for name, value in figures.items()}  # JSON has no NaN
    return {"images": pairs.images, **dataclasses.asdict(pairs), **known}
