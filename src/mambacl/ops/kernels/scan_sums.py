"""Triton kernel that sums the parts of dB and dC that the scan's backward leaves."""
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

import triton
import triton.language as tl

AT_ONCE = tl.constexpr(8)  # parts to load together


@triton.jit(do_not_specialize=["L", "shares"])
def sum_shares(
    parts_ptr, dB_ptr, dC_ptr, L, shares, GROUPS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """parts (b, groups * shares, l, 2, n), float32; dB, dC (b, l, groups, n). One kernel sums, converts and orders: for
    short scans, each launch less counts."""
    size = L * (2 * N)
    blocks = tl.cdiv(size, BLOCK)
    block, part = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    parts_ptr += part * shares * size
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, shares, AT_ONCE):
        share = first + tl.arange(0, AT_ONCE)[:, None]
        places = parts_ptr + (part * 0 + share) * size + at[None, :]
        total += tl.sum(tl.load(places, mask=(share < shares) & (at < size)[None, :], other=0.0), axis=0)
    step, which, state = at // (2 * N), at // N % 2, at % N
    image, group = part // GROUPS, part % GROUPS
    places = ((image * L + step) * GROUPS + group) * N + state
    tl.store(dB_ptr + places, total.to(dB_ptr.dtype.element_ty), mask=(at < size) & (which == 0))
    tl.store(dC_ptr + places, total.to(dC_ptr.dtype.element_ty), mask=(at < size) & (which == 1))
