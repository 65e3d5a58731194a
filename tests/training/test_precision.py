"""Products of float32 matrices, whichever of PyTorch's two settings a program uses; and the precision `auto`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_run import CONFIG

import mambacl
from mambacl.precision import float32_products, named
from mambacl.training import api
from mambacl.training.folder import RunFolder

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


def test_auto_is_what_the_device_has() -> None:
    assert named("auto", torch.device("cpu")) == "float32"
    assert [named(name, torch.device("cpu")) for name in ("float32", "tf32", "bf16")] == ["float32", "tf32", "bf16"]


def test_a_run_keeps_the_precision_that_auto_was_when_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    small = {**CONFIG, "stream": {**CONFIG["stream"], "tasks": [5, 5]}, "training": {"passes": 1, "batch_size": 16}}
    run = mambacl.train(small, precision="auto", device="cpu", out=str(out))
    assert run.results["precision"] == RunFolder(out).config().precision == "float32"
    results = json.loads((out / "results.json").read_text())
    (out / "results.json").write_text(json.dumps({**results, "status": "interrupted"}))

    monkeypatch.setattr(api, "named", lambda precision, device: "bf16")  # as on another machine
    again = mambacl.train(small, precision="auto", device="cpu", out=str(out))
    assert again.trained and again.results["precision"] == "float32"
    assert mambacl.resume(out).results["correct"] == run.results["correct"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_auto_on_a_gpu() -> None:
    expected = "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "float32"
    assert named("auto", torch.device("cuda")) == expected
