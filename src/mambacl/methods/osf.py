"""OSF, orthogonal subspace fine-tuning (Nayak et al., *Sculpting Subspaces: Constrained Full Fine-Tuning in LLMs for
Continual Learning*, 2025; PEFT has an implementation): the leading singular directions of each weight stay, the others
train orthogonally to them. Needs no images of earlier tasks.

Each task decomposes the weights again. PEFT's advice is to keep t / T of the directions in task t of T, and rates from
1e-5 to 1e-4. `NullSpace(model, rule="osf")` restricts updates of the weights themselves in the same way.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from mambacl.methods.base import Method, Task
from mambacl.methods.registry import METHODS
from mambacl.options import Options, between
from mambacl.tuning import Tuning
from mambacl.tuning.weight_factors import WeightFactors


@dataclass(frozen=True)
class OSFOptions(Options):
    """Options of OSF."""

    keep: Annotated[float | None, between(0, 1)] = None
    """share of each weight's directions that stays; empty for the share of tasks that are done"""


class OSF(Method):
    name = "osf"
    summary = "trailing singular directions of all linear layers, the leading ones stay (OSF)"
    options_class: ClassVar[type] = OSFOptions

    def make_tuning(self) -> Tuning:
        layers = {name: module for name, module in self.model.named_modules() if isinstance(module, nn.Linear)}
        self.weights = WeightFactors(layers)
        return self.weights

    def start_task(self, task: Task) -> None:
        done = task.index / max(self.setup.tasks, task.index + 1)
        share = done if self.options.keep is None else self.options.keep
        self.weights.split(lambda directions: int(share * directions + 1e-9))
        super().start_task(task)


METHODS.add(OSF.name, OSF)
