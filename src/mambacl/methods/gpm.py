"""GPM, Gradient Projection Memory (Saha et al., ICLR 2021): gradients of all linear layers leave out the subspace of
inputs that earlier tasks need, which grows until it holds a share of each task's inputs.

Its recipe: SGD without momentum at 0.01, batches of 64, 200 passes, an AlexNet from random weights, task known at test.
An optimizer with momentum sees only projected gradients; one that rescales entries, such as Adam, leaks into the
subspace unless `acts_on` is update.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mambacl.methods.mamba_cl import MambaCL
from mambacl.methods.registry import METHODS
from mambacl.nullspace import Setting
from mambacl.options import Options, between


@dataclass(frozen=True)
class GPMOptions(Options):
    """Options of GPM."""

    share: Annotated[float, between(0, 1)] = 0.97
    """share of the energy of the first task's inputs that the subspace holds"""
    step: Annotated[float, between(0, 1)] = 0.003
    """added to the share with each task"""
    acts_on: Literal["gradient", "update"] = "gradient"
    """what is projected: the gradient, as published, or the optimizer's finished update"""
    variant: Literal["paper", "public-code"] = "paper"
    """public-code: the first subspace stays below the share by the direction that would reach it"""


class GPM(MambaCL):
    name = "gpm"
    summary = "all linear layers, gradients without the subspace of earlier inputs (GPM)"
    options_class: ClassVar[type] = GPMOptions

    def setting(self) -> Setting:
        own = self.options
        return self.by_rule(
            "gpm", rank=f"energy:{own.share}", rank_step=self.step(), acts_on=own.acts_on,
            below_at_first=own.variant == "public-code",
        )  # fmt: skip

    def step(self) -> float:
        """What the share gains with each task."""
        return float(self.options.step)


METHODS.add(GPM.name, GPM)
