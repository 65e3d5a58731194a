"""One module per task. The last one trains; the earlier ones stay as they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class PerTask(nn.Module):
    """`tasks`: the modules so far, each made by `make`. A state with more of them adds what is missing."""

    like: torch.Tensor

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make, self.tasks = make, nn.ModuleList()
        self.register_buffer("like", torch.zeros(()), persistent=False)  # knows device and precision
        self.register_load_state_dict_pre_hook(_grow)

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, task: int) -> Any:
        return self.tasks[task]

    def add(self) -> Any:
        """The module of a new task; the earlier ones are fixed from now on."""
        self.tasks.requires_grad_(False)
        self.tasks.append(self.make().to(self.like.device, self.like.dtype))
        return self.tasks[-1]


def _grow(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, PerTask)
    start = f"{prefix}tasks."
    stored = {int(name.removeprefix(start).split(".")[0]) for name in state if name.startswith(start)}
    while len(module) <= max(stored, default=-1):
        module.add()
