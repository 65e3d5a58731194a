"""What a run takes for what: accuracy by class, confusion between tasks, and the commonest mistakes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from mambacl.reports.figures import COLOURS, MAX_NUMBERED_TASKS, frame, heat_map, label_of_class, styled
from mambacl.reports.groups import Value
from mambacl.reports.marks import mark
from mambacl.reports.runs import RunRecord
from mambacl.reports.samples import thumbnails
from mambacl.reports.tables import Column, Table
from mambacl.training.confusion import Confusion

MOST_NAMED = 40  # classes with their name beside their bar


def classes_table(record: RunRecord, confusion: Confusion) -> Table:
    """One row per class, in the order of the tasks."""
    found, tasks = confusion.by_class(), record.tasks[: record.tasks_done]
    worst: dict[int, tuple[int, int]] = {}
    for (truth, answer), count in confusion.mistakes():
        worst.setdefault(truth, (answer, count))
    shared = bool(record.domains)
    rows = []
    for t, classes in enumerate(tasks[:1] if shared else tasks, start=1):
        for c in classes:
            right, images = found.get(c, (0, 0))
            taken = f"{record.class_name(worst[c][0])} ({worst[c][1]})" if c in worst else None
            accuracy = Value(100 * right / images) if images else None
            rows.append((record.class_name(c), "all" if shared else str(t), str(images), str(right), accuracy, taken))
    columns = (
        Column("class", text=True), Column("task"), Column("test images"), Column("right"), Column("accuracy (%)"),
        Column("most often taken for", text=True),
    )  # fmt: skip
    return Table(f"After task {len(tasks)}", columns, tuple(rows))


@styled
def class_accuracies(record: RunRecord, confusion: Confusion) -> Figure:
    """A bar per class, the lowest accuracy first."""
    found = {c: (right, images) for c, (right, images) in confusion.by_class().items() if images}
    order = sorted(found, key=lambda c: (found[c][0] / found[c][1], c))
    named = len(order) <= MOST_NAMED
    names = [label_of_class(record.class_name(c)) for c in order]
    margin = 0.3 + 0.1 * max(map(_width, names), default=0) if named else 0.6
    height = 1.0 + (0.24 * len(order) if named else 4.0)
    figure, (axes,) = frame(4.2 + margin, height, left=margin, right=0.5)
    shares = np.array([100 * found[c][0] / found[c][1] for c in order])
    rows = np.arange(len(order))
    axes.barh(rows, shares, height=0.7 if named else 1.0, color=COLOURS[0])
    words = [
        f"{record.class_name(c)}: {found[c][0]} of {found[c][1]}, {s:.1f}%" for c, s in zip(order, shares, strict=True)
    ]
    mark(axes, np.full(len(order), 50.0), rows, words, (100, 1))
    axes.set_xlim(0, 100)
    axes.set_ylim(len(order) - 0.4, -0.6)
    if named:
        axes.set_yticks(rows, names)
        for row, share in zip(rows, shares, strict=True):
            axes.text(share + 1, row, f"{share:.0f}", va="center", fontsize=8)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_ylabel("classes, lowest first")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("accuracy (%)")
    axes.set_title("Accuracy by class")
    return figure


@styled
def task_confusion(counts: NDArray[Any]) -> Figure:
    """A row per task of the image, a column per task of the answer, in per cent of the row."""
    done = len(counts)
    shares = _shares(counts)
    side = float(np.clip(2.4 + 0.36 * done, 3.6, 6.0))
    figure, (axes,) = frame(side + 0.2, side)
    heat_map(
        axes, shares, 0, 100, done <= MAX_NUMBERED_TASKS,
        lambda a, b: f"{counts[a, b]:,} images of task {a + 1} were answered with a class of task {b + 1}: "
        f"{shares[a, b]:.1f}%",
    )  # fmt: skip
    axes.set(xlabel="task of the answer", ylabel="task of the image")
    axes.set_title("Confusion between tasks (%)")
    return figure


def task_confusion_table(counts: NDArray[Any]) -> Table:
    shares = _shares(counts)
    rows = tuple(
        (str(t + 1), *(f"{n} ({share:.1f}%)" for n, share in zip(counts[t], shares[t], strict=True)))
        for t in range(len(counts))
    )
    columns = (Column("images of task"), *(Column(f"answered: task {j + 1}") for j in range(len(counts))))
    return Table("Test images by the task of their class and of the answer", columns, rows)


def _shares(counts: NDArray[Any]) -> NDArray[Any]:
    totals = counts.sum(axis=1, keepdims=True)
    return np.where(totals > 0, 100 * counts / np.maximum(totals, 1), np.nan)


def _width(name: str) -> int:
    """In letters: a wide sign takes two."""
    return sum(2 if sign >= "\u2e80" else 1 for sign in name)


def commonest(record: RunRecord, confusion: Confusion) -> dict[str, Any]:
    """The pairs of classes that are confused most, with some of their images, or the reason why there are none."""
    totals = confusion.by_class()
    mistakes = confusion.mistakes()
    wanted = [place for pair in confusion.examples for place in confusion.examples[pair]]
    pictures, problem = thumbnails(record, wanted) if wanted else ({}, "")
    shown = [(pair, count) for pair, count in mistakes if pair in confusion.examples]
    pairs = [
        {
            "truth": record.class_name(truth),
            "answer": record.class_name(answer),
            "count": count,
            "images": totals[truth][1],
            "pictures": [pictures[place] for place in confusion.examples[truth, answer] if place in pictures],
        }
        for (truth, answer), count in shown
    ]
    return {"pairs": pairs, "problem": problem, "table": pairs_table(record, confusion, mistakes)}


def pairs_table(record: RunRecord, confusion: Confusion, mistakes: Sequence[tuple[tuple[int, int], int]]) -> Table:
    totals = confusion.by_class()
    rows = tuple(
        (record.class_name(a), record.class_name(b), str(count), Value(100 * count / totals[a][1]))
        for (a, b), count in mistakes
    )
    columns = (Column("class", text=True), Column("answer", text=True), Column("images"), Column("of the class (%)"))
    return Table("Wrong answers by pair of classes", columns, rows)
