"""Reads `tables.yaml` once, when the first table is needed."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mambacl.errors import UserError
from mambacl.registry import did_you_mean

FILE = Path(__file__).parent / "tables.yaml"
QUOTED = re.compile(r"(?P<mean>\d+(?:\.\d+)?)(?:±(?P<std>\d+\.\d+))?(?P<mark>[†*]?)(?: \((?P<share>\d+\.\d+%)\))?")


@dataclass(frozen=True)
class Quoted:
    """One value as printed in the paper."""

    text: str
    mean: float
    std: float | None = None
    mark: str = ""
    """† or *, for a value with another source than its row"""


@dataclass(frozen=True)
class Row:
    """A method's values by benchmark and metric; None if the paper has none."""

    method: str
    source: str
    values: Mapping[tuple[str, str], Quoted | None]
    venue: str = ""
    cite: str = ""
    complexity: str = ""
    run: Mapping[str, Any] | None = None
    """what a run must be to belong here; None for a method that is not in mambacl"""


@dataclass(frozen=True)
class PaperTable:
    name: str
    label: str
    title: str
    columns: tuple[str, ...]
    metrics: tuple[str, ...]
    rows: tuple[Row, ...]
    backbone: str = ""
    """backbone of the paper's own rows; empty if it differs by row"""
    own: tuple[str, ...] = ()
    """metrics of our runs that the paper's table does not have"""

    @property
    def keys(self) -> list[tuple[str, str]]:
        """Benchmark and metric of each column, in the paper's order."""
        return [(column, metric) for column in self.columns for metric in self.metrics]


def table_names() -> list[str]:
    return list(_contents()["tables"])


def sources() -> dict[str, str]:
    """The meaning of each source and mark."""
    return dict(_contents()["sources"])


@functools.cache
def paper_table(name: str) -> PaperTable:
    known = _contents()["tables"]
    if name not in known:
        hint = did_you_mean(name, known) or " `mambacl paper` also draws the paper's figures."
        raise UserError(f"There is no table '{name}'.{hint} Known: {', '.join(known)}.")
    entry: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in known[name].items()}
    table = PaperTable(name, **{**entry, "rows": ()})
    values = [dict(zip(table.keys, map(_quoted, row["values"]), strict=True)) for row in entry["rows"]]
    rows = [Row(**{**row, "values": own}) for row, own in zip(entry["rows"], values, strict=True)]
    return dataclasses.replace(table, rows=tuple(rows))


def _quoted(text: str) -> Quoted | None:
    if text == "-":
        return None
    match = QUOTED.fullmatch(text)
    if match is None:
        raise ValueError(f"{FILE}: '{text}' is not a value such as 81.67±0.37.")
    std = match["std"]
    return Quoted(text, float(match["mean"]), None if std is None else float(std), match["mark"])


@functools.cache
def _contents() -> dict[str, Any]:
    """The file, with numbers as text."""
    return yaml.load(FILE.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
