"""SeqAdapter-Mamba: trains one set of adapters on all tasks in turn; the backbone is fixed."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from mambacl.methods.base import Method
from mambacl.methods.registry import METHODS
from mambacl.tuning import AdapterOptions, AdapterSets, Tuning


class SeqAdapter(Method):
    name = "seq-adapter"
    summary = "one adapter in every block, shared by all tasks (SeqAdapter-Mamba)"
    options_class: ClassVar[type] = AdapterOptions

    def make_tuning(self) -> Tuning:
        self.adapters = AdapterSets(self.model, self.options)
        self.adapters.add(self.setup.seed)
        self.adapters.current = 0
        return self.adapters

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        if len(self.adapters) != 1:
            raise KeyError("adapters")  # a state of another method


METHODS.add(SeqAdapter.name, SeqAdapter)
