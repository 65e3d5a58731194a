"""DualGPM (Liang and Li, *Adaptive Plasticity Improvement for Continual Learning*, CVPR 2023): GPM that stores the
smaller of the subspace and its complement.

The null space always stores the smaller one, so what differs from GPM is how the share of the energy rises: by a given
amount over all tasks. The paper's other half, which makes room where little is free, is not included.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from mambacl.methods.gpm import GPM, GPMOptions
from mambacl.methods.registry import METHODS
from mambacl.options import between


@dataclass(frozen=True)
class DualGPMOptions(GPMOptions):
    """Options of DualGPM."""

    step: Annotated[float, between(0, 1)] = 0.03
    """added to the share over all tasks of the run"""


class DualGPM(GPM):
    name = "dual-gpm"
    summary = "GPM that stores the smaller of subspace and complement, with a share that rises to 1 (DualGPM)"
    options_class: ClassVar[type] = DualGPMOptions

    def step(self) -> float:
        return float(self.options.step) / max(self.setup.tasks, 1)


METHODS.add(DualGPM.name, DualGPM)
