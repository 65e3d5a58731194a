"""Continual-learning metrics. Each entry has its function of the counts and all texts for tables and pages.

`correct[t][j]` is the number of test images of task j that are correct after task t (j <= t); `mambacl.scenarios`
defines correct. `total[j]` is the number of test images of task j. R[t, j] = correct[t][j] / total[j]. T is the last
row.

If only R is known, as from other tools, pass R with totals of one: that gives every metric whose `needs` is "R".
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from mambacl.registry import Registry

Counts = Sequence[Sequence[float]]
Totals = Sequence[float]
Matrix = list[list[float]]
Function = Callable[[Counts, Totals], float]


@dataclass(frozen=True)
class Metric:
    """A number that describes a run, as a fraction of one; tables show it in per cent."""

    title: str
    """its column heading"""
    formula: str
    meaning: str
    """the formula in words"""
    used_by: str = ""
    """who defines it this way"""
    better: Literal["max", "min"] | None = None
    """whether the largest or the smallest value is the best"""
    needs: Literal["R", "counts"] = "R"
    shown: Literal["table", "page"] = "table"
    """table: a column of every comparison; page: only in the list of all metrics on a run's page"""
    headline: Literal["tasks", "images"] | None = None
    """show it in comparisons only if accuracies are averaged over these"""
    function: Function = lambda correct, total: math.nan

    @property
    def name(self) -> str:
        """Its name in results.json and on the command line."""
        return self.function.__name__

    @property
    def sentence(self) -> str:
        """A note below a table."""
        return f"{self.title}: {self.meaning}"

    def __call__(self, function: Function) -> Function:
        """Registers a function under its name, as the decorator `@metric(...)`."""
        METRICS.add(function.__name__, dataclasses.replace(self, function=function))
        return function


METRICS: Registry[Metric] = Registry("metric", "mambacl.metrics")
metric = Metric


def list_metrics() -> list[Metric]:
    return [METRICS.get(name) for name in METRICS.names()]


def table_metrics(headline: str) -> list[Metric]:
    """The metrics in a comparison whose accuracies are averaged over `headline`, "tasks" or "images"."""
    return [entry for entry in list_metrics() if entry.shown == "table" and entry.headline in (None, headline)]


def all_metrics(correct: Counts, total: Totals) -> dict[str, float]:
    """Every metric by name; all are 0 before the first task has ended."""
    return {entry.name: entry.function(correct, total) if correct else 0.0 for entry in list_metrics()}


# Building blocks


def accuracy_matrix(correct: Counts, total: Totals) -> Matrix:
    """R, lower triangular. NaN for a task without test images, which means leave out."""
    return [[right / total[j] if total[j] else math.nan for j, right in enumerate(row)] for row in correct]


def accuracy_over_tasks(correct: Counts, total: Totals) -> list[float]:
    """The mean of R[t] over the tasks seen, after each task."""
    return [mean(row) for row in accuracy_matrix(correct, total)]


def accuracy_over_images(correct: Counts, total: Totals) -> list[float]:
    """Correct images / images, over the tasks seen, after each task."""
    images = [sum(total[: len(row)]) for row in correct]
    return [sum(row) / count if count else math.nan for row, count in zip(correct, images, strict=True)]


def forgetting_by_task(correct: Counts, total: Totals, with_last: bool = False) -> list[float]:
    """For each task but the last: its best accuracy in the rows before the last minus that in the last row. `with_last`
    includes the last row in the best."""
    R = accuracy_matrix(correct, total)
    last = len(R) - 1
    return [max(R[t][j] for t in range(j, last + with_last)) - R[last][j] for j in range(last)]


