"""Products of float32 matrices, whichever of PyTorch's two settings a program uses."""

from collections.abc import Iterator

import pytest
import torch

from mambacl.precision import float32_products

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


def older() -> str:
    """What the older setting says, if it can be asked."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "contradiction"


SETTINGS = {
    "nothing": lambda: None,
    "older highest": lambda: torch.set_float32_matmul_precision("highest"),
    "older high": lambda: torch.set_float32_matmul_precision("high"),
    "older medium": lambda: torch.set_float32_matmul_precision("medium"),
    "newer tf32": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
    "newer ieee": lambda: setattr(MATMUL, "fp32_precision", "ieee"),
    "newer for all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "older high, then newer ieee": lambda: (
        torch.set_float32_matmul_precision("high"),
        setattr(MATMUL, "fp32_precision", "ieee"),
    ),
}


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_within_it_is_as_asked_and_afterwards_as_before(setting: str, tf32: bool) -> None:
    torch.backends.fp32_precision = "none"
    SETTINGS[setting]()
    before = older(), MATMUL.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    with float32_products(tf32):
        assert MATMUL.fp32_precision == ("tf32" if tf32 else "ieee")
        assert older() == ("high" if tf32 else "highest")
    assert (older(), MATMUL.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision) == before


def test_an_error_within_gives_the_setting_back() -> None:
    torch.set_float32_matmul_precision("high")
    with pytest.raises(ValueError), float32_products(tf32=False):
        raise ValueError
    assert older() == "high" and MATMUL.fp32_precision == "tf32"
