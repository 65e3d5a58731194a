"""Prompts that are weighted sums of components. Each task adds some and fixes those before, as in CODA-Prompt.

In one block, the prompt of a query q is sum_m cos(q * A_m, K_m) P_m over the components so far: keys K, optional gates
A and components P. New rows are orthogonal to the earlier ones at first. Works with any backbone; CODA-Prompt uses the
result as a prefix, which needs attention.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.errors import UserError


def orthogonal_rows(earlier: Tensor, draws: Tensor) -> Tensor:
    """Unit rows (n, c) from random ones, by classical Gram-Schmidt against the earlier rows and each other. Earlier
    rows that have been trained are not orthogonal any more, so the result is orthogonal to them only approximately."""
    basis = earlier
    for draw in draws:
        shares = (basis @ draw) / basis.square().sum(1) if len(basis) else draw.new_zeros(0)
        basis = torch.cat((basis, (draw - shares @ basis)[None]))
    return F.normalize(basis[len(earlier) :], dim=1)


def orthogonality(rows: Tensor) -> Tensor:
    """mean((M M^T - I)^2) for rows M (n, c)."""
    return (rows @ rows.T - torch.eye(len(rows), dtype=rows.dtype, device=rows.device)).square().mean()


class GrowingPool(nn.Module):
    """`keys`, `gates` (blocks, size, c) and `components` (blocks, size, length, c). Rows from `start` to `stop` train;
    those before are fixed, those behind are not in use yet."""

    rows: Tensor
    gates: nn.Parameter | None

    def __init__(self, blocks: Sequence[int], size: int, length: int, width: int, gates: bool = True) -> None:
        super().__init__()
        self.places, self.size = {block: place for place, block in enumerate(blocks)}, size
        self.keys = nn.Parameter(torch.zeros(len(blocks), size, width))
        self.gates = nn.Parameter(torch.zeros(len(blocks), size, width)) if gates else None
        self.components = nn.Parameter(torch.zeros(len(blocks), size, length, width))
        self.start = self.stop = 0
        self.register_buffer("rows", torch.zeros(2, dtype=torch.int64))  # start and stop, for the state
        self.register_load_state_dict_post_hook(lambda *_: self._follow_rows())

    def _follow_rows(self) -> None:
        self.start, self.stop = self.rows.tolist()

    def matrices(self) -> dict[str, Tensor]:
        """What grows, each (blocks, size, ...)."""
        gates = {} if self.gates is None else {"gates": self.gates}
        return {"keys": self.keys, **gates, "components": self.components}

    @torch.no_grad()
    def grow(self, count: int, seed: int, draws: Mapping[str, Tensor] | None = None, afresh: bool = True) -> None:
        """Fixes the rows so far and adds `count`. `afresh`: makes them orthogonal to the earlier rows as they are now;
        otherwise the first call starts all rows of the pool, orthogonal to each other. `draws`: standard normal numbers
        (blocks, count, ...) by name, in place of random ones."""
        if self.stop + count > self.size:
            raise UserError(
                f"The pool of {self.size} components is full: {self.stop} are in use, and a task needs {count}. Train "
                "with a larger options.pool."
            )
        self.start, self.stop = self.stop, self.stop + count
        self.rows.copy_(torch.tensor([self.start, self.stop]))
        if not afresh and self.start:
            return
        generator, stop = torch.Generator().manual_seed(seed), self.stop if afresh else self.size
        for name, matrix in self.matrices().items():
            shape = (matrix.shape[0], stop - self.start, *matrix.shape[2:])
            drawn = torch.randn(shape, generator=generator) if draws is None else draws[name].reshape(shape)
            for place, rows in enumerate(drawn.to(matrix).flatten(2)):
                new = orthogonal_rows(matrix[place, : self.start].flatten(1), rows)
                matrix[place, self.start : stop] = new.view(shape[1:])

    def visible(self, matrix: Tensor, block: int) -> Tensor:
        """The rows so far of one block; only those of the current task get a gradient."""
        own = matrix[self.places[block]]
        return torch.cat((own[: self.start].detach(), own[self.start : self.stop]))

    def weights(self, block: int, query: Tensor) -> Tensor:
        """Signed, (b, components), for queries (b, c)."""
        keys = F.normalize(self.visible(self.keys, block), dim=1)
        if self.gates is None:
            return F.normalize(query, dim=1) @ keys.T
        gated = F.normalize(query[:, None] * self.visible(self.gates, block), dim=2)  # (b, components, c)
        return (gated * keys).sum(2)

    def prompt(self, block: int, query: Tensor) -> Tensor | None:
        """(b, length, c), or None in a block without prompts."""
        if block not in self.places:
            return None
        return torch.einsum("bm,mlc->blc", self.weights(block, query), self.visible(self.components, block))

    def penalty(self) -> Tensor:
        """The sum of `orthogonality` over blocks, keys, gates and flattened components."""
        parts = [self.visible(m, block).flatten(1) for m in self.matrices().values() for block in self.places]
        return torch.stack([orthogonality(rows) for rows in parts]).sum()
