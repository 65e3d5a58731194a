"""What storing projectors in half precision costs: the share of a movement in protected directions that gets through.

The stored basis is V + E, where E holds the rounding errors. An update that lies in the protected directions should
vanish, and one that lies in the others should stay out of them. With E, both leave a part behind that grows with E:
all of it together is about `rounding_share` of what would move without protection.
"""

import math

import torch


def rounding_share(dtype: torch.dtype) -> float:
    """The root mean square of rounding errors, relative to that of the values.

    A value x in [2^e, 2^(e+1)) is off by up to u 2^e, with the unit roundoff u, evenly spread: u^2 4^e / 3 in the mean
    square, which is u^2 / 3 x^2 times 4^-f, where 2^f = x / 2^e. Over all scales of x, f is anywhere from 0 to 1, and
    4^-f is 3 / (4 ln 4) in the mean. So it is u / sqrt(4 ln 4): 1.7e-3 for bfloat16, 2.1e-4 for float16.
    """
    return torch.finfo(dtype).eps / 2 / math.sqrt(4 * math.log(4))


def let_through(dtype: torch.dtype, protected: float) -> float:
    """The movement in protected directions that is left of an update without direction of its own, relative to its
    movement there without protection. `protected`: the share p of protected directions.

    Each of E's D r errors has variance s^2 / D, for V of r columns with s = `rounding_share`. Below one half, V spans
    the protected directions: I - V V^T then leaves (V^T E + E^T V) a of an update's part a in them, and E^T b of its
    part b beside them. Of |a|^2 = p and |b|^2 = 1 - p that is s^2 p (2 p + 1 - p), or s sqrt(1 + p) relative to |a|.
    Otherwise V spans the others, V V^T leaves only E^T b, with the protected directions as rows: s sqrt(1 - p).
    """
    return rounding_share(dtype) * math.sqrt(1 + protected if protected < 0.5 else 1 - protected)


def in_words(storage: str) -> str:
    """For the line at the start of a run; empty if projectors are not stored in half precision."""
    if storage not in ("bfloat16", "float16"):
        return ""
    share = rounding_share(getattr(torch, storage))
    return f"rounding lets about {share:.2%} of the unprotected movement through"
