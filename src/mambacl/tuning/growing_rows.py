"""Parameters that grow with the tasks: rows that train now, and the earlier ones, which no longer do."""

from typing import Any

import torch
from torch import Tensor, nn


def fits_any_count(module: nn.Module) -> None:
    """Lets a module load a state in which its tensors have another number of rows."""

    def fit(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        for name, own in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            given = state.get(prefix + name)
            if given is not None and given.shape[1:] == own.shape[1:] and len(given) != len(own):
                empty = own.new_empty(given.shape)
                setattr(module, name, nn.Parameter(empty) if isinstance(own, nn.Parameter) else empty)

    module.register_load_state_dict_pre_hook(fit)


class GrowingRows(nn.Module):
    """`current` (n, *shape) trains, `earlier` (m, *shape) is fixed. Both start empty."""

    earlier: Tensor

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.current = nn.Parameter(torch.empty(0, *shape))
        self.register_buffer("earlier", torch.empty(0, *shape))
        fits_any_count(self)

    def start(self, rows: Tensor) -> None:
        """Fixes the rows so far; these train from now on."""
        self.earlier = torch.cat((self.earlier, self.current.detach()))
        self.current = nn.Parameter(rows.detach().to(self.earlier, copy=True))

    def extend(self, rows: Tensor) -> None:
        """Adds rows to those that train."""
        self.current = nn.Parameter(torch.cat((self.current.detach(), rows.to(self.current))))

    def rows(self) -> Tensor:
        """All of them, in the order in which they were added."""
        return torch.cat((self.earlier, self.current))
