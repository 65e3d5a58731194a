"""What a run costs, in the units of the paper's tables: from its results, or from its model on the meta device."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch

from mambacl.backbones import create_model
from mambacl.backbones.flops import count_flops
from mambacl.backbones.registry import MODELS
from mambacl.reports.runs import RunRecord
from mambacl.training.seconds import AROUND

PLAIN = ("mamba-cl", "sequential", "frozen")
"""methods that add nothing to the backbone: for others, the model's FLOPs are too few"""


def cost(run: RunRecord, metric: str) -> float | None:
    """A cost by name; None if the run does not have it, and for runs of other tools."""
    of = COSTS.get(metric)
    return None if of is None or run.imported else of(run)


def _minutes(run: RunRecord) -> float | None:
    """Minutes of the work itself, without starting, reading and writing, which the paper's times leave out."""
    seconds = [value for phase, value in _seconds(run).items() if phase not in AROUND]
    return sum(seconds) / 60 if seconds else None


def _decomposition_minutes(run: RunRecord) -> float | None:
    seconds = _seconds(run)
    return seconds["decomposition"] / 60 if "decomposition" in seconds else None


def _inference_ms(run: RunRecord) -> float | None:
    """Time of all evaluations, per evaluated image. Each evaluation covers the tasks learned so far."""
    seconds, total = _seconds(run).get("evaluate"), run.results["total"]
    images = sum(sum(total[: len(row)]) for row in run.results["correct"])
    return 1000 * seconds / images if seconds and images else None


def _peak_gib(run: RunRecord) -> float | None:
    peak = run.results.get("peak_memory_bytes")
    return peak / 2**30 if isinstance(peak, int | float) and peak > 0 else None


def _gflops(run: RunRecord) -> float | None:
    known = _model(run)
    return known[1] / 1e9 if known and run.method in PLAIN else None


def _parameters(run: RunRecord) -> float | None:
    """Parameters of the backbone, in millions."""
    known = _model(run)
    return known[0] / 1e6 if known else None


COSTS = {
    "minutes": _minutes,
    "decomposition_minutes": _decomposition_minutes,
    "inference_ms": _inference_ms,
    "peak_gib": _peak_gib,
    "gflops": _gflops,
    "parameters": _parameters,
}


def _seconds(run: RunRecord) -> Mapping[str, float]:
    return run.results.get("seconds", {})


def _model(run: RunRecord) -> tuple[int, int] | None:
    """Parameters and operations of the run's backbone; None if it is not registered."""
    if run.backbone not in MODELS.names():
        return None
    transforms = (run.config.get("stream") or {}).get("transforms") or {}
    options = run.config.get("backbone_options") or {}
    return _sizes(run.backbone, json.dumps(options, sort_keys=True), transforms.get("image_size"))


@functools.cache
def _sizes(backbone: str, options: str, size: int | None) -> tuple[int, int]:
    with torch.device("meta"):
        model: Any = create_model(backbone, num_classes=0, **json.loads(options)).eval()
        operations, _ = count_flops(model, size or model.default_cfg["input_size"][-1])
    return sum(parameter.numel() for parameter in model.parameters()), operations
