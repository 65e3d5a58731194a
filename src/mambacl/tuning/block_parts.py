"""Small trained parts of one ViT block, as LAE uses them: an adapter, LoRA on keys and values, or a prefix.

Each has learned scales that start at 1, and says by `change()` what its block does differently. They are tied to the
blocks of a ViT; `adapters` and `lora` have the parts that work on a Mamba block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.tuning.adapters import Adapter
from mambacl.tuning.lora import LowRank
from mambacl.tuning.passes import Change


class ParallelAdapter(nn.Module):
    """A bottleneck with GELU beside attention, which reads the tokens after the norm. Its output starts at zero."""

    def __init__(self, width: int, size: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.adapter = Adapter(width, size, 1.0, "gelu", learned_scale=True)
        self.adapter.reset(generator)

    def change(self) -> Change:
        return Change(attention=lambda x, h, y: y + self.adapter(h).to(y.dtype))


class KeyValueLoRA(nn.Module):
    """A change of rank `size` of the projections to keys and to values, each with its scale; zero at first."""

    def __init__(self, width: int, size: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.key = LowRank(width, width, size, generator, learned_scale=True)
        self.value = LowRank(width, width, size, generator, learned_scale=True)

    def change(self) -> Change:
        def added(h: Tensor, qkv: Tensor) -> Tensor:
            q, k, v = qkv.chunk(3, dim=2)
            return torch.cat((q, k + self.key(h).to(k.dtype), v + self.value(h).to(v.dtype)), dim=2)

        return Change(qkv=added)


class CompensatedPrefix(nn.Module):
    """`size` rows for keys and for values, each with its scale. The attention to the prefix sums to 1 for every query,
    and the attention to the tokens is what softmax over both leaves for them."""

    def __init__(self, width: int, size: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        rows = torch.empty(2, size, width).uniform_(0.0, 0.01, generator=generator)
        self.key, self.value = nn.Parameter(rows[0]), nn.Parameter(rows[1].clone())
        self.key_scale, self.value_scale = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def change(self) -> Change:
        rows = torch.stack((self.key_scale * self.key, self.value_scale * self.value))
        count = len(self.key)
        prefix = rows.unflatten(2, (self.heads, -1))[None]  # (1, 2, n, heads, d)
        return Change(prefix=prefix, attend=lambda q, k, v: compensated_attention(q, k, v, count))


def compensated_attention(q: Tensor, k: Tensor, v: Tensor, prefix: int) -> Tensor:
    """Softmax attention whose weights on the first `prefix` keys are divided by their own sum."""
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1)
    own, tokens = weights[..., :prefix], weights[..., prefix:]
    return torch.cat((F.normalize(own, p=1.0, dim=-1), tokens), dim=-1) @ v


BLOCK_PARTS: dict[str, type[ParallelAdapter | KeyValueLoRA | CompensatedPrefix]] = {
    "adapter": ParallelAdapter,
    "lora": KeyValueLoRA,
    "prefix": CompensatedPrefix,
}
