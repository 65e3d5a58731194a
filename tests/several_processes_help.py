"""Runs of several processes on the tiny run, and what must come of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import CONFIG
from tolerance import rounding
from torch import Tensor
from training_help import interrupted_after

import mambacl
from mambacl import processes
from mambacl.files import read_tensors
from mambacl.training import checkpoints, parts
from mambacl.training.loop import TrainingError

TERMS = 10**5  # of all sums on the way through a tiny model and back
SGD = {**CONFIG["training"], "optimizer": "sgd", "lr": 1e-2, "head_lr": 1e-2}
"""Adam divides each gradient by its size, so that rounding decides where gradients are close to 0"""


def train(folder: Path, **overrides: Any) -> int:
    torch.set_num_threads(1)
    mambacl.train(CONFIG, out=str(folder), device="cpu", **overrides)
    return processes.count()


def stopped(folder: Path, after: int, **overrides: Any) -> None:
    """Interrupted in all processes when the first has written so many checkpoints."""
    written = checkpoints.write

    if processes.is_first():
        with interrupted_after(after):
            train(folder, **overrides)
    else:
        with pytest.raises(TrainingError, match="Another process"):
            train(folder, **overrides)
    checkpoints.write = written  # type: ignore[assignment]


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [line for line in lines if line["event"] == kind]


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Of a checkpoint, with those that are in parts."""
    tensors, text = read_tensors(path)
    found = parts.named_by(path, text)
    return tensors if found is None else {**tensors, **parts.read(found)}


def assert_same_outcome(folder: Path, alone: Path) -> None:
    """Stream, counted images and results; parameters and statistics within the rounding of float32."""
    one, other = results(folder), results(alone)
    for key in ("class_order", "tasks", "total", "status"):
        assert one[key] == other[key]
    assert json.loads((folder / "stream.json").read_text()) == json.loads((alone / "stream.json").read_text())
    seen, expected = ([event["images"] for event in events(where, "epoch")] for where in (folder, alone))
    assert seen == expected
    for row, other_row in zip(one["correct"], other["correct"], strict=True):
        assert all(abs(a - b) <= 2 for a, b in zip(row, other_row, strict=True)), (row, other_row)
    names = ["last.safetensors", *(path.name for path in (alone / "checkpoints").glob("task-*"))]
    compared = 0
    for name in names:
        a, b = (tensors_of(where / "checkpoints" / name) for where in (folder, alone))
        assert a.keys() == b.keys()
        for key, tensor in b.items():
            if key.startswith("random.") or not tensor.is_floating_point() or not tensor.numel():
                continue
            if key.endswith((".basis", ".moved")):  # a basis is free up to a rotation; energies are of tiny differences
                continue
            bound = 3 * rounding(TERMS) * tensor.abs().max().item()
            assert (a[key].double() - tensor.double()).abs().max().item() <= bound, key
            compared += tensor.numel()
    assert compared > 1000


def train_few(folder: Path, overrides: dict[str, Any]) -> int:
    from conftest import fewer_test_images

    with fewer_test_images(10):
        return train(folder, **overrides)
