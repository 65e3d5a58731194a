"""A few of the features that a classifier was computed from, to calibrate its probabilities with: no images.

Scores of old images change when classes are added, and a classifier computed from sums cannot tell how: that takes
features. So a random sample of all images so far keeps theirs, in 8 bits per value, whatever the number of tasks. The
sample depends on the seed and on how many images came before, not on their division into batches.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers.lift import uniform_at

CHUNK = 64  # neighbouring values that share a scale
LARGEST = 127
NAMES = ("values", "scales", "labels", "places", "counts")


def to_bytes(features: Tensor) -> tuple[Tensor, Tensor]:
    """Features (..., d) as whole numbers from -127 to 127, int8 (..., d), and the value of 1 in each CHUNK of them."""
    d = features.shape[-1]
    chunks = F.pad(features.float(), (0, -d % CHUNK)).unflatten(-1, (-1, CHUNK))
    scales = chunks.abs().amax(-1) / LARGEST
    steps = torch.where(scales > 0, scales, 1.0)[..., None]
    return (chunks / steps).round().to(torch.int8).flatten(-2)[..., :d], scales


def from_bytes(values: Tensor, scales: Tensor) -> Tensor:
    d = values.shape[-1]
    return values * scales.repeat_interleave(CHUNK, dim=-1)[..., :d]


class KeptFeatures:
    """Features of at most `room` images, each with all the views that were learned.

    Each image draws a number from the seed and its place among all images so far. The sample is those with the lowest
    numbers, so every image has the same chance.
    """

    values: Tensor  # (n, views, d), int8
    scales: Tensor  # (n, views, chunks)
    labels: Tensor  # (n,)
    places: Tensor  # (n,), rising: which image it was, counting from 0
    counts: Tensor  # (classes,): images so far

    def __init__(self, room: int, views: int, num_features: int, seed: int = 0) -> None:
        self.room, self.seed = room, seed
        self.values = torch.zeros(0, views, num_features, dtype=torch.int8)
        self.scales = torch.zeros(0, views, -(-num_features // CHUNK))
        self.labels, self.places, self.counts = (torch.zeros(0, dtype=torch.int64) for _ in range(3))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def seen(self) -> int:
        """Images so far."""
        return int(self.counts.sum())

    def add(self, views: list[Tensor], labels: Tensor) -> None:
        """Images as the features (b, d) of each view."""
        if not self.room or not len(labels):
            return
        labels = labels.cpu()
        places = torch.arange(self.seen, self.seen + len(labels))
        classes = max(len(self.counts), int(labels.max()) + 1)
        self.counts = F.pad(self.counts, (0, classes - len(self.counts))) + torch.bincount(labels, minlength=classes)
        everything = torch.cat((self.places, places))
        drawn = uniform_at(everything, self.seed)
        chosen = everything[drawn.argsort(stable=True)[: self.room]].sort().values
        old, new = torch.isin(self.places, chosen), torch.isin(places, chosen)
        values, scales = to_bytes(torch.stack([view[new.to(view.device)] for view in views], dim=1).cpu())
        self.values = torch.cat((self.values[old], values))
        self.scales = torch.cat((self.scales[old], scales))
        self.labels, self.places = torch.cat((self.labels[old], labels[new])), chosen

    def read(self) -> tuple[Tensor, Tensor]:
        """Features (n, views, d) and labels. A class with one image would have none without it, and is left out."""
        enough = self.counts[self.labels] > 1
        return from_bytes(self.values[enough], self.scales[enough]), self.labels[enough]

    @property
    def image_nbytes(self) -> int:
        """Of one image."""
        _, views, d = self.values.shape
        return views * (d + 4 * self.scales.shape[2]) + 16

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in NAMES)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in NAMES}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name in NAMES:
            setattr(self, name, state[name].cpu())
