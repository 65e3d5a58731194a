"""Modules beside the backbone that train together with some of the backbone's own parameters."""

from collections.abc import Mapping

from torch import Tensor, nn

from mambacl.tuning.base import AddedModules, ModelParameters


class Together:
    """Both kinds at once. A method that gives each its own learning rate asks `added` and `own` for theirs."""

    def __init__(self, added: AddedModules, own: ModelParameters) -> None:
        self.added, self.own = added, own

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [*self.added.trained(), *self.own.trained()]

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.added.state_dict(), **self.own.state_dict()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        added = {name: tensor for name, tensor in state.items() if name.startswith(self.added.prefix)}
        self.own.load_state_dict({name: tensor for name, tensor in state.items() if name not in added})
        self.added.load_state_dict(added)
