"""Prefix prompts that small convolutions generate from one shared prompt, as in ConvPrompt. vit backbones only.

In one block, a query q gives sum_p cos(m(q), k_p) (W_p * S): the shared prompt S of the block, convolved with the
kernels of each generator p, one for each head, for keys and for values. m is a small network, k_p the generator's key.
Each task adds generators and fixes those before.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.tuning.average import averaged_copy
from mambacl.tuning.growing_pool import orthogonal_rows


class Generators(nn.Module):
    """Those of one task: `kernels` (2, blocks, heads, n, k, k), `biases` (2, blocks, heads, n), `keys` (n, c)."""

    def __init__(self, blocks: int, heads: int, count: int, kernel: int, keys: Tensor, draw: torch.Generator) -> None:
        super().__init__()
        shape, bound = (2, blocks, heads, count), 1 / kernel  # as PyTorch starts a convolution
        self.kernels = nn.Parameter(torch.empty(*shape, kernel, kernel).uniform_(-bound, bound, generator=draw))
        self.biases = nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=draw))
        self.keys = nn.Parameter(keys)


class ConvPrompts(nn.Module):
    """`shared` (blocks, rows, columns): rows for keys and for values, columns for the heads, each larger than a prompt
    by what a convolution without padding takes away."""

    def __init__(self, blocks: Sequence[int], length: int, kernel: int, width: int, heads: int, seed: int) -> None:
        super().__init__()
        self.places = {block: place for place, block in enumerate(blocks)}
        self.kernel, self.heads, self.key_width = kernel, heads, max(1, width // 4)
        draw = torch.Generator().manual_seed(seed)
        shared = torch.empty(len(blocks), 2 * (length + kernel - 1), width + heads * (kernel - 1))
        self.shared = nn.Parameter(shared.uniform_(-1, 1, generator=draw))
        middle = max(1, width // 2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.matcher = nn.Sequential(nn.Linear(width, middle), nn.ReLU(), nn.Linear(middle, self.key_width))
        self.generators = nn.ModuleList()  # one entry per task
        self.shared_before = nn.Parameter(self.shared.detach().clone(), requires_grad=False)
        self.matcher_before = averaged_copy(self.matcher)

    def joined(self, name: str, dim: int) -> Tensor:
        """A parameter of the generators of all tasks."""
        return torch.cat([getattr(task, name) for task in self.generators], dim)

    @torch.no_grad()
    def grow(self, count: int, seed: int, draws: Tensor | None = None) -> None:
        """Fixes the generators so far and adds some. Their keys are orthogonal to all others while there is room: there
        are as many orthogonal keys as a key has entries. `draws` (count, c): in place of random numbers."""
        draw = torch.Generator().manual_seed(seed)
        rows = torch.randn(count, self.key_width, generator=draw) if draws is None else draws
        earlier = self.joined("keys", 0) if len(self.generators) else rows.new_zeros(0, self.key_width)
        rows = rows.to(earlier)
        room = len(earlier) + count <= self.key_width
        keys = orthogonal_rows(earlier, rows) if room else F.normalize(rows, dim=1)
        self.generators.requires_grad_(False)
        self.generators.append(Generators(len(self.places), self.heads, count, self.kernel, keys, draw))

    def fit(self, state: Mapping[str, Tensor]) -> None:
        """Makes room for the generators of a state, by their names in it."""
        self.generators = nn.ModuleList()
        while (keys := state.get(f"generators.{len(self.generators)}.keys")) is not None:
            self.grow(len(keys), seed=len(self.generators))

    def similarity(self, query: Tensor) -> Tensor:
        """(b, generators), for queries (b, c)."""
        return F.normalize(self.matcher(query), dim=1) @ F.normalize(self.joined("keys", 0), dim=1).T

    def generated(self, block: int, query: Tensor) -> Tensor:
        """Keys and values (b, 2, length, heads, d)."""
        place = self.places[block]
        shared = self.shared[place].unflatten(0, (2, -1)).unflatten(2, (self.heads, -1)).movedim(2, 1)
        kernels, biases = self.joined("kernels", 3)[:, place], self.joined("biases", 3)[:, place]
        prompts = F.conv2d(  # one group for each head of keys and of values
            shared.flatten(0, 1)[None], kernels.flatten(0, 2)[:, None], biases.flatten(), groups=2 * self.heads
        )[0].unflatten(0, biases.shape)  # (2, heads, generators, length, d)
        return torch.einsum("bg,shgld->bslhd", self.similarity(query), prompts)

    @torch.no_grad()
    def remember(self) -> None:
        """Keeps the shared prompt and the matcher as they are now, for `drift`."""
        self.shared_before.copy_(self.shared)
        self.matcher_before.load_state_dict(self.matcher.state_dict())

    def drift(self) -> Tensor:
        """The sum of the absolute changes since then."""
        pairs = zip(self.matcher.parameters(), self.matcher_before.parameters(), strict=True)
        parts = [(now - before).abs().sum() for now, before in [*pairs, (self.shared, self.shared_before)]]
        return torch.stack(parts).sum()
