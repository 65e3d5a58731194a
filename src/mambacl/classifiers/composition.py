"""Rows for new classes made of earlier classes' rows, by the similarity of mean features, as in EvoPrompt."""

import torch
import torch.nn.functional as F
from torch import Tensor


class ClassMeans:
    """Mean features of the classes from label `first` on."""

    def __init__(self, first: int, classes: int, width: int, device: torch.device) -> None:
        self.first = first
        self.sums = torch.zeros(classes, width, dtype=torch.float64, device=device)
        self.counts = torch.zeros(classes, dtype=torch.float64, device=device)

    def add(self, features: Tensor, labels: Tensor) -> None:
        places = labels - self.first
        self.sums.index_add_(0, places, features.double())
        self.counts += F.one_hot(places, len(self.counts)).sum(0)

    def means(self) -> Tensor:
        """(classes, d); zeros for a class without images."""
        return self.sums / self.counts.clamp(min=1)[:, None]


def composed(new: Tensor, earlier: Tensor, rows: Tensor, size: int, temperature: float) -> Tensor:
    """Rows (n, d) for new classes, from mean features of new (n, d) and earlier (m, d) classes and the latter's rows
    (m, d). Each slice of `size` channels is a mixture of the same slice of `rows`, by softmax(cosine / temperature)."""
    parts = [F.normalize(means.unflatten(1, (-1, size)), dim=2).transpose(0, 1) for means in (new, earlier)]
    mixture = (parts[0] @ parts[1].mT / temperature).softmax(2).to(rows)  # (slices, n, m)
    return (mixture @ rows.unflatten(1, (-1, size)).transpose(0, 1)).transpose(0, 1).flatten(1)
