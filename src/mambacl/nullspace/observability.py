"""How far the observable behaviour of a selective SSM has moved, as Inf-SSM measures it.

At a token, an SSM with transition diag(a) and output row c shows of a state h: c h, c diag(a) h, c diag(a)^2 h, and so
on for ever. The inner products of these infinite columns, of one SSM with another's, have a closed form, because each
is a geometric series:

    G_ij = sum over t of (c_i a_i^t) (c'_j a'_j^t) = c_i c'_j / (1 - a_i a'_j)

The distance of a new SSM from an old one is 1 - |G_no|^2 / (tr G_nn tr G_oo), as released. Of several states, it is
not smallest where both are alike. With Frobenius norms in place of the traces it is: 0 there and positive elsewhere, by
Cauchy and Schwarz. Of one state, both are the same. Either costs n^2 numbers per token for n states.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _MeanTransition(torch.autograd.Function):
    """One state at a time, and again in the backward: all states at once would need n times the memory of delta."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, A: Tensor) -> Tensor:
        ctx.save_for_backward(delta, A)
        return torch.stack([(delta * rates).exp().mean(-1) for rates in A.unbind(1)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        delta, A = ctx.saved_tensors
        by_delta, by_A = torch.zeros_like(delta), torch.empty_like(A)
        for state, gradient in enumerate(gradients[0].unbind(-1)):
            factor = (delta * A[:, state]).exp() * (gradient[..., None] / A.shape[0])
            by_delta += factor * A[:, state]
            by_A[:, state] = (factor * delta).flatten(0, -2).sum(0)
        return by_delta, by_A


def mean_transition(delta: Tensor, A_log: Tensor) -> Tensor:
    """exp(delta A) with A = -exp(A_log), the mean over channels: (b, l, n) of delta (b, l, d) and A_log (d, n)."""
    found: Tensor = _MeanTransition.apply(delta, -A_log.to(delta.dtype).exp())
    return found


def squashed(values: Tensor) -> Tensor:
    """2 sigmoid(z) - 1, below 1 in size, so that the series converge."""
    return (values / 2).tanh()


def gram(a: Tensor, c: Tensor, other_a: Tensor, other_c: Tensor) -> Tensor:
    """G (..., n, m) of the transitions a (..., n) and output rows c of one SSM, and those (..., m) of another."""
    return c[..., :, None] * other_c[..., None, :] / (1 - a[..., :, None] * other_a[..., None, :])


def trace(a: Tensor, c: Tensor) -> Tensor:
    """The trace of an SSM's inner products with itself."""
    return (c.square() / (1 - a.square())).sum(-1)


def norm(a: Tensor, c: Tensor) -> Tensor:
    """The Frobenius norm of the same."""
    return gram(a, c, a, c).square().sum((-2, -1)).sqrt()


def distance(a: Tensor, c: Tensor, old_a: Tensor, old_c: Tensor, size: Callable[..., Tensor] = trace) -> Tensor:
    """The mean over all tokens; `size` is `trace` or `norm`. A token without output (c = 0) has distance 0. If both
    SSMs are alike to `torch.isclose`, 0 without a gradient."""
    cross = gram(a, c, old_a, old_c).square().sum((-2, -1))
    sizes = size(a, c) * size(old_a, old_c)
    shows = sizes > 0
    apart = torch.where(shows, 1 - cross / torch.where(shows, sizes, 1), 0).mean()
    alike = torch.isclose(a, old_a).all() & torch.isclose(c, old_c).all()
    return torch.where(alike, torch.zeros_like(apart), apart)
