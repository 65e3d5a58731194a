"""Runs that are interrupted, and runs that must be alike."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mambacl.training import checkpoints

SAME = ("class_order", "tasks", "correct", "total", "metrics", "status")


def final_parameters(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "checkpoints" / "last.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("method.")}


def assert_same_run(one: Path, other: Path) -> None:
    a, b = (json.loads((folder / "results.json").read_text()) for folder in (one, other))
    assert {key: a[key] for key in SAME} == {key: b[key] for key in SAME}
    for name, tensor in (parameters := final_parameters(one)).items():
        assert torch.equal(tensor, final_parameters(other)[name]), name
    last = sorted((one / "checkpoints").glob("task-0*"))[-1:]
    states = [parameters, *map(load_file, last)]
    assert sum(tensor.numel() for state in states for tensor in state.values()) > 100
    for path in last:
        expected, found = load_file(path), load_file(other / "checkpoints" / path.name)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    lines = [
        [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in (f / "metrics.jsonl").open()]
        for f in (one, other)
    ]
    assert lines[0] == lines[1]


class interrupted_after:
    """Ctrl-C when so many checkpoints are written."""

    def __init__(self, count: int) -> None:
        self.count, self.original = count, checkpoints.write

    def __enter__(self) -> None:
        def write(*arguments: Any) -> None:
            self.original(*arguments)
            self.count -= 1
            if self.count == 0:
                raise KeyboardInterrupt

        checkpoints.write = write  # type: ignore[assignment]

    def __exit__(self, kind: type | None, *_: Any) -> bool:
        checkpoints.write = self.original
        assert kind is KeyboardInterrupt
        return True
