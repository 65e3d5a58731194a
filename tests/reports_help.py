"""Run folders for the tests of reports."""

import json
from pathlib import Path
from typing import Any

import yaml

from mambacl.training.metrics import all_metrics


def make_run(
    folder: Path, correct: list[list[int]], total: list[int], *, seed: int = 0, method: str = "mamba-cl",
    status: str = "finished", config: dict[str, Any] | None = None, class_names: list[str] | None = None,
    epochs: int = 0, **results: Any,
) -> Path:  # fmt: skip
    """A run folder as training writes it, two classes a task."""
    (folder / "checkpoints").mkdir(parents=True)
    tasks = [[2 * t, 2 * t + 1] for t in range(len(total))]
    contents = {
        "schema": 1, "status": status, "benchmark": "bench", "method": method, "backbone": "nano", "seed": seed,
        "class_names": class_names or [f"name {i}" for i in range(2 * len(total))],
        "class_order": list(range(2 * len(total))), "tasks": tasks, "correct": correct, "total": total,
        "metrics": all_metrics(correct, total),
        "seconds": {"train": 90.0, "covariance": 5.0, "decomposition": 3.0, "evaluate": 2.0},
        "images_per_second": 321.0, "peak_memory_bytes": 3 * 2**30, "versions": {"torch": "2.11.0"},
    } | results  # fmt: skip
    (folder / "results.json").write_text(json.dumps(contents))
    settings = {"method": method, "seed": seed, "out": str(folder), "training": {"headline": "tasks", "lr": 2e-4}}
    settings |= {"stream": {"dataset": "bench", "order_seed": seed}} | (config or {})
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "stream.json").write_text(json.dumps({"tasks": tasks, "fingerprint": "abc123"}))
    with open(folder / "metrics.jsonl", "w") as out:
        for t in range(len(correct)):
            for e in range(epochs):
                line = {"event": "epoch", "task": t, "epoch": e, "loss": 1 / (e + 1), "accuracy": 0.5, "lr": 0.1}
                out.write(json.dumps(line) + "\n")
            out.write(json.dumps({"event": "task", "task": t, "correct": correct[t]}) + "\n")
    return folder
