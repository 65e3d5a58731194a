"""The selective scan as a loop over time of whole-tensor operations, with a hand-written backward.

Runs on every device. Unlike the reference it builds no autograd graph: each step is one fused multiply-add, everything
else runs in bulk. The work is cut into tiles (a range of images, of each group's channels and of time) whose states
stay in the cache. The forward keeps the state at the start of each tile; the backward recomputes the others from it.

Shapes: u, delta (b, l, d); A (d, n); B, C (b, l, g, n), g groups of k = d / g channels. Internally, time comes first
and channels last, so every operation runs along contiguous channels: states are (l, b, g, n, k).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

STEP_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 22}  # states of a tile at one time
TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # states of a tile at all its times


def forward(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output (b, l, d), last state (b, d, n), and the states at the start of each tile (tiles, b, g, n, k)."""
    tiles = _Tiles(u, delta, A, B, C)
    y, last = torch.empty_like(tiles.u), u.new_empty(tiles.kept_shape[1:])
    starts = u.new_zeros(tiles.kept_shape)
    for b, k in tiles.columns():
        h = starts.new_empty(0)
        for i, t in enumerate(tiles.times()):
            _, _, h = tiles.states(t, b, k, starts[i, b, ..., k])
            y[t, b, :, k] = torch.einsum("lbgnk,lbgn->lbgk", h[1:], tiles.C[t, b])
            if i + 1 < len(starts):
                starts[i + 1, b, ..., k] = h[-1]
        last[b, ..., k] = h[-1]
    return tiles.batch_first(y), last.mT.flatten(1, 2), starts


def backward(
    dy: Tensor, dlast: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tiles = _Tiles(u, delta, A, B, C)
    dy = tiles.time_first(dy)
    dlast = dlast.unflatten(1, (tiles.groups, -1)).mT
    du, ddelta, dA = torch.empty_like(tiles.u), torch.empty_like(tiles.u), torch.zeros_like(tiles.A)
    dB, dC = torch.zeros_like(tiles.B), torch.zeros_like(tiles.C)
    for b, k in tiles.columns():
        carry = dlast[b, ..., k].contiguous()  # the gradient of the state after the tile
        for i, t in reversed(list(enumerate(tiles.times()))):
            a, decays, h = tiles.states(t, b, k, starts[i, b, ..., k])
            x, dt, g = (v[t, b, :, k].contiguous() for v in (tiles.u, tiles.delta, dy))  # (l, b, g, k)
            q, steps = tiles.buffer("q", a.shape)  # the gradient of the states
            torch.mul(g[..., None, :], tiles.C[t, b, ..., None], out=q)
            steps[-1].add_(carry)
            for time in range(len(steps) - 2, -1, -1):
                steps[time].addcmul_(decays[time + 1], steps[time + 1])
            torch.mul(a[0], q[0], out=carry)
            dC[t, b] += torch.einsum("lbgnk,lbgk->lbgn", h[1:], g)
            dB[t, b] += torch.einsum("lbgnk,lbgk->lbgn", q, dt * x)
            through_input = torch.einsum("lbgnk,lbgn->lbgk", q, tiles.B[t, b])
            du[t, b, :, k] = through_input * dt
            e = q.mul_(h[:-1]).mul_(a)  # the gradient of delta_t A
            through_decay = torch.mul(e, tiles.A[..., k], out=a).sum(-2)
            ddelta[t, b, :, k] = through_decay.addcmul_(through_input, x)
            dA[..., k] += e.mul_(dt[:, :, :, None]).sum((0, 1))
    dB, dC = dB.transpose(0, 1), dC.transpose(0, 1)
    return tiles.batch_first(du), tiles.batch_first(ddelta), dA.mT.flatten(0, 1), dB, dC


def kept_shape(u: Tensor, A: Tensor, B: Tensor) -> tuple[int, ...]:
    """Shape of the states that the forward keeps for the backward."""
    batch, length, channels = u.shape
    return -(-length // _tile_sizes(u, A, B)[2]), batch, B.shape[2], A.shape[1], channels // B.shape[2]


def _tile_sizes(u: Tensor, A: Tensor, B: Tensor) -> tuple[int, int, int]:
    """Images, channels per group and times in a tile: a function of shape and device, not of the number of threads."""
    device = u.device.type if u.device.type in STEP_ELEMENTS else "cuda"
    shared = B.shape[2] * A.shape[1]
    width = u.shape[2] // B.shape[2]
    channels = _evenly(width, STEP_ELEMENTS[device] // shared)
    images = _evenly(u.shape[0], STEP_ELEMENTS[device] // (shared * channels))
    times = _evenly(u.shape[1], TILE_ELEMENTS[device] // (shared * channels * images))
    return images, channels, times


def _evenly(total: int, most: int) -> int:
    """The size, at most `most`, of the fewest nearly equal parts that cover the total."""
    parts = -(-total // max(1, most))
    return -(-total // parts)


class _Tiles:
    """The inputs with time first, the list of tiles, and scratch memory that all tiles share."""

    def __init__(self, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> None:
        self.groups = B.shape[2]
        self.sizes = _tile_sizes(u, A, B)
        self.kept_shape = kept_shape(u, A, B)
        self.u, self.delta = self.time_first(u), self.time_first(delta)  # (l, b, g, k)
        self.A = A.unflatten(0, (self.groups, -1)).mT.contiguous()  # (g, n, k)
        self.B, self.C = (M.transpose(0, 1).contiguous() for M in (B, C))  # (l, b, g, n)
        self._buffers: dict[tuple[str, torch.Size], tuple[Tensor, Sequence[Tensor]]] = {}

    def time_first(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().unflatten(2, (self.groups, -1))

    def batch_first(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(0, 1)

    def columns(self) -> Iterator[tuple[slice, slice]]:
        _, batch, _, width = self.u.shape
        for b in range(0, batch, self.sizes[0]):
            for k in range(0, width, self.sizes[1]):
                yield slice(b, b + self.sizes[0]), slice(k, k + self.sizes[1])

    def times(self) -> Iterator[slice]:
        for t in range(0, self.u.shape[0], self.sizes[2]):
            yield slice(t, t + self.sizes[2])

    def buffer(self, name: str, shape: torch.Size) -> tuple[Tensor, Sequence[Tensor]]:
        """Scratch memory, and one view of it per time step."""
        if (name, shape) not in self._buffers:
            memory = self.u.new_empty(shape)
            self._buffers[name, shape] = memory, memory.unbind(0)
        return self._buffers[name, shape]

    def states(self, t: slice, b: slice, k: slice, start: Tensor) -> tuple[Tensor, Sequence[Tensor], Tensor]:
        """For one tile: exp(delta A) (l, b, g, n, k), a view of it per time step, and the states (l + 1, b, g, n, k),
        beginning with `start`."""
        dt, x, B = self.delta[t, b, :, k], self.u[t, b, :, k], self.B[t, b]
        length, *shape = (*B.shape, dt.shape[-1])
        a, decays = self.buffer("a", torch.Size((length, *shape)))
        h, steps = self.buffer("h", torch.Size((length + 1, *shape)))
        torch.mul(dt[..., None, :], self.A[..., k], out=a).exp_()
        torch.mul((dt * x)[..., None, :], B[..., None], out=h[1:])
        steps[0].copy_(start)
        for decay, (before, after) in zip(decays, pairwise(steps), strict=True):
            after.addcmul_(decay, before)
        return a, decays, h
