"""The adapter for plain layers: any `nn.Linear`, `nn.Conv1d` and `nn.Conv2d`, by what goes into them."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.nullspace.adapters import Block, Part, Record, first_tensor


def plain_layer(module: nn.Module, name: str) -> Block | None:
    if isinstance(module, nn.Linear):
        part = Part("linear", f"{name}.weight" if name else "weight")
    elif isinstance(module, (nn.Conv1d, nn.Conv2d)):
        part = Part("conv", f"{name}.weight" if name else "weight", groups=module.groups)
    else:
        return None

    def hooks(record: Record) -> list[Any]:
        def show(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = first_tensor(arguments, named)
            rows = x.flatten(1, -2) if isinstance(module, nn.Linear) and x.dim() > 2 else x
            if isinstance(module, nn.Linear):
                record({"in": rows if rows.dim() == 3 else rows[:, None]})
            else:
                record({"in": lambda: windows(module, x)})

        return [module.register_forward_pre_hook(show, with_kwargs=True)]

    return Block(name, module, (part,), hooks, selective=False)


def windows(conv: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """What each group of a convolution multiplies at each place: (images, places, groups, values)."""
    dims = len(conv.kernel_size)
    if x.dim() == dims + 1:
        x = x[None]
    if isinstance(conv.padding, str):
        totals = [d * (k - 1) if conv.padding == "same" else 0 for d, k in zip(conv.dilation, conv.kernel_size)]  # noqa: B905
        pads = [(total // 2, total - total // 2) for total in totals]
    else:
        pads = [(p, p) for p in conv.padding]
    flat = [side for pair in reversed(pads) for side in pair]
    x = F.pad(x, flat, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)
    kernel, stride, dilation = conv.kernel_size, conv.stride, conv.dilation
    if dims == 1:
        x, kernel, stride, dilation = x[:, :, None], (1, *kernel), (1, *stride), (1, *dilation)
    patches = F.unfold(x, kernel, dilation=dilation, stride=stride)  # (b, c k, places)
    return patches.mT.unflatten(-1, (conv.groups, -1))
