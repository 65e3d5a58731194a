"""The selective scan in forms that an exported graph can hold: plain operators, or one operator that becomes a loop.

`with traced(form):` makes every scan take the form. All compute in the inputs' dtype.

unrolled: one group of operators per token. chunked: tokens are cut into chunks of about sqrt(l); the scans of all
chunks run together, then the chunks' last states are joined, one group of operators per chunk, and each token gets its
share of the state that its chunk started from. loop: one node that `deploy.onnx_graph` turns into a loop.

Shapes: u, delta (b, l, d); A (d, n); B, C (b, l, g, n), g groups of k = d / g channels; states are (b, g, n, k).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

FORMS = ("unrolled", "chunked", "loop")
BACKEND = "traced"
LOOP = "mambacl.export::SelectiveScan"

_form: str | None = None


@contextmanager
def traced(form: str) -> Iterator[None]:
    """Within it, scans take this form."""
    global _form
    before, _form = _form, form
    try:
        yield
    finally:
        _form = before


def active() -> bool:
    return _form is not None


def scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """The output (b, l, d) and the last state (b, d, n)."""
    assert _form is not None
    groups = B.shape[2]
    A = A.unflatten(0, (groups, -1)).mT  # (g, n, k)
    x, delta = (tensor.unflatten(2, (groups, -1)) for tensor in (delta * u, delta))  # (b, l, g, k)
    y, last = {"unrolled": unrolled, "chunked": chunked, "loop": loop}[_form](x, delta, A, B, C)
    return y.flatten(2), last.mT.flatten(1, 2)


def unrolled(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """x = delta u."""
    steps = zip(*(tensor.unbind(1) for tensor in (x, delta, B, C)), strict=True)
    h, outputs = None, []
    for x_t, delta_t, B_t, C_t in steps:
        added = B_t.unsqueeze(3) * x_t.unsqueeze(2)  # (b, g, n, k)
        h = added if h is None else torch.exp(delta_t.unsqueeze(2) * A) * h + added
        outputs.append(C_t.unsqueeze(2) @ h)  # (b, g, 1, k)
    assert h is not None
    return torch.stack(outputs, dim=1).squeeze(3), h


def chunked(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """x = delta u."""
    length = x.shape[1]
    size = math.isqrt(length - 1) + 1
    count = -(-length // size)
    # Tokens with delta 0 at the end change nothing.
    x, delta, B, C = (
        F.pad(tensor, (0, 0, 0, 0, 0, count * size - length)).unflatten(1, (count, size)) for tensor in (x, delta, B, C)
    )  # (b, chunks, size, g, k or n)
    h, inside = None, []
    for x_t, delta_t, B_t in zip(*(tensor.unbind(2) for tensor in (x, delta, B)), strict=True):
        added = B_t.unsqueeze(4) * x_t.unsqueeze(3)  # (b, chunks, g, n, k)
        h = added if h is None else torch.exp(delta_t.unsqueeze(3) * A) * h + added
        inside.append(h)
    assert h is not None
    passed = torch.exp(delta.cumsum(2).unsqueeze(4) * A)  # what is left of the state that a chunk started from
    start, starts = torch.zeros_like(h[:, 0]), []
    for decay, end in zip(passed[:, :, -1].unbind(1), h.unbind(1), strict=True):
        starts.append(start)
        start = decay * start + end
    states = torch.stack(inside, dim=2) + passed * torch.stack(starts, dim=1).unsqueeze(2)
    y = (C.unsqueeze(4) @ states).squeeze(4)  # (b, chunks, size, g, k)
    return y.flatten(1, 2)[:, :length], start


def loop(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """x = delta u. A node without values: it has a meaning only in an ONNX graph."""
    from torch.onnx.ops import symbolic_multi_out

    shapes = (x.shape, (x.shape[0], *A.shape))
    y, last = symbolic_multi_out(LOOP, (x, delta, A, B, C), dtypes=(x.dtype, x.dtype), shapes=shapes, version=1)
    return y, last
