"""Adam-NSCL (Wang et al., *Training Networks in Null Space of Feature Covariance for Continual Learning*, CVPR 2021):
updates of all linear layers stay in the directions in which the inputs of earlier tasks hardly vary.

Its recipe: Adam, 1e-4 in the first task and 5e-5 later (heads 1e-3), weight decay 5e-5, batches of 32, 80 passes, rates
halved after 30 and 60, a ResNet-18 from random weights, task known at test. Batch norms keep an EWC penalty there;
norms are fixed here.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mambacl.methods.mamba_cl import MambaCL
from mambacl.methods.registry import METHODS
from mambacl.nullspace import Setting
from mambacl.options import Options, at_least


@dataclass(frozen=True)
class NSCLOptions(Options):
    """Options of Adam-NSCL."""

    factor: Annotated[float, at_least(1)] = 10.0
    """a direction is free if its eigenvalue is at most this many times the smallest"""
    variant: Literal["paper", "public-code"] = "paper"
    """public-code: covariances of each batch's mean image, and projectors divided by their Frobenius norm"""


class NSCL(MambaCL):
    name = "nscl"
    summary = "all linear layers, updates in the null space of earlier inputs (Adam-NSCL)"
    options_class: ClassVar[type] = NSCLOptions

    def setting(self) -> Setting:
        as_released = self.options.variant == "public-code"
        return self.by_rule(
            "nscl", rank=f"multiple:{self.options.factor}",
            accumulate="mean-input" if as_released else "sum", scaling="frobenius" if as_released else "none",
        )  # fmt: skip


METHODS.add(NSCL.name, NSCL)
