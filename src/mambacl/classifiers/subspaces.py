"""Class prototypes in several feature spaces: the mathematics of EASE (Zhou et al., CVPR 2024).

`prototypes` is (classes, subspaces, d): the mean feature of a class in each subspace, or an estimate of it. Classes are
in the order in which they were learned, `widths` of them per task; task i adds subspace i.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers.cosine import cosines


def class_sums(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The sum of the features (b, d) of each class, (classes, d), and their number, in float64."""
    members = F.one_hot(labels, classes).T.double()  # a product sums in the same order every time, unlike index_add
    return members @ features.double(), members.sum(1)


def similarities(old: Tensor, new: Tensor) -> Tensor:
    """The similarity of each old class (o, d) to each new one (n, d) in one subspace: (o, n), with rows that sum to
    1."""
    return torch.softmax(cosines(old, new), dim=1)


def mapped(old: Tensor, new: Tensor, new_in_other: Tensor) -> Tensor:
    """Estimates the prototypes of old classes (o, d) in another subspace: the mean of the new classes' prototypes in
    it, (n, d), weighted by the similarities between old and new classes in this one."""
    return similarities(old, new) @ new_in_other


def completed(prototypes: Tensor, widths: Sequence[int]) -> Tensor:
    """Fills in the last subspace for all classes but the last task's, which have prototypes in every subspace."""
    prototypes, last = prototypes.clone(), len(widths) - 1
    new, first = prototypes[sum(widths[:last]) :], 0
    for task, width in enumerate(widths[:last]):
        old = prototypes[first : first + width, task]  # in their own subspace
        prototypes[first : first + width, last] = mapped(old, new[:, task], new[:, last])
        first += width
    return prototypes


def completed_by_later(prototypes: Tensor, widths: Sequence[int]) -> Tensor:
    """Fills in every subspace again for the classes of earlier tasks, from all classes that have real prototypes in
    it."""
    prototypes, starts = prototypes.clone(), [sum(widths[:task]) for task in range(len(widths))]
    for task, width in enumerate(widths):
        first = starts[task]
        for space in range(task + 1, len(widths)):
            seen = prototypes[starts[space] :]
            old = prototypes[first : first + width, task]
            prototypes[first : first + width, space] = mapped(old, seen[:, task], seen[:, space])
    return prototypes


def with_stand_ins(prototypes: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Adds rows for the classes of tasks without prototypes: in their own subspace, the weights (classes, d) of their
    task's classifier. `weights`: one per task."""
    first = sum(len(weight) for weight in weights[: prototypes.shape[1]])
    missing = [weight.detach() for weight in weights[prototypes.shape[1] :]]
    prototypes = F.pad(prototypes, (0, 0, 0, len(missing), 0, sum(len(weight) for weight in missing)))
    for task, weight in enumerate(missing, start=len(weights) - len(missing)):
        prototypes[first : first + len(weight), task] = weight
        first += len(weight)
    return prototypes


def weights_of_subspaces(widths: Sequence[int], alpha: float, mean: bool = False) -> Tensor:
    """(classes, subspaces): 1 for a class's own subspace and alpha for each other one; with `mean`, alpha in total for
    all others."""
    tasks = range(len(widths))
    other = alpha / max(1, len(tasks) - 1) if mean else alpha
    rows = [[1.0 if space == task else other for space in tasks] for task in tasks]
    return torch.tensor([rows[task] for task in tasks for _ in range(widths[task])])


def ensemble(features: Sequence[Tensor], prototypes: Tensor, weights: Tensor) -> Tensor:
    """Logits (b, classes): the weighted sum of the cosines in each subspace. `features`: one (b, d) per subspace."""
    logits = torch.zeros(features[0].shape[0], len(prototypes), dtype=prototypes.dtype, device=prototypes.device)
    for k, feature in enumerate(features):
        logits = logits + weights[:, k] * cosines(feature, prototypes[:, k])
    return logits
