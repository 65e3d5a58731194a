"""The spectra of a run by feature, one spectrum per block; and figures of them, and of how much each block protects.

A run stores the role of each part. For a run that does not, the role follows from the part's name, e.g.
`blocks.0.mixer.x_proj.weight[0:12]`: the rows of x_proj are W_delta, W_B and W_C, in that order, and the setting says
which of them are projected.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from mambacl.nullspace.settings import FEATURES
from mambacl.reports.figures import (
    COLOURS,
    INK,
    MARKERS,
    NULL_INK,
    NULL_TINT,
    QUIET,
    frame,
    legend_below,
    power_of_ten,
    styled,
)
from mambacl.reports.marks import mark
from mambacl.reports.runs import Floats, RunRecord, Spectrum

ROWS_OF_X_PROJ = ("W_delta", "W_B", "W_C")
NAME = re.compile(r"(?:(?P<block>.*\d)\.)?(?P<parameter>[^\[]+)(?P<rows>\[.*\])?")
FLOOR = 1e-18  # smallest relative eigenvalue to draw: below it, float64 has no resolution
MAX_POINTS = 240  # per curve: a panel is no more pixels wide
LISTED, MARKED = 60, 12  # directions of a block in the table of numbers, and to hover over


@dataclass(frozen=True)
class FeatureSpectra:
    """The spectra of one feature in all blocks. Parts that share the feature appear once, under all their names."""

    roles: tuple[str, ...]
    feature: str | None
    spectra: Mapping[str, Spectrum]
    """by block number, as in "3" or "1.0", in the model's order"""

    @property
    def title(self) -> str:
        return " and ".join(self.roles)

    @property
    def slug(self) -> str:
        """The roles, for a file name."""
        return re.sub(r"[^A-Za-z0-9]+", "-", "-".join(self.roles)).strip("-").lower()

    @property
    def meaning(self) -> str:
        """The feature in words; empty if the setting is unknown."""
        return FEATURES.get(self.feature or "", "")


def spectra_by_feature(record: RunRecord) -> list[FeatureSpectra]:
    """The spectra of each feature, in the order of the roles in a block."""
    if record.parts:
        return _as_described(record)
    found: dict[tuple[str, ...], dict[str, Spectrum]] = {}
    for block, roles in _by_block(record).items():
        for shared, spectrum in _shared(roles).items():
            found.setdefault(shared, {})[block] = spectrum
    return [FeatureSpectra(roles, _feature(roles, record.setting), spectra) for roles, spectra in found.items()]


def _as_described(record: RunRecord) -> list[FeatureSpectra]:
    """From the roles stored with the spectra: parts of a block with the same feature share its spectrum."""
    shared: dict[tuple[str, str], list[str]] = {}  # block and feature -> kinds
    spectra: dict[tuple[str, str], Spectrum] = {}
    for name, part in record.parts.items():
        if name in record.spectra:
            key = part["block"], part["feature"]
            spectra[key] = record.spectra[name]
            if part["kind"] not in shared.setdefault(key, []):
                shared[key].append(part["kind"])
    found: dict[tuple[tuple[str, ...], str], dict[str, Spectrum]] = {}
    for (block, feature), kinds in shared.items():
        number = ".".join(re.findall(r"\d+", block)) or block
        direction = re.search(r"\((.*)\)", feature)
        roles = tuple(kind if direction is None else f"{kind} ({direction[1]})" for kind in kinds)
        found.setdefault((roles, feature.partition("(")[0]), {})[number] = spectra[block, feature]
    return [FeatureSpectra(roles, feature, by_block) for (roles, feature), by_block in found.items()]


def _by_block(record: RunRecord) -> dict[str, dict[str, Spectrum]]:
    """Block number -> role -> spectrum."""
    found: dict[tuple[str, str], list[tuple[str, Spectrum]]] = {}  # block and parameter -> its rows
    for name in sorted(record.spectra, key=_natural):
        match = NAME.fullmatch(name)
        block, parameter, rows = (
            (match["block"] or "", match["parameter"], match["rows"] or "") if match else ("", name, "")
        )
        found.setdefault((block, parameter), []).append((rows, record.spectra[name]))
    blocks: dict[str, dict[str, Spectrum]] = {}
    for (block, parameter), parts in sorted(found.items(), key=lambda item: (_natural(item[0][0]), _place(item[0][1]))):
        number = ".".join(re.findall(r"\d+", block)) or block
        roles = _roles(parameter, [rows for rows, _ in parts], record.setting)
        for role, (_, spectrum) in zip(roles, parts, strict=True):
            blocks.setdefault(number, {})[role] = spectrum
    return blocks


