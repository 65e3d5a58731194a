"""python benchmarks/nullspace.py [--backbone NAME] [--device cpu|cuda] [--protected 0.1] [--json FILE]

What the null space costs, against the plain way of doing it: projecting a step (batched low-rank bases against a loop
over dense matrices), decomposing after a task (one `eigh` a feature against one SVD a parameter), and memory (what is
held, what `mambacl plan` predicts, and dense projectors). The model has random weights, its covariances random
features; the times depend on neither. A minute on two cores for the nano model (the default), a minute on an H200 for
De-focus-L (`--backbone defocus_mamba_large_22k --image-size 192 --device cuda`).
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambacl import NullSpace, create_model
from mambacl.nullspace import dense_projector
from mambacl.nullspace.gathering import Gathered, Key
from mambacl.nullspace.plan import make_plan
from mambacl.nullspace.projectors import decompose


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of several runs, after one to warm up."""
    times = []
    for repeat in range(repeats + 1):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        if repeat:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_covariances(space: NullSpace, device: torch.device) -> Gathered:
    """A covariance with a falling spectrum for each feature."""
    named = dict(space.model.named_parameters())
    generator = torch.Generator(device).manual_seed(0)
    covariances: dict[Key, Tensor] = {}
    for part, key in space.projected():
        groups, _, size = part.matrix(named[part.parameter]).shape
        if key not in covariances:
            rows = torch.randn(groups, 2 * size, size, generator=generator, device=device, dtype=torch.float64)
            rows *= torch.logspace(0, -3, size, device=device, dtype=torch.float64)
            covariances[key] = rows.mT @ rows if groups > 1 else rows[0].T @ rows[0]
    return Gathered(covariances)


def allocated(device: torch.device) -> int:
    synchronize(device)
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def fill_gradients(parameters: list[torch.nn.Parameter]) -> None:
    generator = torch.Generator(parameters[0].device).manual_seed(1)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, device=parameter.device)


