"""Triton kernels that each do only one thing, to measure how fast a GPU does it. Imported only on use."""
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def multiply_and_add(out_ptr, factor, term, rounds, UNROLLED: tl.constexpr, BLOCK: tl.constexpr):
    """x = factor x + term, repeated: the elements of a thread are independent chains."""
    places = tl.arange(0, BLOCK)
    x = places.to(tl.float32) / BLOCK
    for _ in range(rounds):
        for _ in tl.static_range(UNROLLED):
            x = x * factor + term
    tl.store(out_ptr + tl.program_id(0) * BLOCK + places, x)


@triton.jit
def exponentiate(out_ptr, factor, rounds, UNROLLED: tl.constexpr, BLOCK: tl.constexpr):
    """x = 2 ** (factor x), repeated; it converges for a factor of about -1."""
    places = tl.arange(0, BLOCK)
    x = places.to(tl.float32) / BLOCK
    for _ in range(rounds):
        for _ in tl.static_range(UNROLLED):
            x = tl.exp2(x * factor)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + places, x)