def _roles(parameter: str, rows: list[str], setting: Mapping[str, Any]) -> list[str]:
    """The paper's names for the parts of a parameter; if unknown, the parameter's name and rows."""
    name = parameter.removesuffix(".weight").rpartition(".")[2]
    if name == "A_log":
        return ["A"] * len(rows)
    if name == "out_proj":
        return ["out"] * len(rows)
    projected = [kind for kind in ROWS_OF_X_PROJ if _is_projected(setting.get(kind))]
    kinds = projected if len(projected) == len(rows) else list(ROWS_OF_X_PROJ) if len(rows) == 3 else None
    if name.startswith("x_proj") and kinds is not None:
        return [kind if name in ("x_proj", "x_proj_weight") else f"{kind} ({name})" for kind in kinds]
    return [name + row for row in rows]


def _shared(roles: Mapping[str, Spectrum]) -> dict[tuple[str, ...], Spectrum]:
    """Merges roles with the same spectrum and rank."""
    clusters: list[tuple[list[str], Spectrum]] = []
    for role, spectrum in roles.items():
        for names, other in clusters:
            if spectrum.rank == other.rank and np.array_equal(spectrum.values, other.values):
                names.append(role)
                break
        else:
            clusters.append(([role], spectrum))
    return {tuple(names): spectrum for names, spectrum in clusters}


def _feature(roles: tuple[str, ...], setting: Mapping[str, Any]) -> str | None:
    rule = setting.get(roles[0].partition(" ")[0])
    return str(rule["feature"]) if isinstance(rule, Mapping) and "feature" in rule else None


def _is_projected(rule: Any) -> bool:
    return isinstance(rule, Mapping) and bool(rule.get("trains")) and bool(rule.get("projected"))


def _natural(text: str) -> list[tuple[int, int, str]]:
    """For natural sorting: blocks.2 before blocks.10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"\d+|\D+", text)]


def _place(parameter: str) -> int:
    """For sorting in the paper's order: x_proj, A_log, out_proj."""
    return next((i for i, word in enumerate(("x_proj", "A_log", "out_proj")) if word in parameter), 3)


# Figures


def thinned(size: int, most: int) -> NDArray[np.int64]:
    """Directions spread over a spectrum, denser at its start; the first and the last are always there."""
    return np.unique(np.round(np.geomspace(1, size, min(most, size))).astype(np.int64))


@dataclass(frozen=True)
class Panel:
    """The small plot of one block: its place in the figure, in inches, and its scales."""

    left: float
    bottom: float
    width: float
    height: float
    size: int
    """number of directions"""
    lowest: float
    """the eigenvalue at the bottom"""
    log_x: bool

    def x(self, direction: ArrayLike) -> Floats:
        low, high = (0.9 if self.log_x else 0.5), self.size + 0.5
        place = np.asarray(direction, dtype=np.float64)
        if self.log_x:
            low, high, place = np.log(low), np.log(high), np.log(np.maximum(place, low))
        return self.left + self.width * (place - low) / (high - low)

    def y(self, value: ArrayLike) -> Floats:
        low, high = np.log(self.lowest), np.log(3.0)
        return self.bottom + self.height * (np.log(value) - low) / (high - low)

    def curve(self, values: Floats) -> Floats:
        """The spectrum as points in the figure, (points, 2); a long one is thinned out."""
        count = len(values)
        positions = np.geomspace(1, count, MAX_POINTS) if self.log_x else np.linspace(1, count, MAX_POINTS)
        shown = np.unique(np.round(positions).astype(int)) if count > MAX_POINTS else np.arange(1, count + 1)
        return np.column_stack([self.x(shown), self.y(values[shown - 1])])

    def directions(self) -> list[int]:
        """The ticks of the horizontal axis."""
        locator = LogLocator(numticks=5) if self.log_x else MaxNLocator(3, integer=True)
        return [round(tick) for tick in locator.tick_values(1, self.size) if 1 <= tick <= self.size]


