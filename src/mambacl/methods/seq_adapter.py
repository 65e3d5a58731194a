"""SeqAdapter-Mamba: the backbone stays as it is, one set of adapters is trained task after task."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from mambacl.methods.base import METHODS, HeadPerTask, Setup
from mambacl.methods.bottleneck import AdapterOptions, AdapterSets


class SeqAdapter(HeadPerTask):
    name = "seq-adapter"
    summary = "one adapter in every block, shared by all tasks (SeqAdapter-Mamba)"
    options_class: ClassVar[type] = AdapterOptions

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        self.adapters = AdapterSets(model, self.options)
        self.adapters.add(setup.seed)
        self.adapters.current = 0

    def named_parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        return {**super().named_parameters(), "backbone": self.adapters.trained()}

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), **self.adapters.state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict({name: t for name, t in state.items() if not name.startswith("adapters.")})
        self.adapters.restore(state)
        if len(self.adapters) != 1:
            raise KeyError("adapters")  # of another method


METHODS.add(SeqAdapter.name, SeqAdapter)
