"""Renders pages from `templates/`: one template per page, with shared macros and a shared style sheet.

Python passes plain data; the templates have all tags and sentences. Jinja2 escapes the data.
"""

import base64
import functools
import hashlib
import re
import shlex
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mambacl.reports.charts import Chart, draw
from mambacl.reports.rendering import csv_address
from mambacl.reports.tables import MINUS, MISSING, one_decimal
from mambacl.scenarios import SCENARIOS
from mambacl.training.metrics import METRICS


@dataclass(frozen=True)
class Page:
    html: str
    charts: tuple[Chart, ...]


def render(template: str, **data: Any) -> Page:
    charts = _charts(data)
    draw(charts)
    return Page(_environment().get_template(template).render(contents=[], **data), tuple(charts))


def _charts(data: Any) -> list[Chart]:
    """All charts in a page's data, in order."""
    if isinstance(data, Chart):
        return [data]
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [chart for value in inner for chart in _charts(value)]


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
    environment.filters |= {
        "csv": csv_address,
        "number": _number,
        "duration": duration,
        "breakable": _breakable,
        "shell": lambda words: shlex.quote(str(words)),
    }
    environment.globals |= {"metric": METRICS.get, "missing": MISSING, "scenarios": SCENARIOS}
    script = (files("mambacl.reports") / "templates" / "chart.js").read_text(encoding="utf-8")
    environment.globals |= {"script": Markup(script), "script_digest": _digest(script)}
    return environment


def _digest(script: str) -> str:
    """What the page's security policy says about the only script that may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")


def _printable(value: Any) -> Any:
    """Replaces control characters, which HTML does not allow, by a visible mark."""
    if isinstance(value, Markup):
        return value
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", str(value))


def _breakable(text: Any) -> Markup:
    """Lets narrow screens break names such as stream.train_per_class and Sandal/001.png where they have a joint."""
    joint = r"((?<=[_/])|(?<=\.)(?=[A-Za-z]))(?![^<>]*>)"  # not within a tag
    return Markup(re.sub(joint, "<wbr>", escape(_printable(text))))


def _number(value: float) -> str:
    return one_decimal(value).replace("-", MINUS) if np.isfinite(value) else MISSING
