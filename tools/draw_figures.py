"""Draws the figures of docs/choose.md and docs/rivals.md from docs/results/*.json into docs/images:

    python tools/draw_figures.py

The SVGs have no background and middle tones, so that they can be read on light and on dark pages; texts are texts.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
INK = "#7a7f87"  # 4 : 1 on white and on the dark pages of the site
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


def rows(name: str) -> dict[str, dict[str, Any]]:
    return json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def mean(value: float | list[float]) -> float:
    return value[0] if isinstance(value, list) else value


def frame(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = [figure.add_subplot(1, columns, number + 1) for number in range(columns)]
    for one in axes:
        one.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
        one.set_axisbelow(True)
    return figure, axes


def label(axes: Axes, words: str, x: float, y: float, dx: float = 0, dy: float = 4, **options: Any) -> None:
    """Writes words beside a point, `dx` and `dy` points away."""
    place = {"ha": "center", "va": "bottom", "fontsize": 8, "color": INK, **options}
    axes.annotate(words, (x, y), (dx, dy), textcoords="offset points", **place)


def bars(axes: Axes, names: list[str], values: list[float], colour: str, shift: float = 0, **options: Any) -> None:
    places = [number + shift for number in range(len(names))]
    axes.bar(places, values, color=colour, **{"width": 0.6, **options})
    for place, value in zip(places, values, strict=True):
        label(axes, f"{value:.1f}", place, value, dy=2)
    axes.set_xticks(range(len(names)), names, fontsize=9)


def state() -> Figure:
    """Accuracy against the size of the ridge classifier's state; other methods are lines."""
    study = rows("study")
    sizes = {10: "ridge, 10MB", 30: "ridge, 30MB", 100: "ridge, 100MB", 300: "ridge, 300MB"}
    sizes[1000] = "analytic (the default)"
    means = [mean(study[name]["final accuracy"]) for name in sizes.values()]
    figure, [axes] = frame(6.6, 3.6)
    axes.plot(list(sizes), means, "o-", color=BLUE)
    for size, value in zip(sizes, means, strict=True):
        label(axes, f"{value:.1f}", size, value, dy=-14)
    label(axes, "the default", 10, means[0], 8, 12, color=BLUE, ha="left")
    lines = {
        "all classes at once, softmax, mirror images at test": (GREEN, "all classes at once", 62),
        "fine-tuning": (ORANGE, "fine-tuning, separate heads", 42.5),
        "Mamba-CL, public-code": (RED, "Mamba-CL, separate heads", 38.6),
        "frozen, separate heads": (INK, "frozen, separate heads", 35.6),
    }
    for name, (colour, words, height) in lines.items():
        value = mean(study[name]["final accuracy"])
        axes.axhline(value, color=colour, linestyle="--", linewidth=1.2)
        axes.text(10, height, f"{words}: {value:.1f}", color=colour, fontsize=8, va="center")
    axes.set(xscale="log", xlabel="state of the classifier (MB)", ylabel="final accuracy (%)", ylim=(34, 64))
    axes.set_xticks(list(sizes), [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    return figure


def classifiers() -> Figure:
    """Final accuracy with separate heads and with the ridge, by what trains in the backbone."""
    study, choice = rows("study"), rows("ridge-choice")
    names = ["nothing trains", "Mamba-CL", "fine-tuning"]
    heads = [
        study[name]["final accuracy"] for name in ("frozen, separate heads", "Mamba-CL, public-code", "fine-tuning")
    ]
    figure, [axes] = frame(6.6, 3.4)
    bars(axes, names, [mean(value) for value in heads], RED, -0.27, width=0.25, label="separate heads")
    sums = [choice[name]["with mirror images at test"] for name in ("t-none", "t-99", "t-seq")]
    bars(axes, names, sums, BLUE, width=0.25, label="ridge from sums")
    again = [choice[name]["sums taken again at the end"] for name in ("t-none", "t-99", "t-seq")]
    bars(axes, names, again, GREEN, 0.27, width=0.25, label="ridge, if all old images could be seen again")
    axes.set(ylabel="final accuracy (%)", ylim=(0, 82))
    axes.legend(frameon=False, fontsize=8, loc="upper center", ncols=3, labelcolor=INK)
    return figure


def spectrum() -> Figure:
    """How much of the features' energy the leading directions hold, and where each rank rule cuts."""
    found = json.loads((DOCS / "results" / "spectrum.json").read_text(encoding="utf-8"))
    energy, cuts = found["energy"], found["protected"]
    figure, [axes] = frame(6.6, 3.6)
    axes.plot(range(1, len(energy) + 1), energy, color=BLUE)
    places = {"corner": (14, -8), "smoothed-corner": (14, -10), "energy:0.9": (10, -14), "energy:0.99": (0, -20)}
    for rule, count in cuts.items():
        dx, dy = places.get(rule, (0, -20) if count < len(energy) else (0, -34))
        side = "left" if count < 100 else "right" if count > 300 else "center"
        axes.plot([count], [energy[count - 1]], "o", color=ORANGE)
        label(axes, f"{rule}: {count}", count, energy[count - 1], dx, dy, ha=side)
    axes.set(xlabel=f"protected directions of {len(energy)}, the strongest first", ylabel="energy in them (%)")
    axes.set(ylim=(0, 106), xlim=(-6, len(energy) + 8))
    return figure


def ranks() -> Figure:
    """What is learned and what is forgotten, from no protection to a frozen backbone."""
    found = rows("cifar100-10-nano")
    names = {
        "none": "sequential",
        "smoothed-\ncorner": "public-code-plain",
        "energy:\n0.9": "exact-0.9-plain",
        "energy:\n0.99": "exact-0.99-plain",
        "frozen": "frozen",
    }
    figure, both = frame(6.6, 3.2, columns=2)
    for axes, column, colour in zip(both, ("learning accuracy", "forgetting"), (BLUE, ORANGE), strict=True):
        bars(axes, list(names), [mean(found[name][column]) for name in names.values()], colour)
        axes.set_title(f"{column} (%)", fontsize=10, color=INK)
        axes.tick_params(axis="x", labelsize=8)
    both[0].set(ylim=(0, 64))
    both[1].set(ylim=(0, 20))
    return figure


def etas() -> Figure:
    """The loss on a new task against the drift of old features."""
    found = rows("relaxation")
    figure, [axes] = frame(6.6, 3.4)
    points = {
        name: (float(row["drift of old features"]), float(row["loss on the new task"])) for name, row in found.items()
    }
    chosen = ["eta 1", "eta 0.99", "eta 0.9"]
    axes.plot(*zip(*(points[name] for name in chosen), strict=True), "o-", color=BLUE)
    for name in chosen:
        label(axes, f"{name}: drift {points[name][0]:.3f}, loss {points[name][1]:.4f}", *points[name], 8, 2, ha="left")
    axes.plot(*points["corner"], "s", color=RED)
    label(
        axes,
        "the corner rule: drift {:.3f}, loss {:.4f}".format(*points["corner"]),
        *points["corner"],
        -6,
        8,
        ha="right",
    )
    axes.set(xlabel="drift of the old task's features", ylabel="loss on the new task", xlim=(0, 0.7), ylim=(0, 0.056))
    return figure


def rivals() -> Figure:
    """Accuracy, state and cost of every method in the main table at nano scale, one line each."""
    results = DOCS / "results"
    runs = json.loads((results / "rivals-nano.json").read_text(encoding="utf-8"))["runs"].values()
    steps: dict[str, float] = {}  # of the slowest phase
    for row in json.loads((results / "methods-cpu.json").read_text(encoding="utf-8"))["rows"]:
        if row["what"].startswith("step"):
            steps[row["method"]] = max(row["/_forward"], steps.get(row["method"], 0.0))
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault((run["method"], run["backbone"]), []).append(run)
    panels: dict[str, Callable[[dict[str, Any]], float]] = {
        "final accuracy (%)": lambda run: 100 * run["metrics"]["final_accuracy_tasks"],
        "state (MB)": lambda run: run["state_bytes"] / 1e6,
        "step (forward passes)": lambda run: steps.get(run["method"], 0.0),
    }
    values = {key: [sum(map(of, own)) / len(own) for of in panels.values()] for key, own in found.items()}
    order = sorted(values, key=lambda key: values[key][0])
    figure, axes = frame(6.6, 0.9 + 0.17 * len(order), columns=len(panels))
    kinds = {"vit_nano": (BLUE, "on vit_nano"), "defocus_mamba_nano": (ORANGE, "on the Mamba nano")}
    for column, (one, title) in enumerate(zip(axes, panels, strict=True)):
        for backbone, (colour, words) in kinds.items():
            places = [number for number, key in enumerate(order) if key[1] == backbone and values[key][column] > 0]
            heights = [values[order[number]][column] for number in places]
            one.plot(heights, places, "o", color=colour, markersize=4, label=words)
            for height, place in zip(heights, places, strict=True) if column == 0 else ():
                label(one, f"{height:.1f}", height, place, 6, 0, ha="left", va="center", fontsize=7)
        names = [method for method, _ in order] if column == 0 else []
        one.set_yticks(range(len(order)), names or [""] * len(order), fontsize=7.5)
        one.set(ylim=(-0.8, len(order) - 0.2), xlabel=title)
        one.tick_params(axis="y", length=0)
    axes[0].set(xlim=(0, 85))
    axes[2].legend(frameon=False, fontsize=7.5, loc="upper right", labelcolor=INK, borderaxespad=0.1)
    axes[1].set(xscale="log")
    axes[2].set(xlim=(0, None))
    return figure


FIGURES = {
    "rivals-cost": rivals,
    "choose-state": state,
    "choose-classifier": classifiers,
    "choose-spectrum": spectrum,
    "choose-rank": ranks,
    "choose-eta": etas,
}


def draw(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in FIGURES.items():
        with matplotlib.rc_context(STYLE):
            path = folder / f"{name}.svg"
            make().savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        written.append(path)
    return written


if __name__ == "__main__":
    for path in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "images"):
        print(path)
