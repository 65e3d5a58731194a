"""A Mamba-1 mixer over any sequence of tokens, to add to a model: input projection, causal convolution, selective scan
and gate; an output projection only if asked for."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl import ops
from mambacl.ops.precision import at_least_float32, full_precision

State = tuple[Tensor, Tensor]
"""the last inputs of the convolution (b, kernel - 1, d), and the hidden state (b, d, n): its size does not grow"""


@dataclass(frozen=True)
class Mixed:
    """What a mixer makes of tokens (b, l, c)."""

    output: Tensor
    """(b, l, c), or (b, l, d) without output projection"""
    gate: Tensor
    """before its SiLU, (b, l, d)"""
    dt: Tensor
    """what dt_proj makes delta of, (b, l, rank)"""
    B: Tensor
    """(b, l, n), as C"""
    C: Tensor
    state: State
    """after the last token, for `MambaMixer.step`"""


class MambaMixer(nn.Module):
    """Parameters have Mamba's names, shapes and start values."""

    def __init__(
        self, width: int, states: int, rank: int, expand: int = 1, kernel: int = 4, projects_out: bool = False
    ) -> None:
        super().__init__()
        inner = expand * width
        self.rank, self.states = rank, states
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)  # rows: x, then the gate
        self.conv1d = nn.Conv1d(inner, inner, kernel, groups=inner)
        self.x_proj = nn.Linear(inner, rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False) if projects_out else None
        nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
        with torch.no_grad():
            dt = self.dt_proj.bias.uniform_(math.log(0.001), math.log(0.1)).exp()
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def forward(self, tokens: Tensor) -> Mixed:
        u, z = self.in_proj(tokens).chunk(2, dim=-1)
        x = ops.causal_conv_silu(u, self.conv1d.weight.squeeze(1), self.conv1d.bias)
        dt, B, C = self.x_proj(x).split([self.rank, self.states, self.states], dim=-1)
        with full_precision(x):
            y, last = ops.scan_low_rank(x, dt, self.dt_proj, self.A_log, B.unsqueeze(2), C.unsqueeze(2))
            y = torch.addcmul(y, at_least_float32(self.D), at_least_float32(x)) * F.silu(at_least_float32(z))
        before = self.conv1d.weight.shape[-1] - 1
        window = F.pad(u, (0, 0, max(0, before - u.shape[1]), 0))[:, -before:] if before else u[:, :0]
        return Mixed(self._out(y.to(tokens.dtype)), z, dt, B, C, (window, last))

    def step(self, token: Tensor, state: State | None = None) -> Mixed:
        """The same for one token (b, c) after those that the state has seen; without a state it is the first."""
        x, z = self.in_proj(token).chunk(2, dim=-1)
        kernel = self.conv1d.weight.shape[-1]
        if state is None:
            state = x.new_zeros(len(x), kernel - 1, x.shape[1]), x.new_zeros(len(x), x.shape[1], self.states)
        window = torch.cat((state[0], x[:, None]), dim=1)  # (b, kernel, d)
        x = F.silu(self.conv1d(window.mT)[..., 0])
        dt, B, C = self.x_proj(x).split([self.rank, self.states, self.states], dim=-1)
        delta = F.softplus(self.dt_proj(dt))
        h = torch.exp(delta[..., None] * -self.A_log.exp()) * state[1] + (delta * x)[..., None] * B[:, None]
        y = (torch.einsum("bdn,bn->bd", h, C) + self.D * x) * F.silu(z)
        return Mixed(self._out(y), z, dt, B, C, (window[:, 1:], h))

    def _out(self, y: Tensor) -> Tensor:
        return y if self.out_proj is None else self.out_proj(y)
