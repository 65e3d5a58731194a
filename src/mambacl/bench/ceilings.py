"""How fast this machine copies memory, takes exponentials, and multiplies and adds: the ceilings of a roofline.

On a GPU small kernels do nothing else. On the CPU a product of matrices, by PyTorch, is all multiplications and
additions; an exponential is made of them.
"""

from dataclasses import dataclass

import torch

from mambacl.bench.timing import Clock

PROGRAMS_PER_PROCESSOR, BLOCK, UNROLLED, ROUNDS = 32, 1024, 32, 64  # of a GPU
SIDE = 256  # of a matrix
EXPONENTIAL = (
    10  # products on a CPU: two for the rest of the argument, a polynomial of degree 6, two for the power of two
)


@dataclass(frozen=True)
class Work:
    bytes: int
    functions: int
    products: int


@dataclass(frozen=True)
class Ceilings:
    """In a second."""

    bytes: float
    functions: float
    """exponentials, and other functions that the same unit computes"""
    products: float
    """of float32, each with an addition or without"""
    shared: bool
    """whether functions are made of products, so that they take turns"""

    def seconds(self, work: Work) -> dict[str, float]:
        """What each kind of work would take at least."""
        functions, products = work.functions / self.functions, work.products / self.products
        if self.shared:
            return {"bytes": work.bytes / self.bytes, "arithmetic": functions + products}
        return {"bytes": work.bytes / self.bytes, "functions": functions, "products": products}


def ceilings(clock: Clock, copied: float) -> Ceilings:
    """`copied`: bytes in a second that a copy reads and writes."""
    if clock.device.type == "cuda":
        return Ceilings(copied, *_on_gpu(clock), shared=False)
    products = _on_cpu(clock)
    return Ceilings(copied, products / EXPONENTIAL, products, shared=True)


def _on_cpu(clock: Clock) -> float:
    matrix, product = torch.rand(SIDE, SIDE), torch.empty(SIDE, SIDE)
    times = clock.in_rounds({"product": lambda: torch.mm(matrix, matrix, out=product)})
    return SIDE**3 / min(times["product"])


def _on_gpu(clock: Clock) -> tuple[float, float]:
    from mambacl.bench.ceiling_kernels import exponentiate, multiply_and_add

    programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(clock.device).multi_processor_count
    out = torch.empty(programs * BLOCK, device=clock.device)
    constants = {"UNROLLED": UNROLLED, "BLOCK": BLOCK}
    with torch.cuda.device(clock.device):
        times = clock.in_rounds(
            {
                "exp": lambda: exponentiate[(programs,)](out, -0.9, ROUNDS, **constants),
                "product": lambda: multiply_and_add[(programs,)](out, 0.9, 0.1, ROUNDS, **constants),
            }
        )
    done = programs * BLOCK * UNROLLED * ROUNDS
    return done / min(times["exp"]), done / min(times["product"])
