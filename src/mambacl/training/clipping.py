"""Clips the gradient of a step: if its norm is too large, all of it is multiplied by the same factor.

With parameters that are cut, each process has the gradient of its rows. The norm is that of all of them together.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mambacl.nullspace.shards import rows_of
from mambacl.nullspace.sharing import is_cut


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> None:
    """`torch.nn.utils.clip_grad_norm_`, which does not take cut parameters beside whole ones."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    rows = [rows for parameter in trained if (rows := rows_of(parameter)) is not None]
    if not rows:
        torch.nn.utils.clip_grad_norm_(trained, largest)
        return
    cut = [p.grad.to_local() for p in trained if is_cut(p)]  # type: ignore[union-attr]
    whole = [p.grad for p in trained if p.grad is not None and not is_cut(p)]
    squares = square(cut, cut[0])
    torch.distributed.all_reduce(squares, group=rows[0].group)
    norm = (squares + square(whole, cut[0])).sqrt()
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)  # as PyTorch's
    for gradient in (*cut, *whole):
        gradient.mul_(factor.to(gradient.device))


def square(gradients: list[Tensor], like: Tensor) -> Tensor:
    """The square of their norm together, in float64."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=like.device)
    return torch.nn.utils.get_total_norm(gradients).to(like.device, torch.float64).square()