@torch.no_grad()
def project_by_loop(
    space: NullSpace, matrices: Mapping[str, Tensor], old: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> None:
    """The textbook way: one dense product after another."""
    for _, part in space.parts():
        if part.name in matrices:
            P, then, now = matrices[part.name], part.of(old[part.parameter]), part.of(new[part.parameter])
            now.copy_(then + (P @ (now - then) if part.side == "left" else (now - then) @ P))


def measure(
    backbone: str, size: int | None, device: torch.device, setting: str, protected: float, repeats: int
) -> dict:
    torch.manual_seed(0)
    model = create_model(backbone, num_classes=0).to(device).eval()
    configured: Any = model.default_cfg
    pixels = size or configured["input_size"][-1]
    space = NullSpace(model, setting, rank=f"fraction:{1 - protected}", A={"feature": "delta"}, eta=0.95)
    parameters = space.parameters()
    fill_gradients(parameters)
    result: dict[str, Any] = {"backbone": backbone, "setting": setting, "device": str(device), "protected": protected}

    # Decomposition, and the memory of what comes out of it; libraries set themselves up at the first use
    for dtype in (torch.float32, torch.float64):
        square = torch.randn(64, 64, device=device, dtype=dtype)
        decompose([square.T @ square], "energy:0.9")
    before = allocated(device)
    gathered = random_covariances(space, device)
    covariances = allocated(device) - before
    started = time.perf_counter()
    space.take([gathered], 1, [])
    synchronize(device)
    result["decomposition_s"] = time.perf_counter() - started
    bank = space.bank
    assert bank is not None
    held = allocated(device) - before - covariances if device.type == "cuda" else bank.nbytes()
    with torch.device("meta"):
        shadow = NullSpace(create_model(backbone, num_classes=0), space.setting)
    plan = make_plan(shadow, torch.empty(1, 3, pixels, pixels, device="meta"), protected, calibrate_on=device)
    kept = sum(c.nbytes for c in gathered.covariances.values())
    result |= {
        "decomposition_planned_s": plan.decomposition_seconds,
        "projector_bytes": held,
        "projector_bytes_planned": plan.projector_bytes,
        "covariance_bytes": covariances if device.type == "cuda" else kept,
        "covariance_bytes_planned": plan.covariance_bytes,
        "dense_bytes": plan.dense_bytes,
    }

    # The plain way: a dense matrix a parameter, from an SVD of its own
    named = {part.name: key for part, key in space.projected()}
    sample = list(named.items())[: 5 * 4]
    dense: dict[str, Tensor] = {}
    started = time.perf_counter()
    for name, key in sample:
        rank = space.decompositions()[name].rank
        dense[name] = dense_projector(gathered.covariances[key], rank, 0.95, "none").float()
    synchronize(device)
    result["svd_of_each_parameter_s"] = (time.perf_counter() - started) / len(sample) * len(named)
    result["largest_difference"] = max(
        ((space.projectors()[name].dense() - P).norm() / P.norm()).item() for name, P in dense.items()
    )
    every = {name: projector.dense() for name, projector in space.projectors().items()}

    # A step: the optimizer's own, projected by the bank, projected by a loop over dense matrices
    tensors = dict(model.named_parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=device.type == "cuda")
    result["plain_step_ms"] = 1e3 * seconds(optimizer.step, device, repeats)

    def dense_step() -> None:
        old = {name: tensors[name].detach().clone() for name in space.trained_names()}
        optimizer.step()
        project_by_loop(space, every, old, tensors)

    result["dense_loop_step_ms"] = 1e3 * seconds(dense_step, device, repeats)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    batched = {name: torch.randn_like(tensor) for name, tensor in tensors.items()}
    looped = {name: tensor.clone() for name, tensor in batched.items()}
    bank.project(nothing, batched)
    project_by_loop(space, every, nothing, looped)
    result["largest_update_difference"] = max(
        ((batched[name] - looped[name]).norm() / looped[name].norm()).item() for name in space.trained_names()
    )
    every.clear()
    del nothing, batched, looped
    space.wrap(optimizer)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    rest = allocated(device)
    result["projected_step_ms"] = 1e3 * seconds(optimizer.step, device, repeats)
    if device.type == "cuda":
        result["step_bytes"] = torch.cuda.max_memory_allocated(device) - rest
        result["step_bytes_planned"] = plan.step_bytes
    extra, dense_extra = (result[k] - result["plain_step_ms"] for k in ("projected_step_ms", "dense_loop_step_ms"))
    result["ratios"] = {
        "projection: dense loop / batched low rank": dense_extra / max(extra, 1e-9),
        "decomposition: SVD of each parameter / eigh of each feature": result["svd_of_each_parameter_s"]
        / result["decomposition_s"],
        "decomposition: planned / measured": result["decomposition_planned_s"] / result["decomposition_s"],
        "projector bytes: held / dense": result["projector_bytes"] / result["dense_bytes"],
        "projector bytes: planned / held": result["projector_bytes_planned"] / result["projector_bytes"],
        "covariance bytes: planned / held": result["covariance_bytes_planned"] / result["covariance_bytes"],
    }
    if "step_bytes" in result:
        result["ratios"]["step bytes: planned / measured"] = result["step_bytes_planned"] / result["step_bytes"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--backbone", default="defocus_mamba_nano")
    parser.add_argument("--image-size", type=int, default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--setting", default="paper")
    parser.add_argument("--protected", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    logging.getLogger("mambacl").setLevel(logging.WARNING)
    device = torch.device(given.device)
    result = measure(given.backbone, given.image_size, device, given.setting, given.protected, given.repeats)
    for name, value in result.items():
        if name != "ratios":
            print(f"{name:28} {value:.4g}" if isinstance(value, float) else f"{name:28} {value}")
    for name, ratio in result["ratios"].items():
        print(f"{name:62} {ratio:8.2f}")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
