"""APER (Zhou et al., *Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and Adaptivity
are All You Need*, IJCV 2024; ADAM in its first version): adapters are tuned in the first task, then classes are means
of the fixed and the adapted feature side by side, compared by angle.

Its recipe: SGD, cosine, 20 passes; CIFAR-100 rates 0.01, weight decay 5e-4, batches of 48; ImageNet-R 0.05, 5e-3, 24.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mambacl.methods.first_task import FirstTask
from mambacl.methods.registry import METHODS


class Aper(FirstTask):
    name = "aper"
    summary = "adapters tuned in the first task, then class means of fixed and adapted features (APER)"
    own_classifier: ClassVar[str] = "nearest-mean"

    def classifier_defaults(self) -> dict[str, Any]:
        return {"by": "angle"}

    @property
    def input_features(self) -> int:
        return 2 * super().input_features

    def classifier_input(self, images: Tensor) -> Tensor:
        """Two passes: without adapters, and with them."""
        with self.adapters.using(None):
            fixed = super().classifier_input(images)
        return torch.cat((fixed, super().classifier_input(images)), dim=1)


METHODS.add(Aper.name, Aper)
