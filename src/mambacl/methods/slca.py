"""SLCA (Zhang et al., *SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained Model*,
ICCV 2023): the whole backbone trains at a small rate with one head per task; when a task ends, all heads are aligned on
samples of the classes' Gaussians (`classifiers/aligned.py`).

Its recipe: SGD, rates 1e-4 (backbone) and 0.01 (heads), weight decay 5e-4, batches of 128; CIFAR-100 20 passes, rates
times 0.1 after 18; ImageNet-R 50, after 40.
"""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from mambacl.classifiers import aligned
from mambacl.errors import UserError
from mambacl.methods.base import Method
from mambacl.methods.registry import METHODS
from mambacl.options import Options
from mambacl.tuning import ModelParameters, Tuning


@dataclass(frozen=True)
class SlcaOptions(Options):
    """Options of SLCA."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: an alignment starts from the one before, and the backbone keeps its final norm; public-code: an alignment
    counts for one evaluation, the next starts from the heads as they were trained, and the final norm starts anew"""


def final_norm(model: nn.Module) -> nn.Module | None:
    """The last norm with a weight per channel, in the order in which modules were added; None if there is none."""
    norms = [m for m in model.modules() if "Norm" in type(m).__name__ and getattr(m, "weight", None) is not None]
    return norms[-1] if norms else None


@torch.no_grad()
def renew(norm: Any) -> None:
    """As PyTorch starts a LayerNorm; running statistics, which a BatchNorm has, stay."""
    norm.weight.fill_(1)
    if getattr(norm, "bias", None) is not None:
        norm.bias.zero_()
    norm.eps = 1e-5


class SLCA(Method):
    name = "slca"
    summary = "the whole backbone at a small rate, heads aligned on samples of class Gaussians (SLCA)"
    options_class: ClassVar[type] = SlcaOptions
    own_classifier: ClassVar[str] = "aligned"

    def make_tuning(self) -> Tuning:
        if self.options.variant == "public-code":
            self._renew_final_norm()
        return ModelParameters(self.model, [name for name, _ in self.model.named_parameters()])

    def _renew_final_norm(self) -> None:
        norm = final_norm(self.model)
        if norm is None:
            raise UserError(f"{type(self.model).__name__} has no norm to start anew: set options.variant to paper.")
        if self.known_tasks:
            raise UserError(
                "The variant public-code of slca starts the final norm anew, but the checkpoint's classifier was "
                "trained with the old one: set options.variant to paper, or known_classes to false."
            )
        renew(norm)

    def classifier_defaults(self) -> dict[str, Any]:
        return {**asdict(aligned.SLCA), "accumulate": self.options.variant == "paper"}


METHODS.add(SLCA.name, SLCA)
