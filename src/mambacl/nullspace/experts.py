"""The block reader for experts of a mixture whose weights are stacked in one parameter: (experts, out, in).

Each expert is a pair of linear layers, protected by the tokens that are sent to it: its part is one matrix of the
parameter, and its features are `in3` (the tokens of expert 3) and `hidden3` (what its second layer gets). So each has
its own covariance, rank and projector. An expert that gets no token protects nothing.

The reader knows modules as `transformers` has them in Mixtral, Jamba, Qwen3-MoE and others: parameters `gate_up_proj`
(or `up_proj`) and `down_proj`, called with tokens (tokens, width) and the experts chosen for each of them (tokens, k);
or with the tokens of all experts one after another, as in Llama 4. Weights can also be stored as (experts, in, out).
Biases and the router belong to no block: with `others="first-task"` or `"fixed"` they stay as they are.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.nullspace.blocks import Block, Part, Side
from mambacl.nullspace.shards import whole
from mambacl.nullspace.statistics import Record

FIRST = ("gate_up_proj", "up_proj")  # with and without a gate


def experts(module: nn.Module, name: str) -> Block | None:
    named: Any = module
    first = next((word for word in FIRST if _stacked(getattr(module, word, None))), None)
    if first is None or not _stacked(getattr(module, "down_proj", None)):
        return None
    up, down = getattr(module, first), named.down_proj
    wide = 2 if first == "gate_up_proj" else 1
    transposed = _transposed(up.shape, down.shape, wide, getattr(module, "is_transposed", None))
    if transposed is None:
        return None
    side: Side = "left" if transposed else "right"
    prefix, count = f"{name}." if name else "", len(up)
    parts = [
        Part("linear", f"{prefix}{word}", (number,), side, inputs={"in": f"{feature}{number}"})
        for word, feature in ((first, "in"), ("down_proj", "hidden"))
        for number in range(count)
    ]

    def hooks(record: Record) -> list[Any]:
        def show(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            tokens, chosen = _tokens_and_choice(arguments, named)
            found: dict[str, Any] = {}
            for number in range(count):
                found[f"in{number}"] = partial(_of_expert, tokens, chosen, number, count)
                found[f"hidden{number}"] = partial(hidden, tokens, chosen, number)
            record(found)

        def hidden(tokens: Tensor, chosen: Tensor | None, number: int) -> Tensor:
            rows = _of_expert(tokens, chosen, number, count)
            weight = whole(getattr(module, first))[number]
            bias = getattr(module, f"{first}_bias", None)
            out = rows.to(weight.dtype) @ (weight if transposed else weight.mT)
            return gated(module, out if bias is None else out + whole(bias)[number], wide)

        return [module.register_forward_pre_hook(show, with_kwargs=True)]

    return Block(name, module, tuple(parts), hooks, selective=False)


def gated(module: Any, out: Tensor, wide: int) -> Tensor:
    """What an expert's second layer gets, from what the first gives."""
    if wide == 1:
        found: Tensor = module.act_fn(out)
    elif hasattr(module, "_apply_gate"):
        found = module._apply_gate(out)
    else:
        gate, up = out.chunk(2, dim=-1)
        found = getattr(module, "act_fn", F.silu)(gate) * up
    return found


def _tokens_and_choice(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    tensors = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
    chosen = next((value for value in tensors[1:] if not value.is_floating_point()), None)
    return tensors[0], chosen


def _of_expert(tokens: Tensor, chosen: Tensor | None, number: int, count: int) -> Tensor:
    """The tokens of one expert, as one image: (1, tokens, width)."""
    rows = tokens.reshape(-1, tokens.shape[-1])
    if chosen is None:  # every expert's tokens, one expert after another
        return rows.unflatten(0, (count, -1))[number][None]
    sent = (chosen.reshape(len(rows), -1) == number).any(-1)
    return rows[sent][None]


def _stacked(parameter: object) -> bool:
    return isinstance(parameter, nn.Parameter) and parameter.dim() == 3


def _transposed(up: torch.Size, down: torch.Size, wide: int, said: bool | None) -> bool | None:
    """Whether weights are (experts, in, out); None if the shapes do not fit experts."""
    usual = up[2] == down[1] and up[1] == wide * down[2]
    other = up[1] == down[2] and up[2] == wide * down[1]
    if up[0] != down[0] or not (usual or other):
        return None
    return said if said is not None and usual and other else not usual
