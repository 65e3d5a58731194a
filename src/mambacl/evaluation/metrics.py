"""Continual-learning metrics as pure functions of counts; each name says which of the public definitions it is.

`correct[t][j]` counts the test images of task j that are right after task t (j <= t), which `scenarios` says;
`total[j]` counts the test images of task j. R[t][j] = correct[t][j] / total[j]. T is the last row.

Where only R is known, as from other tools, R itself with totals of one gives every metric but those `OVER_IMAGES`.
docs/metrics.md lists all of them, with who uses which.
"""

from collections.abc import Callable, Sequence

Counts = Sequence[Sequence[float]]
Totals = Sequence[float]
Matrix = list[list[float]]


def accuracy_matrix(correct: Counts, total: Totals) -> Matrix:
    """R, lower triangular."""
    return [[right / total[j] for j, right in enumerate(row)] for row in correct]


def accuracy_over_tasks(correct: Counts, total: Totals) -> list[float]:
    """After each task: the mean of R[t] over the tasks seen."""
    return [mean(row) for row in accuracy_matrix(correct, total)]


def accuracy_over_images(correct: Counts, total: Totals) -> list[float]:
    """After each task: right images / images, over the tasks seen."""
    return [sum(row) / sum(total[: len(row)]) for row in correct]


def final_accuracy_tasks(correct: Counts, total: Totals) -> float:
    """mean_j R[T][j], the paper's formula: Mammoth, CODA-Prompt, L2P and DualPrompt in PyTorch."""
    return accuracy_over_tasks(correct, total)[-1]


def final_accuracy_images(correct: Counts, total: Totals) -> float:
    """sum_j correct[T][j] / sum_j total[j]: the public Mamba-CL code, VPT-NSP, PILOT, PyCIL, InfLoRA."""
    return accuracy_over_images(correct, total)[-1]


def forgetting(correct: Counts, total: Totals) -> float:
    """mean_{j<T} (max_{t<T} R[t][j] - R[T][j]): the paper's formula, Continuum. Negative where a task got better at the
    end."""
    R = accuracy_matrix(correct, total)
    last = len(R) - 1
    return mean([max(R[t][j] for t in range(j, last)) - R[last][j] for j in range(last)])


def forgetting_public(correct: Counts, total: Totals) -> float:
    """mean_{j<T} (max_{t<=T} R[t][j] - R[T][j]), the last row included, so never negative: the public Mamba-CL code,
    PILOT, Mammoth."""
    R = accuracy_matrix(correct, total)
    last = len(R) - 1
    return mean([max(R[t][j] for t in range(j, last + 1)) - R[last][j] for j in range(last)])


def forgetting_first_to_last(correct: Counts, total: Totals) -> float:
    """mean_{j<T} (R[j][j] - R[T][j]): Avalanche. Minus the backward transfer."""
    return 0.0 - backward_transfer(correct, total)


def average_incremental_accuracy(correct: Counts, total: Totals) -> float:
    """mean_t (sum_j correct[t][j] / sum_{j<=t} total[j]): PILOT, and the papers of EASE, InfLoRA, SD-LoRA."""
    return mean(accuracy_over_images(correct, total))


def average_incremental_accuracy_tasks(correct: Counts, total: Totals) -> float:
    """mean_t mean_{j<=t} R[t][j]: the same with each task's mean over tasks, the paper's "mean average accuracy"."""
    return mean(accuracy_over_tasks(correct, total))


def learning_accuracy(correct: Counts, total: Totals) -> float:
    """mean_j R[j][j]: how well each task was known right after it was learned."""
    return mean([row[-1] for row in accuracy_matrix(correct, total)])


def backward_transfer(correct: Counts, total: Totals) -> float:
    """mean_{j<T} (R[T][j] - R[j][j]): Lopez-Paz and Ranzato."""
    R = accuracy_matrix(correct, total)
    last = len(R) - 1
    return mean([R[last][j] - R[j][j] for j in range(last)])


def mean(values: Sequence[float]) -> float:
    """Nothing to average (one task forgets nothing) is 0."""
    return sum(values) / len(values) if values else 0.0


METRICS: dict[str, Callable[[Counts, Totals], float]] = {
    function.__name__: function
    for function in (
        final_accuracy_tasks,
        final_accuracy_images,
        forgetting,
        forgetting_public,
        forgetting_first_to_last,
        average_incremental_accuracy,
        average_incremental_accuracy_tasks,
        learning_accuracy,
        backward_transfer,
    )
}

OVER_IMAGES = ("final_accuracy_images", "average_incremental_accuracy")
"""these need the number of test images of each task, not R alone"""


def all_metrics(correct: Counts, total: Totals) -> dict[str, float]:
    """Every metric by name; all 0 before the first task has ended."""
    return {name: metric(correct, total) if correct else 0.0 for name, metric in METRICS.items()}
