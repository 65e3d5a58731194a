"""A backbone's forward pass with changes in chosen blocks, made by a method and unknown to the backbone.

`run_blocks(model, images, change)` asks `change` before each block what that block does differently. A block without a
change runs as it is, so a pass without changes gives the model's own output, bit for bit. Parameters keep their names.

    def change(block):  # of type BlockInput
        return Change(prefix=prompts[block.index]) if block.index < 5 else None

    feature = run_blocks(vit, images, change).feature()

On a Mamba backbone with a class token only `tokens` of a `Change` works; the rest changes attention or an MLP, which
only the vit backbones have. To add something to a Mamba block see `adapters` and `lora`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.backbones.layers import Backbone, recomputed
from mambacl.backbones.vit import ViT
from mambacl.errors import UserError

MOST = 4  # prompt tokens per token of the model

Norm: TypeAlias = Callable[[Tensor], Tensor]
Branch: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Tokens:
    """Tokens that join the sequence before a block."""

    values: Tensor
    """(b, n, c), or (1, n, c) for the same in every image"""
    at: int | Literal["end", "ends"] = 1
    """index of the first of them: 0 before everything, 1 after a ViT's class token; end: behind everything; ends: half
    in front and half behind, so that a class token in the middle stays there"""
    kept: Literal["always", "block", "attention"] = "always"
    """block: they leave after the block; attention: after its attention, so that its MLP does not see them"""


@dataclass(frozen=True)
class Change:
    """What one block does differently. Several can be set at once."""

    tokens: Tokens | None = None
    prefix: Tensor | None = None
    """keys and values in front of the block's own, (b, 2, n, heads, d), or 1 in place of b"""
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """in place of softmax attention: from queries, keys and values (b, heads, l, d), the prefix included"""
    qkv: Callable[[Tensor, Tensor], Tensor] | None = None
    """the projection's new output (b, l, 3 c), from its input and its output: LoRA"""
    attention: Branch | None = None
    """the attention branch's new output, from the tokens before the norm, those after it, and the output: adapters"""
    mlp: Branch | None = None
    """the same for the MLP"""
    norm1: Norm | None = None
    """in place of the norm before attention; `with_affine` makes one"""
    norm2: Norm | None = None
    """in place of the norm before the MLP"""

    @property
    def only_tokens(self) -> bool:
        own = self.prefix, self.attend, self.qkv, self.attention, self.mlp, self.norm1, self.norm2
        whole_block = self.tokens is None or self.tokens.kept != "attention"
        return whole_block and all(part is None for part in own)


@dataclass(frozen=True)
class BlockInput:
    """What a block is about to get."""

    index: int
    tokens: Tensor
    class_at: int

    @property
    def class_token(self) -> Tensor:
        """(b, c), before the block's norm: the query of one-stage methods."""
        return self.tokens[:, self.class_at]


@dataclass(frozen=True)
class Output:
    """What the last block has given."""

    tokens: Tensor
    """(b, l, c), before the last norm"""
    class_at: int
    norm: Norm

    def feature(self, normed: bool = True) -> Tensor:
        """The class token (b, c) after the last norm, or before it."""
        token = self.tokens[:, self.class_at]
        return self.norm(token) if normed else token


Changes: TypeAlias = Callable[[BlockInput], Change | None]


def run_blocks(model: nn.Module, images: Tensor, change: Changes | None = None, norm: Norm | None = None) -> Output:
    """Runs all blocks. `norm`: in place of the last norm."""
    backbone = with_class_token(model)
    x = backbone.embed(images)
    class_at = backbone.class_index(x.shape[1])
    assert class_at is not None
    for index in range(len(backbone.feature_info)):
        wanted = change(BlockInput(index, x, class_at)) if change is not None else None
        if wanted is None:
            x = backbone.run_depth(index, x)
        else:
            x, class_at = _changed(backbone, index, x, class_at, wanted)
    return Output(x, class_at, norm or backbone.final_norm)


def with_affine(norm: nn.Module, weight: Tensor, bias: Tensor) -> Norm:
    """A layer norm with another scale and shift: (c,), or (b, c) for other ones in each image."""
    own: Any = norm

    def run(x: Tensor) -> Tensor:
        if weight.dim() == 1:
            return F.layer_norm(x, own.normalized_shape, weight, bias, own.eps)
        plain = F.layer_norm(x, own.normalized_shape, None, None, own.eps)
        shape = (len(weight), *[1] * (x.dim() - 2), -1)
        return plain * weight.view(shape) + bias.view(shape)

    return run


# What a model must have


def with_class_token(model: nn.Module) -> Backbone:
    if not isinstance(model, Backbone) or model.hierarchical or model.class_index(1) is None:
        raise UserError(
            f"Prompts need a backbone with one sequence of tokens and a class token, which {type(model).__name__} does "
            "not have: use a vit, De-focus Mamba or Vim backbone."
        )
    return model


