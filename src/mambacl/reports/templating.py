"""Renders pages from `templates/`: one template per page, with shared macros and a shared style sheet.

Python passes plain data; the templates have all tags and sentences. Jinja2 escapes the data.
"""

import base64
import functools
import re
import shlex
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mambacl.reports.tables import MINUS, MISSING, one_decimal
from mambacl.scenarios import SCENARIOS
from mambacl.training.metrics import METRICS


@dataclass(frozen=True)
class Picture:
    """A figure, both a file in `figures/` and part of the page."""

    name: str
    png: bytes

    @property
    def source(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")

    @property
    def width(self) -> int:
        """In CSS pixels, of which an inch has 96; the file has 150."""
        return int.from_bytes(self.png[16:20], "big") * 16 // 25

    @property
    def height(self) -> int:
        return int.from_bytes(self.png[20:24], "big") * 16 // 25


@dataclass(frozen=True)
class Page:
    html: str
    pictures: tuple[Picture, ...]


def render(template: str, **data: Any) -> Page:
    html = _environment().get_template(template).render(contents=[], **data)
    return Page(html, tuple(_pictures(data)))


def _pictures(data: Any) -> list[Picture]:
    """All pictures in a page's data, in order."""
    if isinstance(data, Picture):
        return [data]
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [picture for value in inner for picture in _pictures(value)]


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = round(seconds / 60), int(round(seconds / 60) // 60)
    return f"{hours} h {minutes - 60 * hours} min" if hours else f"{int(seconds // 60)} min {int(seconds % 60)} s"


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("mambacl.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {"number": _number, "duration": duration, "shell": lambda words: shlex.quote(str(words))}
    environment.globals |= {"metric": METRICS.get, "missing": MISSING, "scenarios": SCENARIOS}
    return environment


def _printable(value: Any) -> Any:
    """Replaces control characters, which HTML does not allow, by a visible mark."""
    if isinstance(value, Markup):
        return value
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", str(value))


def _number(value: float) -> str:
    return one_decimal(value).replace("-", MINUS) if np.isfinite(value) else MISSING
