"""Numbers with units, as people write them: 80GB, 50GB/s, 20us, 180TFLOP/s."""

import re

from mambacl.errors import UserError

PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def quantity(text: str, unit: str) -> float:
    """The number of a text with this unit, in units without a prefix: quantity("80GB", "B") is 80e9."""
    found = re.fullmatch(rf"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([numkMGTP]?){re.escape(unit)}\s*", text)
    if found is None or float(found[1]) <= 0:
        raise UserError(f"'{text}' is not a positive number of {unit}, such as {EXAMPLES[unit]}.")
    return float(found[1]) * PREFIXES[found[2]]


def is_quantity(unit: str, text: str) -> bool:
    try:
        quantity(text, unit)
    except UserError:
        return False
    return True


EXAMPLES = {"B": "80GB", "B/s": "50GB/s", "s": "20us", "FLOP/s": "180TFLOP/s"}


def written(value: float, unit: str = "B") -> str:
    """Three digits: 8.05 GB, 20 us."""
    prefixes = ("u", "m", "", "k", "M", "G", "T", "P") if unit == "s" else ("", "k", "M", "G", "T", "P")
    scale = 1e-6 if unit == "s" else 1.0
    for prefix in prefixes:
        if float(f"{value / scale:.3g}") < 1000 or prefix == prefixes[-1]:
            break
        scale *= 1000
    number = f"{value / scale:.3g}"
    return f"{number} {prefix}{unit}"
