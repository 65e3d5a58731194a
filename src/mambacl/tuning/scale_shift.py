"""SSF (Lian et al., *Scaling & Shifting Your Features*, NeurIPS 2022) in a fixed backbone: a trained factor and offset
per channel.

They act on what goes into a mixer or an MLP, which is the output of the norm before it, and on what comes out, which is
the output of its last linear layer. SSF's own code also has them inside, after `qkv` and `fc1`, after the patches and
after the final norm. Here they stay outside, because a mixer's inside can be one fused operator.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mambacl.nullspace.block_readers import find_blocks
from mambacl.nullspace.blocks import first_tensor, named_modules
from mambacl.tuning.adapters import AdapterSets, mixers

START = 0.02  # standard deviation of factors around 1 and of offsets around 0


class ScaleShift(nn.Module):
    """The factors and offsets of one module: row 0 for its input, row 1 for its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor, self.offset = nn.Parameter(torch.ones(2, width)), nn.Parameter(torch.zeros(2, width))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        self.factor.normal_(1, START, generator=generator)
        self.offset.normal_(0, START, generator=generator)

    def forward(self, tokens: Tensor, row: int) -> Tensor:
        return (tokens * self.factor[row] + self.offset[row]).to(tokens.dtype)


def scaled(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """The mixers and MLPs, by name, with the number of their channels."""
    found = {}
    for name, module in named_modules(model).items():
        norm, mlp = getattr(module, "norm2", None), getattr(module, "mlp", None)
        if isinstance(norm, nn.LayerNorm) and isinstance(mlp, nn.Module):
            found[f"{name}.mlp"] = (mlp, int(norm.normalized_shape[0]))
    attends = any(isinstance(getattr(module, "qkv", None), nn.Linear) for module in model.modules())
    return {**(mixers(model) if attends or find_blocks(model) or not found else {}), **found}


class ScaleShiftSets(AdapterSets):
    """Sets of factors and offsets, used as `AdapterSets` are."""

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        found = scaled(model)
        self.widths = [width for _, width in found.values()]
        like = next(model.parameters())
        self.device, self.dtype = like.device, like.dtype
        self.adapters = nn.ModuleList()  # one list per set
        self.current = None
        self._handles = []
        for index, (module, _) in enumerate(found.values()):
            self._handles.append(module.register_forward_pre_hook(self._before(index), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(index)))

    def new(self, width: int) -> nn.Module:
        return ScaleShift(width)

    def _before(self, index: int) -> Any:
        def scale(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if self.current is None:
                return None
            adapters: Any = self.adapters[self.current]
            tokens = first_tensor(arguments, keywords)
            new = adapters[index](tokens, 0)
            return (
                tuple(new if value is tokens else value for value in arguments),
                {name: new if value is tokens else value for name, value in keywords.items()},
            )

        return scale

    def _after(self, index: int) -> Any:
        def scale(_: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            if self.current is None:
                return output
            adapters: Any = self.adapters[self.current]
            return adapters[index](output, 1)

        return scale