def with_attention(model: nn.Module, user: str) -> ViT:
    """The model, if its blocks have attention. `user`: the name of a method, for the message."""
    if not isinstance(model, ViT):
        raise UserError(
            f"The method '{user}' changes attention, e.g. by prompts in front of keys and values, and "
            f"{type(model).__name__} has none that it knows: use a vit backbone, such as --backbone vit_nano."
        )
    return model


def checked_blocks(model: nn.Module, blocks: Sequence[int], option: str) -> list[int]:
    """Block indices that the model has."""
    depth = len(with_class_token(model).feature_info)
    if not blocks or any(not 0 <= block < depth for block in blocks) or len(set(blocks)) < len(blocks):
        raise UserError(f"{option} = {list(blocks)} must list some of the model's blocks, 0 to {depth - 1}, once each.")
    return sorted(blocks)


def check_length(model: nn.Module, length: int, option: str) -> None:
    """Refuses prompts that outnumber the model's own tokens several times: most of its work would go into them."""
    backbone = with_class_token(model)
    (patches,) = {info["reduction"] for info in backbone.feature_info}
    own = (backbone.default_cfg["input_size"][-1] // patches) ** 2 + 1  # type: ignore[index]
    if not 1 <= length <= MOST * own:
        raise UserError(
            f"{option}: {length} prompt tokens are too many for a model of {own} tokens: choose 1 to {MOST * own}."
        )


# One block


def _changed(model: Backbone, index: int, x: Tensor, class_at: int, change: Change) -> tuple[Tensor, int]:
    tokens, before = change.tokens, class_at
    cut: Callable[[Tensor], Tensor] = _uncut
    if tokens is not None:
        x, class_at, cut = _joined(x, class_at, tokens)
    if change.only_tokens:
        x = model.run_depth(index, x)
    else:
        block, early = with_attention(model, "change").blocks[index], tokens is not None and tokens.kept == "attention"

        def run(x: Tensor) -> Tensor:
            return vit_block(block, x, change, cut if early else _uncut)

        recompute = model.grad_checkpointing and torch.is_grad_enabled()
        x = recomputed(run, x, block) if recompute else run(x)
    if tokens is None or tokens.kept == "always":
        return x, class_at
    return (cut(x) if tokens.kept == "block" else x), before


def _uncut(x: Tensor) -> Tensor:
    return x


def _joined(x: Tensor, class_at: int, tokens: Tokens) -> tuple[Tensor, int, Callable[[Tensor], Tensor]]:
    """The sequence with the tokens in it, the class token's new place, and a function that takes them out again."""
    values = tokens.values.to(x.dtype).expand(len(x), -1, -1)
    count, own = values.shape[1], x.shape[1]
    if tokens.at == "ends":
        front = (own + count - 1) // 2 - class_at
        joined = torch.cat((values[:, :front], x, values[:, front:]), dim=1)
        return joined, class_at + front, lambda y: y[:, front : front + own]
    at = own if tokens.at == "end" else tokens.at
    joined = torch.cat((x[:, :at], values, x[:, at:]), dim=1)

    def cut(y: Tensor) -> Tensor:
        return torch.cat((y[:, :at], y[:, at + count :]), dim=1) if at < own else y[:, :own]

    return joined, class_at + (count if at <= class_at else 0), cut


def vit_block(block: Any, x: Tensor, change: Change, after_attention: Callable[[Tensor], Tensor] = _uncut) -> Tensor:
    """timm's block with a change. `after_attention` takes out tokens that only attention sees."""
    h = (change.norm1 or block.norm1)(x)
    y = vit_attention(block.attn, h, change)
    y = y if change.attention is None else change.attention(x, h, y)
    x = after_attention(x) + block.drop_path1(block.ls1(after_attention(y)))
    h = (change.norm2 or block.norm2)(x)
    y = block.mlp(h)
    y = y if change.mlp is None else change.mlp(x, h, y)
    return x + block.drop_path2(block.ls2(y))


def vit_attention(attention: Any, h: Tensor, change: Change) -> Tensor:
    """timm's attention with a change, for tokens (b, l, c)."""
    qkv = attention.qkv(h)
    if change.qkv is not None:
        qkv = change.qkv(h, qkv)
    q, k, v = qkv.unflatten(2, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # (b, heads, l, d)
    if change.prefix is not None:
        prefix = change.prefix.to(k.dtype).expand(len(h), -1, -1, -1, -1).transpose(2, 3)  # (b, 2, heads, n, d)
        k, v = torch.cat((prefix[:, 0], k), dim=2), torch.cat((prefix[:, 1], v), dim=2)
    y = (change.attend or F.scaled_dot_product_attention)(q, k, v)
    return attention.proj_drop(attention.proj(y.transpose(1, 2).flatten(2)))
