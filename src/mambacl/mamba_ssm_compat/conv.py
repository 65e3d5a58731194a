"""causal-conv1d's two functions: the depthwise causal convolution, and its continuation from a stored state."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.errors import UserError
from mambacl.ops import causal_conv_silu


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The convolution of x (b, d, l) with weight (d, k) and bias (d,), and an optional SiLU.

    seq_idx (b, l) numbers the sequences packed into a row; tokens with a negative number are padding. initial_states
    and final states, (b, d, k - 1), are the last inputs before the first token and up to the last token.
    """
    silu = _is_silu(activation)
    kept = weight.shape[1] - 1
    if seq_idx is not None:
        if initial_states is not None or return_final_states:
            raise UserError("causal_conv1d_fn takes seq_idx or states, not both: omit one of them.")
        return _same_layout(_packed(x, weight, bias, seq_idx, silu), x)
    seen = x if initial_states is None else torch.cat((initial_states.to(x.dtype), x), dim=-1)
    out = _same_layout(_convolve(seen, weight, bias, silu)[..., seen.shape[-1] - x.shape[-1] :], x)
    if not return_final_states:
        return out
    states = F.pad(seen, (kept - seen.shape[-1], 0))  # zeros in front of a short sequence; a negative pad crops
    if final_states_out is not None:
        states = final_states_out.copy_(states)
    return out, states


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """The output for the next tokens, x (b, d) or (b, d, l), after those in conv_state (b, d, s), s >= k - 1. Updates
    conv_state in place.

    With cache_seqlens (b,) the state is a ring buffer that holds token t at t modulo s. conv_state_indices (b,) selects
    each sequence's row of a larger conv_state; a negative index marks padding, whose output is zero.
    """
    silu = _is_silu(activation)
    one = x.dim() == 2
    x = x.unsqueeze(-1) if one else x
    length, kept = x.shape[-1], weight.shape[1] - 1
    rows, padding = _rows(x, conv_state, conv_state_indices)
    state = conv_state if rows is None else conv_state[rows]
    size = state.shape[-1]
    if size < kept:
        raise UserError(f"conv_state holds {size} tokens, but a convolution of {kept + 1} taps needs {kept}.")
    if cache_seqlens is None:
        seen = torch.cat((state.to(x.dtype), x), dim=-1)
        new, seen = seen[..., -size:], seen[..., size - kept :]
    else:
        seen = torch.cat((state.gather(2, _ring(cache_seqlens, -kept, 0, state)).to(x.dtype), x), dim=-1)
        stored = x[..., -size:].to(state.dtype)  # the last tokens, if x has more than fit
        new = state.scatter(2, _ring(cache_seqlens, length - stored.shape[-1], length, state), stored)
    if rows is None or padding is None:
        conv_state.copy_(new)
    else:
        conv_state[rows[~padding]] = new[~padding].to(conv_state.dtype)
    out = _one_token(seen, weight, bias, silu) if length == 1 else _convolve(seen, weight, bias, silu)[..., kept:]
    if padding is not None:
        out = out.masked_fill(padding[:, None, None], 0)
    return out.squeeze(-1) if one else out


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """The convolution of x (b, d, l), in float32 or better. On a CPU, `conv1d` is three times as fast if time is
    contiguous; otherwise the operator with channels last is used."""
    if x.device.type != "cpu" or x.stride(1) == 1:
        return causal_conv_silu(x.mT, weight, bias, silu=silu).mT
    with torch.autocast("cpu", enabled=False):
        wide = torch.promote_types(torch.float32, x.dtype)
        taps, bias = weight.to(wide).unsqueeze(1), None if bias is None else bias.to(wide)
        padded = F.pad(x.to(wide), (weight.shape[1] - 1, 0))
        y = F.conv1d(padded, taps, bias, groups=len(taps))
        return (F.silu(y) if silu else y).to(x.dtype)


def _one_token(seen: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """The output (b, d, 1) at the last token; `seen` has as many tokens as the kernel has taps."""
    wide = torch.promote_types(torch.float32, seen.dtype)
    y = (seen.to(wide) * weight.to(wide)).sum(-1, keepdim=True)
    y = y if bias is None else y + bias.to(wide).unsqueeze(-1)
    return (F.silu(y) if silu else y).to(seen.dtype)


def _packed(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor, silu: bool) -> Tensor:
    """The convolution within each packed sequence, one tap at a time."""
    kept, length = weight.shape[1] - 1, x.shape[-1]
    wide = torch.promote_types(torch.float32, torch.promote_types(x.dtype, weight.dtype))
    tokens = F.pad(x.to(wide), (kept, 0))
    numbers = F.pad(seq_idx, (kept, 0), value=-1)[:, None]  # (b, 1, k - 1 + l)
    out = x.new_zeros(x.shape, dtype=wide)
    for tap in range(kept + 1):
        same = numbers[..., tap : tap + length] == seq_idx[:, None]
        out = out + (tokens[..., tap : tap + length] * same) * weight[:, tap, None].to(wide)
    out = out if bias is None else out + bias[:, None].to(wide)
    out = F.silu(out) if silu else out
    return out.masked_fill(seq_idx[:, None] < 0, 0).to(x.dtype)


def _ring(cache_seqlens: Tensor, start: int, end: int, state: Tensor) -> Tensor:
    """The indices of tokens start to end - 1, relative to the current one, in the ring buffer: (b, d, end - start)."""
    at = torch.arange(start, end, device=state.device) + cache_seqlens[:, None].long()
    return at.remainder(state.shape[-1])[:, None].expand(-1, state.shape[1], -1)


def _rows(x: Tensor, conv_state: Tensor, indices: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Each sequence's row of the state, and the mask of padding sequences; None if all rows are used in order."""
    if indices is not None:
        return indices.long().clamp(min=0), indices < 0
    if conv_state.shape[:2] != x.shape[:2]:
        raise UserError(
            f"conv_state {tuple(conv_state.shape)} does not fit x {tuple(x.shape)}: both must start with (b, d)."
        )
    return None, None


def _is_silu(activation: str | None) -> bool:
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"activation must be None, 'silu' or 'swish', got {activation!r}.")
    return activation is not None


def _same_layout(out: Tensor, x: Tensor) -> Tensor:
    """Channels contiguous only if they are in x: callers can take views of the output."""
    return out if x.stride(1) == 1 else out.contiguous()
