"""The mean of the gradients over the processes of a run, after the backward pass.

`DistributedDataParallel` exchanges gradients during the backward pass, which a CUDA graph cannot replay. Here they are
exchanged between two graphs: the first ends with `collect`, the second begins with `hand_out`, and `send` is one
`all_reduce` between them.

    buffers = exchange.buffers()  # all processes agree on which parameters have gradients
    buffers.collect()             # copies this process's gradients
    buffers.send()
    buffers.hand_out()            # the gradients are now the means
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mambacl import processes

ALIGNED = 32  # values: kernels read aligned memory faster


class Buffers:
    """The gradients of some parameters, one after another in the same memory for every step."""

    def __init__(self, parameters: Sequence[nn.Parameter], others: Sequence[nn.Parameter] = ()) -> None:
        """`others`: have no gradient in any process."""
        self.parameters, self.others = list(parameters), list(others)
        self.flat: list[Tensor] = []
        self.views: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        for kind in dict.fromkeys((p.dtype, p.device) for p in self.parameters):
            some = [(n, p) for n, p in enumerate(self.parameters) if (p.dtype, p.device) == kind]
            lengths = [-(-p.numel() // ALIGNED) * ALIGNED for _, p in some]
            self.flat.append(torch.zeros(sum(lengths), dtype=kind[0], device=kind[1]))
            for (n, p), place in zip(some, self.flat[-1].split(lengths), strict=True):
                self.views[n] = place[: p.numel()].view(p.shape)

    @torch.no_grad()
    def collect(self) -> None:
        """A parameter without a gradient in this process has one of zeros."""
        if any(parameter.grad is not None for parameter in self.others):
            raise RuntimeError("other parameters have gradients than before")
        for view, parameter in zip(self.views, self.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                torch.mul(parameter.grad, 1 / processes.count(), out=view)  # as DistributedDataParallel does

    def send(self) -> None:
        processes.sum_(self.flat)

    def hand_out(self) -> None:
        for view, parameter in zip(self.views, self.parameters, strict=True):
            parameter.grad = view


class Exchange:
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.latest = Buffers([])
        self._used: list[bool] = []

    def buffers(self) -> Buffers:
        """For the parameters that have a gradient in any process. Waits for the GPU."""
        mine = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.uint8)
        mine = mine.to(self.parameters[0].device)
        processes.sum_([mine], largest=True)
        used = [bool(one) for one in mine.tolist()]
        if used != self._used:
            self.latest = Buffers(
                *([p for p, u in zip(self.parameters, used, strict=True) if u is w] for w in (True, False))
            )
            self._used = used
        return self.latest
