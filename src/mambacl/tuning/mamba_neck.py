"""Mamba-FSCIL's neck: a selective SSM over a feature map in four orders, and what its losses compare."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.tuning.mamba_mixer import MambaMixer, Mixed


@dataclass(frozen=True)
class Seen:
    """What a branch makes of maps, all with the batch first."""

    pooled: Tensor
    """(b, c)"""
    gates: Tensor
    """the gates before their SiLU, summed over the four orders as the released code does, (b, c, l)"""
    first: Mixed
    """of the first order"""


class NeckBranch(nn.Module):
    """Two 1 x 1 convolutions on a map (b, c, side, side), a position per token, then a selective SSM over the tokens by
    rows, by columns, and both backwards; the mean over tokens of the sum of the four."""

    def __init__(self, width: int, side: int, hidden: int, states: int, rank: int) -> None:
        super().__init__()
        self.side = side
        self.mlp = nn.Sequential(
            nn.Conv2d(width, hidden, 1),
            nn.LayerNorm((hidden, side, side)),
            nn.LeakyReLU(0.1),
            nn.Conv2d(hidden, width, 1, bias=False),
        )
        self.position = nn.Parameter(nn.init.trunc_normal_(torch.zeros(1, side * side, width), std=0.02))
        self.ssm = MambaMixer(width, states, rank)

    @torch.no_grad()
    def close(self) -> None:
        """Sets the gate's rows to zero: the branch gives 0 until it is trained."""
        rows = self.ssm.in_proj.weight
        rows[len(rows) // 2 :] = 0

    def by_columns(self, tokens: Tensor) -> Tensor:
        """Tokens (b, l, d) in row order, in column order; and back, because the map is square."""
        return tokens.unflatten(1, (self.side, self.side)).transpose(1, 2).flatten(1, 2)

    def forward(self, maps: Tensor) -> Seen:
        x = self.mlp(maps).flatten(2).mT + self.position  # (b, l, c)
        columns = self.by_columns(x)
        mixed = self.ssm(torch.cat((x, x.flip(1), columns, columns.flip(1))))
        rows, rows_back, down, up = mixed.output.chunk(4)
        pooled = (rows + rows_back.flip(1) + self.by_columns(down + up.flip(1))).mean(1)
        z, z_back, z_down, z_up = mixed.gate.chunk(4)
        gates = z + z_back.flip(2) + self.by_columns(z_down + z_up.flip(2))  # flips channels where tokens were meant
        count = len(maps)
        first = replace(mixed, output=rows, gate=z, dt=mixed.dt[:count], B=mixed.B[:count], C=mixed.C[:count])
        return Seen(pooled, gates.mT, first)


class DualNeck(nn.Module):
    """A branch for base classes and one for all later ones, which begins closed."""

    def __init__(self, width: int, side: int, hidden: int, states: int, rank: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.base, self.new = (NeckBranch(width, side, hidden, states, rank) for _ in range(2))
        self.new.close()

    def forward(self, maps: Tensor, later: bool) -> tuple[Tensor, Seen | None]:
        """The feature (b, c): the mean of the map and what the branches add. In later tasks the base branch is fixed,
        and the new one shows what it sees."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not later):
            feature = self.base(maps).pooled + maps.mean((2, 3))
        if not later:
            return feature, None
        seen: Seen = self.new(maps)
        return feature + seen.pooled, seen


def class_sensitive(
    seen: Seen, by_gates: bool, base: int, suppress: float, encourage: float, separate: float
) -> Tensor:
    """The loss of the new branch if the first `base` rows are of base classes. It must say little about those and much
    about others, in its output or its gates, and have other dt, B and C for them."""
    shown = seen.gates if by_gates else seen.pooled
    apart = [separation(part[:base], part[base:]) for part in (seen.first.dt, seen.first.B, seen.first.C)]
    said = suppress * mean_norm(shown[:base]) - encourage * mean_norm(shown[base:])
    return said + separate * torch.stack(apart).sum()


def mean_norm(values: Tensor) -> Tensor:
    """The norm of all values over their number."""
    return values.norm() / values.numel()


def separation(base: Tensor, novel: Tensor) -> Tensor:
    """How far two groups of inputs (b, l, n) are from having orthogonal means: the mean of |I - cos|, 2 x 2."""
    directions = F.normalize(torch.stack([group.flatten(0, 1).mean(0) for group in (base, novel)]), dim=1)
    return (torch.eye(2, dtype=base.dtype, device=base.device) - directions @ directions.T).abs().mean()
