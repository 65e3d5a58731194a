"""Exits with 1 unless two runs have the same counts and the same tensors, bit for bit:  same_run.py RUN RUN"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def state(run: Path) -> dict[str, torch.Tensor]:
    """What the method has trained, and what it keeps from finished tasks."""
    last = sorted((run / "checkpoints").glob("task-[0-9]*"))[-1]
    ended = load_file(run / "checkpoints" / "task-end.safetensors")
    trained = {name: tensor for name, tensor in ended.items() if name.startswith("method.")}
    return {**trained, **{f"kept {name}": tensor for name, tensor in load_file(last).items()}}


def main() -> None:
    runs = [Path(word) for word in sys.argv[1:]]
    counts = [json.loads((run / "results.json").read_text(encoding="utf-8")) for run in runs]
    for key in ("status", "correct", "total", "metrics"):
        if counts[0][key] != counts[1][key]:
            sys.exit(f"{key} differs: {counts[0][key]} and {counts[1][key]}")
    one, other = map(state, runs)
    if set(one) != set(other):
        sys.exit("the names of the tensors differ")
    for name, tensor in one.items():
        if not torch.equal(tensor, other[name]):
            sys.exit(f"{name} differs")
    print(f"{sum(tensor.numel() for tensor in one.values())} numbers in {len(one)} tensors are the same")


if __name__ == "__main__":
    main()
