"""Null spaces for prompt tokens in attention, one pair per block, as in VPT-NSP2.

An update U (n, c) of a block's n prompts becomes B2 U B1. B1 belongs to the rows q_h W_k,h of image tokens and heads,
which turn a prompt into attention logits; B2 to their attention on the prompts, which weights the prompts' values. Each
is eta U0 U0^T / |U0 U0^T| + (1 - eta) I for the null space U0 of J^T J.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mambacl.nullspace.blocks import Part, Side
from mambacl.nullspace.projected_step import ProjectedStep, projected_parts, restrict_steps
from mambacl.nullspace.projectors import Decomposition, decompose

SIDES: dict[str, Side] = {"rows": "right", "attention": "left"}


def key_rows(attention: Any, queries: Tensor) -> Tensor:
    """J^T J (c, c) of the rows q_h W_k,h, for queries (b, heads, l, d) before scaling. Summing over queries first costs
    less than making the rows."""
    keys = attention.qkv.weight.unflatten(0, (3, attention.num_heads, -1))[1]  # (heads, d, c)
    grams = queries.transpose(0, 1).flatten(1, 2)
    grams = grams.mT @ grams  # (heads, d, d)
    return (keys.mT @ grams @ keys).sum(0)


def attention_on_last(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """The softmax weights (b, heads, l, count) of queries on the last keys, among all of them."""
    weights = (queries @ keys.mT * queries.shape[-1] ** -0.5).softmax(-1)
    return weights[..., weights.shape[-1] - count :]


class PromptSpace:
    """For prompts (blocks, n, c), by eta of `rows` and of `attention`."""

    def __init__(self, prompts: Tensor, etas: Mapping[str, float], rule: str = "smoothed-corner") -> None:
        self.prompts, self.etas, self.rule = prompts, etas, rule
        self.statistics: dict[str, Tensor] = {}
        """once a task has ended: J^T J of `rows` (blocks, c, c) and of `attention` (blocks, n, n)"""
        self.spaces: dict[str, list[Decomposition]] = {}
        self.step = ProjectedStep()

    def add(self, rows: Sequence[Tensor], attention: Sequence[Tensor], mean: bool) -> None:
        """A batch's J^T J of `rows`, and its attention (b, heads, l, n), of each block; or their means over rows of
        J."""
        flat = [one.flatten(0, 2) for one in attention]
        for name, grams in (("rows", rows), ("attention", [one.T @ one for one in flat])):
            added = torch.stack(list(grams)).double() / (len(flat[0]) if mean else 1)
            self.statistics[name] = self.statistics[name] + added if name in self.statistics else added

    def project(self) -> None:
        """From now on, steps go through the null spaces of all statistics so far."""
        dtype, device, shapes = self.prompts.dtype, self.prompts.device, {"prompts": self.prompts.shape}
        constraints = []
        for name, side in SIDES.items():
            self.spaces[name] = decompose(list(self.statistics[name]), self.rule, dtype, dtype)
            uses = [(one, [Part("prompt", "prompts", (block,), side)]) for block, one in enumerate(self.spaces[name])]
            constraints += projected_parts(uses, shapes, self.etas[name], "frobenius", dtype, device)
        self.step = ProjectedStep(constraints)  # one after the other: each has its own copy of what was before

    def wrap(self, optimizer: torch.optim.Optimizer) -> None:
        """Hooks replace the change that the optimizer makes by the projected one, as in `NullSpace.wrap`."""
        restrict_steps(optimizer, {"prompts": self.prompts}, lambda: self.step)

    def load(self, statistics: Mapping[str, Tensor]) -> None:
        self.statistics = {name: statistics[name].to(self.prompts.device) for name in SIDES}
        self.project()
