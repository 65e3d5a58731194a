"""The opposite of a null space: updates stay inside the leading directions of their layer's inputs, as in LoRA-DRS."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mambacl.nullspace.blocks import Part
from mambacl.nullspace.projected_step import ProjectedStep, projected_parts, restrict_steps
from mambacl.nullspace.projectors import Decomposition

WORDS = ("spectrum", "ranks", "basis")  # of a Decomposition


def principal(covariance: Tensor, share: float, storage: torch.dtype = torch.float64) -> Decomposition:
    """As `decompose`, but free are the fewest leading directions that hold this share of the sum of the eigenvalues.
    The spectrum ascends, so that the free directions come last as in any `Decomposition`."""
    values, vectors = torch.linalg.eigh(covariance.double())
    values = values.clamp(min=0)
    held, size = values.flip(0).cumsum(0) / values.sum(), len(values)
    kept = min(int((held < share).sum()) + 1, size)
    basis = vectors[:, size - kept :] if kept < size - kept else vectors[:, : size - kept]
    return Decomposition(values.cpu(), torch.tensor(kept), basis.to(storage))


class PrincipalSpace:
    """For some features, the parts of parameters whose updates stay in their leading directions, from one `confine` to
    `forget`. With `frobenius`, updates are also divided by the root of the number of directions."""

    def __init__(self, parts: Mapping[str, Sequence[Part]], frobenius: bool) -> None:
        self.parts, self.scaling = dict(parts), "frobenius" if frobenius else "none"
        self.forget()

    def forget(self) -> None:
        self.spaces: dict[str, Decomposition] = {}
        self.step = ProjectedStep()

    def wrap(self, optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> None:
        """Hooks replace the change that the optimizer makes by the projected one, as in `NullSpace.wrap`."""
        restrict_steps(optimizer, named, lambda: self.step)

    def confine(self, spaces: Mapping[str, Decomposition], named: Mapping[str, Tensor]) -> None:
        """`spaces` by feature; `named`: the parameters."""
        self.spaces, like = dict(spaces), next(iter(named.values()))
        uses = [(one, self.parts[feature]) for feature, one in self.spaces.items()]
        shapes = {name: parameter.shape for name, parameter in named.items()}
        dtype = next(iter(self.spaces.values())).basis.dtype
        self.step = ProjectedStep(projected_parts(uses, shapes, 1.0, self.scaling, dtype, like.device))

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{name}/{word}": getattr(one, word) for name, one in self.spaces.items() for word in WORDS}

    def load_state_dict(self, state: Mapping[str, Tensor], named: Mapping[str, Tensor]) -> None:
        self.forget()
        if state:
            found = {name: {word: state[f"{name}/{word}"] for word in WORDS} for name in self.parts}
            device = next(iter(named.values())).device
            spaces = {
                name: Decomposition(own["spectrum"].cpu(), own["ranks"].cpu(), own["basis"].to(device))
                for name, own in found.items()
            }
            self.confine(spaces, named)
