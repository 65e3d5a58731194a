"""A block in which one learned token gathers what a sequence of tokens says. Works on the tokens of any backbone."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ClassAttention(nn.Module):
    """From tokens (b, l, c) a feature (b, c): t + attention of t over [t, tokens], then an MLP, each after a norm and
    with a residual. `token` t (c,) starts as zero; linear layers start as in a ViT."""

    def __init__(self, width: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        hidden = max(1, int(width * mlp_ratio))
        self.heads, self.token = heads, nn.Parameter(torch.zeros(width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    @torch.no_grad()
    def reset(self, generator: torch.Generator, token: Tensor) -> None:
        """Draws the weights (deviation 0.02, biases 0) and sets the token."""
        self.token.copy_(token)
        for layer in (self.q, self.kv, self.proj, self.fc1, self.fc2):
            drawn = nn.init.trunc_normal_(torch.empty(layer.weight.shape), std=0.02, generator=generator)
            layer.weight.copy_(drawn)
            layer.bias.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        own = self.token.to(tokens.dtype).expand(len(tokens), 1, -1)
        h = self.norm1(torch.cat((own, tokens), dim=1))
        q = self.q(h[:, :1]).unflatten(2, (self.heads, -1)).transpose(1, 2)  # (b, heads, 1, d)
        k, v = self.kv(h).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (b, heads, 1 + l, d) each
        x = own + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return x[:, 0]
