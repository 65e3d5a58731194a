"""Draws the figures of docs/choose.md from docs/results/*.json into docs/images:

    python tools/draw_figures.py

The SVGs have no background and middle tones, so that they can be read on light and on dark pages. Their texts are texts.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
INK = "#7a7f87"  # at least 3.9 : 1 on white and on black
BLUE, ORANGE, GREEN, RED = "#3f87d9", "#d9822b", "#2f9e6e", "#d0556b"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mambacl",  # the same ids each time
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
}
Rows = dict[str, dict[str, Any]]


def read(name: str) -> dict[str, Any]:
    return json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))


def frame(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = [figure.add_subplot(1, columns, number + 1) for number in range(columns)]
    for one in axes:
        one.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
        one.set_axisbelow(True)
    return figure, axes


def value(axes: Axes, x: float, y: float, above: bool = True, colour: str = INK) -> None:
    """Writes a point's value beside it."""
    place = {"xytext": (0, 4 if above else -4), "va": "bottom" if above else "top"}
    axes.annotate(f"{y:.1f}", (x, y), textcoords="offset points", ha="center", fontsize=8, color=colour, **place)


def state() -> Figure:
    """Accuracy against the size of the ridge classifier's state, with other methods as lines."""
    rows: Rows = read("study")["rows"]
    sizes = {
        10: "ridge, 10MB",
        30: "ridge, 30MB",
        100: "ridge, 100MB",
        300: "ridge, 300MB",
        1000: "analytic (the default)",
    }
    figure, [axes] = frame(6.4, 3.4)
    means = [rows[name]["final accuracy"][0] for name in sizes.values()]
    axes.plot(list(sizes), means, "o-", color=BLUE, label="the default (ridge), mirror images at test")
    for size, mean in zip(sizes, means, strict=True):
        value(axes, size, mean)
    lines = {
        "all classes at once, softmax, mirror images at test": (GREEN, "all classes at once, softmax"),
        "fine-tuning": (ORANGE, "fine-tuning, separate heads"),
        "Mamba-CL, public-code": (RED, "Mamba-CL, separate heads"),
        "frozen, separate heads": (INK, "frozen, separate heads"),
    }
    for name, (colour, label) in lines.items():
        mean = rows[name]["final accuracy"][0]
        axes.axhline(mean, color=colour, linestyle="--", linewidth=1.2, label=f"{label}: {mean:.1f}")
    axes.set(xscale="log", xlabel="state of the classifier (MB)", ylabel="final accuracy (%)", ylim=(34, 64))
    axes.set_xticks(list(sizes), [f"{size:,}" for size in sizes], minor=False)
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8, loc="center right", labelcolor=INK)
    return figure


def classifiers() -> Figure:
    """Final accuracy by classifier, and by what trains in the backbone."""
    rows: Rows = read("choose")["rows"]
    figure, [axes] = frame(6.4, 3.2)
    names = ["separate", "nearest-mean", "lda", "ridge"]
    for number, (how, colour) in enumerate({"frozen": GREEN, "protected": BLUE, "fine-tuned": ORANGE}.items()):
        means = [rows[f"{how}, {name}"]["final accuracy"][0] for name in names]
        places = [place + 0.27 * (number - 1) for place in range(len(names))]
        axes.bar(places, means, width=0.25, color=colour, label=f"backbone {how}")
        for place, mean in zip(places, means, strict=True):
            value(axes, place, mean)
    best = rows["the default"]["final accuracy"][0]
    axes.axhline(best, color=INK, linestyle="--", linewidth=1.2, label=f"the default, ridge on all depths: {best:.1f}")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="final accuracy (%)", ylim=(0, 112))
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left", labelcolor=INK)
    return figure


def spectrum() -> Figure:
    """How much of the features' energy the leading directions hold, and where each rank rule cuts."""
    found = read("choose")["spectrum"]
    figure, [axes] = frame(6.4, 3.4)
    energy = found["energy"]
    axes.plot(range(1, len(energy) + 1), energy, color=BLUE)
    for number, (rule, count) in enumerate(found["protected"].items()):
        height = energy[count - 1] if count else 0
        axes.plot([count], [height], "o", color=ORANGE)
        place = {
            "xytext": (34, -12 - 15 * (5 - number)) if count < len(energy) else (-150, -120),
            "ha": "left",
            "fontsize": 8,
        }
        arrow = {"arrowstyle": "-", "color": INK, "linewidth": 0.6}
        words = f"{rule}: {count} of {len(energy)}"
        axes.annotate(words, (count, height), textcoords="offset points", arrowprops=arrow, color=INK, **place)
    axes.set(xlabel="protected directions, the strongest first", ylabel="energy in them (%)", ylim=(0, 104))
    return figure


def trade(table: str, label: str) -> Figure:
    """What is learned and what is forgotten, for each row of a table."""
    record = read("choose")
    names = record["tables"][table]["rows"]
    figure, [left, right] = frame(6.4, 3.0, columns=2)
    words = [name.strip("`").removeprefix("eta ").replace("smoothed-", "smoothed-\n") for name in names]
    for axes, column, colour in ((left, "learning accuracy", BLUE), (right, "forgetting", ORANGE)):
        means = [record["rows"][name][column][0] for name in names]
        axes.bar(range(len(names)), means, width=0.6, color=colour)
        for place, mean in enumerate(means):
            value(axes, place, mean)
        axes.set_title(f"{column} (%)", fontsize=10, color=INK)
        axes.set_xticks(range(len(names)), words, fontsize=8, rotation=20 if len(max(words, key=len)) > 6 else 0)
        axes.set(xlabel=label)
        axes.margins(y=0.14)
    return figure


FIGURES = {
    "choose-state": state,
    "choose-classifier": classifiers,
    "choose-spectrum": spectrum,
    "choose-rank": lambda: trade("ranks", "rank rule"),
    "choose-eta": lambda: trade("etas", "eta"),
}


def draw(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in FIGURES.items():
        with matplotlib.rc_context(STYLE):
            figure = make()
            path = folder / f"{name}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        written.append(path)
    return written


if __name__ == "__main__":
    for path in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "images"):
        print(path)
