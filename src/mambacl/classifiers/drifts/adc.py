"""ADC (Goswami et al., *Resurrecting Old Classes with New Data for Exemplar-Free Continual Learning*, CVPR 2024): the
new images that are nearest to an old class's mean take steps that bring their old features closer to it. What training
did to the features of those that arrive is the movement of the mean. Acts on means.

The images of a step share one gradient: x - step * gradient / |gradient|, with the norm over all images of the class,
within the range of the new images' values. An image has arrived if the mean is the nearest of all to its old feature.
If none has, the class stays where it is.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers.drifts.base import Drift, Move, TaskEnd
from mambacl.classifiers.drifts.shift import positive
from mambacl.errors import UserError
from mambacl.options import Options, at_least


@dataclass(frozen=True)
class ADCOptions(Options):
    """Options of the drift adc."""

    images: Annotated[int, at_least(1)] = 100
    """new images per old class"""
    steps: Annotated[int, at_least(1)] = 3
    """steps of each"""
    step: Annotated[float, positive] = 25.0
    """length of a step, over all images of a class together"""


class ADC(Drift):
    name = "adc"
    options_class: ClassVar[type] = ADCOptions
    needs_features = True

    def __init__(self, options: Any = None, end: TaskEnd | None = None) -> None:
        super().__init__(options, end)
        if self.end.images is None or self.end.features is None or self.end.before is None:
            raise UserError(
                "The drift adc changes images: call follow with TaskEnd(images=..., features=..., before=...), or "
                "choose another."
            )
        self.old: list[Tensor] = []

    def update(self, old: Tensor, new: Tensor, labels: Tensor) -> None:
        self.old.append(old.float())

    def move(self, means: Tensor, covariances: Tensor | None = None) -> Move:
        old = torch.cat(self.old).double()
        nearest = torch.cdist(means, old).topk(min(self.options.images, len(old)), largest=False).indices.cpu()
        wanted = nearest.unique()
        images, low, high = self._images(wanted)
        rows = [images[torch.searchsorted(wanted, places)] for places in nearest]
        shifts = [self._shift(x.to(means.device), means, row, low, high) for row, x in enumerate(rows)]
        return Move(offset=torch.stack(shifts))

    def _images(self, wanted: Tensor) -> tuple[Tensor, float, float]:
        """Those at these places, and the least and the largest value of all."""
        assert self.end.images is not None
        found, first, low, high = [], 0, float("inf"), -float("inf")
        for batch in self.end.images():
            own = wanted[(wanted >= first) & (wanted < first + len(batch))] - first
            found.append(batch[own.to(batch.device)].cpu())
            low, high, first = min(low, float(batch.min())), max(high, float(batch.max())), first + len(batch)
        return torch.cat(found), low, high

    def _shift(self, images: Tensor, means: Tensor, row: int, low: float, high: float) -> Tensor:
        """How far the mean of this row moves."""
        assert self.end.features is not None and self.end.before is not None
        with self.end.before():
            for _ in range(self.options.steps):
                with torch.enable_grad():
                    images = images.detach().requires_grad_()
                    features = self.end.features(images)
                    loss = F.mse_loss(features, means[row].to(features).expand_as(features))
                [gradient] = torch.autograd.grad(loss, images)
                length = gradient.norm().clamp(min=torch.finfo(gradient.dtype).tiny)
                images = (images.detach() - self.options.step * gradient / length).clamp(low, high)
            with torch.no_grad():
                old = self.end.features(images).to(means)
        arrived = torch.cdist(old, means).argmin(1) == row
        if not arrived.any():
            return torch.zeros_like(means[row])
        with torch.no_grad():
            new = self.end.features(images[arrived]).to(means)
        return (new - old[arrived]).mean(0)
