# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"
"""softplus with full float32 accuracy, and its derivative.

    softplus(x) = max(x, 0) + log(1 + e),   e = exp(-|x|),   log(1 + e) = e P(e)

A GPU's own log(1 + e) would leave small results with three correct digits; this form keeps all of them. P interpolates
log(1 + e) / e at the Chebyshev points of [0, 1], to 5e-9.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.693359375)  # leading bits, few enough for exact products with small integers; and the rest
LN2_REST = tl.constexpr(-2.12194440054690583e-4)
ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2^23: a small number added to it is rounded to an integer


@triton.jit
def softplus(x):
    size = tl.maximum(-tl.abs(x), -200.0, propagate_nan=tl.PropagateNan.ALL)  # clamped: infinity has no exponent
    whole = (size * LOG2E + ROUNDS) - ROUNDS
    rest = (size - whole * LN2) - whole * LN2_REST
    e = tl.exp2(whole) * tl.exp2(rest * LOG2E)
    high = -0.152696671 + e * (0.105436238 + e * (-0.0563736132 + e * (0.0195425274 + e * -0.00317605705)))
    low = 1.0 + e * (-0.499998926 + e * (0.333297105 + e * (-0.249516163 + e * (0.196632743 + e * high))))
    return tl.maximum(x, 0.0) + e * low


@triton.jit
def sigmoid_of_softplus(y):
    """The derivative of softplus at the point where its value is y: 1 - exp(-y), without cancellation for small y."""
    series = y * (1 - y * (0.5 - y * (1 / 6 - y * (1 / 24 - y * (1 / 120)))))
    return tl.where(y < 0.125, series, 1 - tl.exp2(y * -LOG2E))
