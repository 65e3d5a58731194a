# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"
"""softplus to the last digits, and its derivative.

    softplus(x) = max(x, 0) + log(1 + e),   e = exp(-|x|),   log(1 + e) = 2 artanh(e / (2 + e))

so that small steps, of which a GPU's own logarithm of 1 + e would leave three digits, keep all of theirs.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.693359375)  # its leading bits, few enough for exact products with small numbers, and the rest
LN2_REST = tl.constexpr(-2.12194440054690583e-4)


@triton.jit
def softplus(x):
    size = -tl.abs(x)
    size = tl.where(size < -200.0, -200.0, size)  # infinity too, whose exponent would not be a number
    whole = tl.floor(size * LOG2E + 0.5)
    rest = (size - whole * LN2) - whole * LN2_REST
    e = tl.exp2(whole) * tl.exp2(rest * LOG2E)
    s = e / (2 + e)
    q = s * s  # at most 1 / 9
    series = 1 / 13 + q * (1 / 15 + q * (1 / 17))
    series = 1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * series)))
    return tl.maximum(x, 0.0) + 2 * s * (1 + q * (1 / 3 + q * series))


@triton.jit
def sigmoid_of_softplus(y):
    """The derivative of softplus where it is y: 1 - exp(-y), without cancellation for small y."""
    series = y * (1 - y * (0.5 - y * (1 / 6 - y * (1 / 24 - y * (1 / 120)))))
    return tl.where(y < 0.125, series, 1 - tl.exp2(y * -LOG2E))
