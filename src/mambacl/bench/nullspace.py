"""Parts `projection` and `decomposition`: the cost of the null space, compared with the plain way.

Compares projecting a step by batched products with low-rank bases with a loop over dense matrices; decomposing after a
task by one `eigh` per feature with one SVD per parameter; and both with the prediction of `mambacl plan`. Weights and
features are random: the times do not depend on them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.backbones import create_model
from mambacl.bench.models import PROTECTED, build, each_case, pixels, setting
from mambacl.bench.result import Result, Row
from mambacl.bench.sizes import Case, Sizes
from mambacl.bench.timing import Clock
from mambacl.nullspace import NullSpace, dense_projector
from mambacl.nullspace.elementwise import Box
from mambacl.nullspace.memory import Memory, TaskStatistics
from mambacl.nullspace.plan import Plan, make_plan
from mambacl.nullspace.projected_step import ProjectedParts, ProjectedStep
from mambacl.nullspace.projectors import Key, decompose
from mambacl.ops.switch import serves

SETTINGS = ("paper", "exact")
SAMPLE = 20  # parameters whose SVD is timed; the others count as equal
PROJECTION_NOTES = (
    "A tenth of the directions protected. adam: the optimizer's step alone; projected: the same step projected; "
    "projection: only remembering and projecting; dense loop: the same with one dense product per parameter. largest "
    "difference: relative, between a projected update and the dense loop's. planned: by `mambacl plan`.",
)
DECOMPOSITION_NOTES = (
    f"After a task, all blocks. eigh: once per feature, as here. SVD: once per parameter, from a sample of {SAMPLE}. "
    "planned: by `mambacl plan`.",
)


def random_features(space: NullSpace) -> TaskStatistics:
    """A covariance with a decaying spectrum per feature; parts that are protected element by element stay unchanged."""
    named, device = dict(space.model.named_parameters()), next(space.model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    covariances: dict[Key, Tensor] = {}
    for protection in space.selection.projected():
        part, key = protection.part, protection.key
        groups, _, size = part.matrix(named[part.parameter]).shape
        if key not in covariances:
            rows = torch.randn(groups, 2 * size, size, generator=generator, device=device, dtype=torch.float64)
            rows *= torch.logspace(0, -3, size, device=device, dtype=torch.float64)
            covariances[key] = rows.mT @ rows if groups > 1 else rows[0].T @ rows[0]
    elementwise = [p.part for p in space.selection.protections if p.elementwise]
    fixed = {part.name: part.of(named[part.parameter]).detach() for part in elementwise}
    return TaskStatistics(covariances, {name: Box(A.clone(), A.clone()) for name, A in fixed.items()})


def fill_with_random(space: NullSpace) -> TaskStatistics:
    """Puts the space into its state after a task."""
    gathered = random_features(space)
    space.protect(Memory(1, [gathered], [{}]))
    return gathered


def measure_projection(clock: Clock, sizes: Sizes) -> Result:
    rows = each_case(sizes.nullspace, SETTINGS, lambda case, name: [_projection(clock, case, name)])
    return Result(f"Projection of a step on {clock.device.type}", rows, list(PROJECTION_NOTES))


def _projection(clock: Clock, case: Case, name: str) -> Row:
    model = build(case, clock.device)
    space = NullSpace(model, setting(name))
    fill_with_random(space)
    plan, held = _plan(case, space, model), space.projected_step.nbytes()
    tensors = dict(model.named_parameters())
    dense = {part: projector.dense() for part, projector in space.projectors().items()}
    difference = _largest_difference(space, dense, tensors)

    def project() -> None:
        space.projected_step.project(tensors, tensors)

    def copied() -> dict[str, Tensor]:
        return {name: tensors[name].detach().clone() for name in space.trained_names()}

    seconds = clock.in_turn({
        "projection": project,
        "dense_loop": lambda: project_by_loop(space, dense, copied(), tensors),
    })  # fmt: skip
    dense.clear()
    steps = _steps(clock, space)
    row: Row = {"model": case.model, "setting": name}
    row |= {f"{key}_ms": 1e3 * value for key, value in {**steps, **seconds}.items()}
    if clock.device.type == "cuda":
        row["projection_on_device_ms"] = 1e3 * clock.on_device(project).seconds
    row |= {
        "dense_loop_/_projection": seconds["dense_loop"] / seconds["projection"],
        "projected_/_adam": steps["projected"] / steps["adam"],
        "projectors_MB": held / 1e6,
        "dense_MB": plan.dense_bytes / 1e6,
        "planned_/_held": plan.projector_bytes / held,
        "largest_difference": difference,
    }
    if clock.device.type == "cuda":  # the memory that a step needs in addition to what is held between steps
        before, most = clock.memory(project)
        row |= {"step_MB": (most - before) / 1e6, "planned_/_step": plan.step_bytes / max(1, most - before)}
    return row


def _steps(clock: Clock, space: NullSpace) -> dict[str, float]:
    """Seconds of Adam's step, plain and projected, each with its own optimizer."""
    for parameter in space.parameters():
        parameter.grad = torch.randn_like(parameter)
    fused = clock.device.type == "cuda"
    plain, inner = (torch.optim.Adam(space.parameters(), lr=1e-4, fused=fused) for _ in range(2))
    return clock.in_turn({"adam": plain.step, "projected": space.wrap(inner).step})


