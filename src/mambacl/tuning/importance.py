"""How much each parameter matters for earlier tasks: diagonals of Fisher matrices, and the penalty for moving away."""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

Values = dict[str, Tensor]
Terms = Literal["separate", "online", "mean"]


def mean_squared_gradients(losses: Iterable[tuple[Tensor, Tensor | float]], parameters: Mapping[str, Tensor]) -> Values:
    """The mean over losses, each with a factor, of factor * gradient^2, by parameter."""
    sums, count = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}, 0
    for count, (loss, factor) in enumerate(losses, start=1):  # noqa: B007
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                sums[name] += factor * gradient.square()
    return {name: total.detach() / max(1, count) for name, total in sums.items()}


class Importance:
    """Pairs of importances F and the values w* that parameters had, by parameter name: one per task, or one."""

    def __init__(self) -> None:
        self.terms: list[tuple[Values, Values]] = []

    def penalty(self, parameters: Mapping[str, Tensor]) -> Tensor | float:
        """Half the sum of F (w - w*)^2."""
        parts = [
            (importances[name] * (parameter - anchors[name]).square()).sum()
            for importances, anchors in self.terms
            for name, parameter in parameters.items()  # their order, whatever order a state was loaded in
            if name in importances
        ]
        return 0.5 * torch.stack(parts).sum() if parts else 0.0

    def add(self, new: Values, parameters: Mapping[str, Tensor], terms: Terms, old: float) -> None:
        """Takes in a task. separate: a further pair; online: F <- old * F + new; mean: F <- old * F + (1 - old) * new.
        The latter two keep one pair with the latest values. Parameters that did not exist before get `new`."""
        anchors = {name: parameters[name].detach().clone() for name in new}
        if terms == "separate" or not self.terms:
            self.terms.append((new, anchors))
            return
        before, share = self.terms[-1][0], 1 - old if terms == "mean" else 1.0
        merged = {name: old * before[name] + share * own if name in before else own for name, own in new.items()}
        self.terms = [(merged, anchors)]

    def split(self, source: str, target: str, rows: int) -> None:
        """The first rows of the parameter `source` are the parameter `target` from now on."""
        for values in (values for term in self.terms for values in term):
            if source in values and target not in values:
                values[target], values[source] = values[source][:rows], values[source][rows:]

    def state_dict(self) -> Values:
        pairs = enumerate(self.terms)
        return {
            f"{index}/{kind}/{name}": tensor
            for index, term in pairs
            for kind, values in zip("Fw", term, strict=True)
            for name, tensor in values.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        self.terms = []
        for path, tensor in state.items():
            index, kind, name = path.split("/", 2)
            while len(self.terms) <= int(index):
                self.terms.append(({}, {}))
            self.terms[int(index)]["Fw".index(kind)][name] = tensor.to(device)
