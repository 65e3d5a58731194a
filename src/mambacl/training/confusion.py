"""Which classes a model takes for which: counts of (true class, answer), and a few images of the commonest mistakes.

Images are stored as positions among a task's test images, never as pixels.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAIRS_WITH_EXAMPLES, EXAMPLES = 12, 4
Pair = tuple[int, int]  # true class and answer, as the data set numbers its classes


@dataclass(frozen=True)
class Confusion:
    counts: Mapping[Pair, int]
    """test images by pair; equal numbers are right answers"""
    examples: Mapping[Pair, list[tuple[int, int]]] = field(default_factory=dict)
    """of the commonest mistakes: task, and position among its test images"""

    def mistakes(self) -> list[tuple[Pair, int]]:
        """The pairs of different classes, most frequent first."""
        found = [(pair, count) for pair, count in self.counts.items() if pair[0] != pair[1]]
        return sorted(found, key=lambda item: (-item[1], item[0]))

    def by_class(self) -> dict[int, tuple[int, int]]:
        """Right answers and test images of each class."""
        found: dict[int, tuple[int, int]] = {}
        for (truth, answer), count in self.counts.items():
            right, images = found.get(truth, (0, 0))
            found[truth] = right + count * (truth == answer), images + count
        return dict(sorted(found.items()))

    def between_tasks(self, tasks: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """Test images by the task of their class and the task of the answer, (tasks, tasks)."""
        task_of = {c: t for t, classes in enumerate(tasks) for c in classes}
        found = np.zeros((len(tasks), len(tasks)), dtype=np.int64)
        for (truth, answer), count in self.counts.items():
            found[task_of[truth], task_of[answer]] += count
        return found


def count_confusion(
    answers: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], classes: Sequence[int]
) -> Confusion:
    """From the labels and the answers for the test images of each task. `classes`: the class of each label."""
    counts: Counter[Pair] = Counter()
    numbers = np.asarray(classes, dtype=np.int64)
    for labels, chosen in answers:
        pairs, found = np.unique(np.stack([numbers[labels], numbers[chosen]]), axis=1, return_counts=True)
        counts.update({(int(a), int(b)): int(n) for (a, b), n in zip(pairs.T, found, strict=True)})
    shown = [pair for pair, _ in Confusion(counts).mistakes()[:PAIRS_WITH_EXAMPLES]]
    examples: dict[Pair, list[tuple[int, int]]] = {pair: [] for pair in shown}
    for task, (labels, chosen) in enumerate(answers):
        for (truth, answer), places in examples.items():
            hits = np.flatnonzero((numbers[labels] == truth) & (numbers[chosen] == answer))
            places += [(task, int(hit)) for hit in hits[: EXAMPLES - len(places)]]
    return Confusion(dict(sorted(counts.items())), examples)


def to_json(confusion: Confusion) -> dict[str, Any]:
    return {
        "pairs": [[*pair, count] for pair, count in confusion.counts.items()],
        "examples": [[*pair, places] for pair, places in confusion.examples.items()],
    }


def from_json(content: Mapping[str, Any]) -> Confusion:
    counts = {(int(a), int(b)): int(n) for a, b, n in content["pairs"]}
    examples = {(int(a), int(b)): [(int(t), int(i)) for t, i in places] for a, b, places in content["examples"]}
    return Confusion(counts, examples)