@styled
def spectra_panels(entry: FeatureSpectra) -> Figure:
    """One small panel per block: eigenvalues relative to the largest, with the null directions shaded.

    All panels are drawn on the figure itself: one `Axes` per panel would take ten times as long.
    """
    count = len(entry.spectra)
    columns = min(count, 8 if count > 24 else 6 if count > 8 else 4)
    rows = -(-count // columns)
    width, height = max(5.6, 1.6 * columns), max(2.6, 1.42 * rows + 1.0)
    figure = Figure(figsize=(width, height))
    across, down = (width - 0.62) / columns, (height - 0.88) / rows
    relative = [relative_spectrum(spectrum.values) for spectrum in entry.spectra.values()]
    lowest = max(min((float(values[-1]) for values in relative), default=FLOOR), FLOOR) / 3
    kept_shares = [1 - spectrum.rank / len(spectrum.values) for spectrum in entry.spectra.values()]
    early = float(np.median(kept_shares)) < 0.25  # a logarithmic axis makes room for corners among the first directions
    same_size = len({len(values) for values in relative}) == 1
    curves, corners, shades, rules = [], [], [], []

    def write(x: float, y: float, words: str, size: float = 7.5, **style: object) -> None:
        figure.text(x / width, y / height, words, fontsize=size, **style)  # type: ignore[arg-type]

    for i, (block, spectrum) in enumerate(entry.spectra.items()):
        row, column = divmod(i, columns)
        left, bottom = 0.62 + column * across, height - 0.36 - (row + 1) * down
        panel = Panel(left, bottom, across - 0.14, down - 0.36, len(spectrum.values), lowest, early)
        right, top = left + panel.width, bottom + panel.height
        corner = float(panel.x(panel.size - spectrum.rank + 0.5))
        shades.append([(corner, bottom), (right, bottom), (right, top), (corner, top)])
        corners.append([(corner, bottom), (corner, top)])
        curves.append(panel.curve(relative[i]))
        some = thinned(panel.size, MARKED)
        said = [f"block {block}, direction {n}: {relative[i][n - 1]:.2e} of the largest" for n in some]
        mark(figure, panel.x(some), panel.y(relative[i][some - 1]), said, transform=figure.dpi_scale_trans)
        rules.append([(left, top), (left, bottom), (right, bottom)])
        write(left, top + 0.05, block, 8.5, fontweight="bold")
        write(right, top + 0.05, f"{spectrum.rank} of {panel.size}", ha="right", color=NULL_INK)
        for value in LogLocator(numticks=4).tick_values(lowest, 3):
            if lowest <= value <= 3:
                y = float(panel.y(value))
                rules.append([(left - 0.03, y), (left, y)])
                if column == 0:
                    write(left - 0.06, y, power_of_ten(value), ha="right", va="center_baseline")
        for direction in panel.directions():
            x = float(panel.x(direction))
            rules.append([(x, bottom), (x, bottom - 0.03)])
            if not same_size or i + columns >= count:
                write(x, bottom - 0.06, str(direction), ha="center", va="top")
    inches = figure.dpi_scale_trans
    figure.add_artist(PolyCollection(shades, facecolors=NULL_TINT, linewidths=0, transform=inches))
    figure.add_artist(LineCollection(rules, colors=QUIET, linewidths=0.8, transform=inches))
    figure.add_artist(LineCollection(corners, colors=COLOURS[2], linewidths=1.0, transform=inches))
    figure.add_artist(LineCollection(curves, colors=COLOURS[0], linewidths=1.4, transform=inches))
    write(0.12, height - 0.12, f"Spectra behind {entry.title}", 11.5, fontweight="bold", va="top")
    feature = f"; feature: {entry.feature}" if entry.feature else ""
    words = f"one panel per block; null directions are shaded, with their number on the right{feature}"
    write(0.12, height - 0.33, words, 8.5, color=QUIET, va="top")
    write(width / 2, 0.08, "direction, by eigenvalue", 9, color=INK, ha="center")
    write(0.06, height / 2, "eigenvalue / largest", 9, color=INK, va="center", rotation="vertical")
    return figure


@styled
def protected_directions(entries: Sequence[FeatureSpectra]) -> Figure:
    """How many directions each block protects, on a logarithmic scale; the others are free for learning."""
    figure, (axes,) = frame(7.2, 4.0)
    blocks = list(dict.fromkeys(block for entry in entries for block in entry.spectra))
    sizes = {block: len(spectrum.values) for entry in entries for block, spectrum in entry.spectra.items()}
    axes.plot(
        [sizes[block] for block in blocks], color=QUIET, linestyle=(0, (4, 2)), linewidth=1.2, label="all directions"
    )
    fewest = min(len(s.values) - s.rank for entry in entries for s in entry.spectra.values())
    for i, entry in enumerate(entries):
        places = [blocks.index(block) for block in entry.spectra]
        kept = [len(spectrum.values) - spectrum.rank for spectrum in entry.spectra.values()]
        colour, marker, size = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], 4 if len(blocks) > 24 else 5
        axes.plot(places, kept, color=colour, marker=marker, markersize=size, linewidth=1.4, label=entry.title)
        sized = zip(entry.spectra, kept, strict=True)
        words = [f"{entry.title}, block {block}: {count} of {sizes[block]} directions" for block, count in sized]
        mark(axes, places, kept, words)
    step = max(1, -(-len(blocks) // 16))
    axes.set_xticks(range(0, len(blocks), step), blocks[::step])
    if fewest >= 1:
        axes.set_yscale("log")
        axes.set_ylim(0.8 * fewest, 1.6 * max(sizes.values()))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:  # a logarithmic axis cannot show a block that protects nothing
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(0, 1.6 * max(sizes.values()))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="block", ylabel="directions")
    axes.set_title("Protected directions, by block")
    legend_below(figure, axes, len(entries) + 1)
    return figure


def relative_spectrum(values: Floats) -> Floats:
    """Eigenvalues divided by the largest, with a lower limit for a logarithmic axis."""
    largest = values[0] if len(values) and values[0] > 0 else 1.0
    return np.maximum(values / largest, FLOOR)