@torch.no_grad()
def project_by_loop(
    space: NullSpace, matrices: Mapping[str, Tensor], old: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> None:
    """The textbook way: one dense product per parameter."""
    for _, part in space.selection.parts():
        if part.name in matrices:
            P, then, now = matrices[part.name], part.of(old[part.parameter]), part.of(new[part.parameter])
            now.copy_(then + (P @ (now - then) if part.side == "left" else (now - then) @ P))


@torch.no_grad()
def _largest_difference(space: NullSpace, dense: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> float:
    """The largest relative difference between updates, from zero, that are projected both ways."""
    nothing = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    batched = {name: torch.randn_like(tensor) for name, tensor in tensors.items()}
    looped = {name: tensor.clone() for name, tensor in batched.items()}
    projected = [c for c in space.projected_step.constraints if isinstance(c, ProjectedParts)]
    ProjectedStep(projected).project(nothing, batched, counted=False)
    project_by_loop(space, dense, nothing, looped)
    names = space.trained_names()
    return max(((batched[name] - looped[name]).norm() / looped[name].norm()).item() for name in names)


def measure_decomposition(clock: Clock, sizes: Sizes) -> Result:
    _warm_up(clock.device)
    rows = each_case(sizes.nullspace, SETTINGS, lambda case, name: [_decomposition(clock, case, name)])
    return Result(f"Decomposition after a task on {clock.device.type}", rows, list(DECOMPOSITION_NOTES))


def _decomposition(clock: Clock, case: Case, name: str) -> Row:
    model = build(case, clock.device)
    space = NullSpace(model, setting(name))
    gathered = random_features(space)
    seconds = clock.once(lambda: space.protect(Memory(1, [gathered])))
    svd = _svd_seconds(clock, space, gathered)
    plan = _plan(case, space, model, clock.device)
    planned = plan.decomposition_seconds
    assert planned is not None
    held = sum(covariance.nbytes for covariance in gathered.covariances.values())
    return {
        "model": case.model,
        "setting": name,
        "matrices": sum(plan.matrices.values()),
        "largest": max(plan.matrices),
        "eigh_s": seconds,
        "SVD_s": svd,
        "planned_s": planned,
        "SVD_/_eigh": svd / seconds,
        "planned_/_eigh": planned / seconds,
        "covariances_MB": held / 1e6,
        "planned_/_held": plan.covariance_bytes / held,
    }


def _svd_seconds(clock: Clock, space: NullSpace, gathered: TaskStatistics) -> float:
    """The plain way: one dense matrix per parameter, from its own SVD."""
    keys = {protection.name: protection.key for protection in space.selection.projected()}
    sample, found = list(keys.items())[:SAMPLE], space.decompositions()

    def decompose_sample() -> None:
        for name, key in sample:
            dense_projector(gathered.covariances[key], found[name].rank, space.setting.eta, "none")

    return clock.once(decompose_sample) / len(sample) * len(keys)


def _warm_up(device: torch.device) -> None:
    """Lets libraries initialize themselves, as they do on first use."""
    square = torch.randn(64, 64, device=device, dtype=torch.float64)
    decompose([square.T @ square], "energy:0.9")
    torch.linalg.svd(square)


def _plan(case: Case, space: NullSpace, model: nn.Module, calibrate_on: torch.device | None = None) -> Plan:
    size = pixels(case, model)
    with torch.device("meta"):
        shadow: Any = create_model(case.model, num_classes=0, **case.options)
        images = torch.empty(1, 3, size, size)
    by_kernels = serves(next(model.parameters()).device)
    return make_plan(NullSpace(shadow, space.setting), images, PROTECTED, calibrate_on=calibrate_on, kernels=by_kernels)
