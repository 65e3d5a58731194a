"""A change of a weight matrix with few numbers: some values of its two-dimensional Fourier transform.

The change is alpha * Re(ifft2(F)), where F is zero but at `positions`, which are fixed. Two changes with different
positions are orthogonal as vectors up to the symmetry of real transforms, so with few positions out of many, changes
with random ones hardly overlap.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def random_positions(size: int, count: int, seed: int) -> Tensor:
    """`count` different places of `size`, from a generator on the CPU: the same on every machine."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count]


class FourierChange(nn.Module):
    """A change of a weight (outputs, width), from coefficients that start at zero. `positions` count row by row."""

    positions: Tensor

    def __init__(self, width: int, outputs: int, positions: Tensor, alpha: float) -> None:
        super().__init__()
        self.width, self.outputs, self.alpha = width, outputs, alpha
        self.coefficients = nn.Parameter(torch.zeros(len(positions)))
        self.register_buffer("positions", positions.int())

    def forward(self, u: Tensor) -> Tensor:
        return u @ self.matrices([self])[0].T

    @staticmethod
    def matrices(changes: Sequence["FourierChange"], factors: Tensor | None = None) -> list[Tensor]:
        """The sum of several, each times its factor, as one matrix that multiplies u."""
        first = changes[0]
        spectrum = first.coefficients.new_zeros(first.outputs * first.width)
        for index, change in enumerate(changes):  # one after the other: sums do not depend on the order of threads
            values = change.coefficients if factors is None else factors[index] * change.coefficients
            spectrum = spectrum.index_add(0, change.positions.long(), values)
        return [first.alpha * torch.fft.ifft2(spectrum.view(first.outputs, first.width)).real]