def mean(values: Sequence[float]) -> float:
    """The mean without NaN values. It is 0 for an empty list (a single task forgets nothing) and NaN if all are NaN."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan if values else 0.0


# The metrics


@metric(
    "final accuracy", "mean_j R[T, j]", "mean over tasks of the accuracy after the last task, the paper's formula",
    "the paper's formula; Mammoth, CODA-Prompt, L2P and DualPrompt in PyTorch", better="max", headline="tasks",
)  # fmt: skip
def final_accuracy_tasks(correct: Counts, total: Totals) -> float:
    return accuracy_over_tasks(correct, total)[-1]


@metric(
    "final accuracy", "sum_j correct[T, j] / sum_j total[j]",
    "share of all test images that are correct after the last task",
    "the public Mamba-CL code, VPT-NSP, PILOT, PyCIL, InfLoRA", better="max", needs="counts", headline="images",
)  # fmt: skip
def final_accuracy_images(correct: Counts, total: Totals) -> float:
    return accuracy_over_images(correct, total)[-1]


@metric(
    "forgetting", "mean_{j<T} (max_{t<T} R[t, j] - R[T, j])",
    "best over the rows before the last, the paper's formula",
    "the paper's formula; Continuum. May be negative", better="min",
)  # fmt: skip
def forgetting(correct: Counts, total: Totals) -> float:
    return mean(forgetting_by_task(correct, total))


@metric(
    "forgetting (public code)", "mean_{j<T} (max_{t<=T} R[t, j] - R[T, j])",
    "best over all rows, the last included",
    "the public Mamba-CL code, PILOT, Mammoth. Never negative", better="min", shown="page",
)  # fmt: skip
def forgetting_public(correct: Counts, total: Totals) -> float:
    return mean(forgetting_by_task(correct, total, with_last=True))


@metric(
    "forgetting (first to last)", "mean_{j<T} (R[j, j] - R[T, j])",
    "accuracy right after a task minus accuracy after the last task", "Avalanche", better="min", shown="page",
)  # fmt: skip
def forgetting_first_to_last(correct: Counts, total: Totals) -> float:
    return 0.0 - backward_transfer(correct, total)


@metric(
    "learning accuracy", "mean_j R[j, j]", "mean accuracy on each task right after learning it",
    "how well each task was known right after it was learned", better="max",
)  # fmt: skip
def learning_accuracy(correct: Counts, total: Totals) -> float:
    return mean([row[-1] for row in accuracy_matrix(correct, total)])


@metric(
    "average incremental accuracy", "mean_t (sum_j correct[t, j] / sum_{j<=t} total[j])",
    "mean over t of the accuracy over images after t",
    "PILOT; the papers of EASE, InfLoRA, SD-LoRA", better="max", needs="counts",
)  # fmt: skip
def average_incremental_accuracy(correct: Counts, total: Totals) -> float:
    return mean(accuracy_over_images(correct, total))


@metric(
    "average incremental accuracy (tasks)", "mean_t mean_{j<=t} R[t, j]",
    "mean over t of the mean over tasks after t",
    "what the paper calls mean average accuracy", better="max", shown="page",
)  # fmt: skip
def average_incremental_accuracy_tasks(correct: Counts, total: Totals) -> float:
    return mean(accuracy_over_tasks(correct, total))


@metric(
    "backward transfer", "mean_{j<T} (R[T, j] - R[j, j])",
    "accuracy after the last task minus accuracy right after a task, averaged over the tasks before the last",
    "Lopez-Paz and Ranzato", better="max", shown="page",
)  # fmt: skip
def backward_transfer(correct: Counts, total: Totals) -> float:
    R = accuracy_matrix(correct, total)
    last = len(R) - 1
    return mean([R[last][j] - R[j][j] for j in range(last)])


@metric(
    "performance drop", "sum correct[1] / sum total[1] - sum_j correct[T, j] / sum_j total[j]",
    "accuracy over images after the first task minus that after the last",
    "few-shot class-incremental learning: CEC, Mamba-FSCIL", better="min", needs="counts", shown="page",
)  # fmt: skip
def performance_drop(correct: Counts, total: Totals) -> float:
    over = accuracy_over_images(correct, total)
    return over[0] - over[-1]
