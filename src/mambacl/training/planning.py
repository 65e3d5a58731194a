"""Plans a run on several GPUs: counts a model's sizes, finds what each GPU needs and how long a step takes by the
formulas of `training.costs`, and says what to switch on until it fits. Needs no GPU and no weights."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from mambacl.backbones.flops import count_step_flops
from mambacl.nullspace import NullSpace
from mambacl.nullspace.blocks import Block
from mambacl.nullspace.plan import Plan
from mambacl.nullspace.statistics import Features, evaluating, value, watching
from mambacl.training import costs
from mambacl.training.activations import planned
from mambacl.training.costs import ITEMS, Load, Machine, Sizes, Switches
from mambacl.tuning.recomputing import blocks_of

KIND = "plan"
CEILINGS = {"bf16": 700e12, "tf32": 356e12, "float32": 51e12}  # products of an H200, operations per second
SMALLEST = 8  # images of a piece: smaller ones leave most of a GPU idle
POINTS = (2, 4)  # batches whose activations are counted: they grow linearly


@dataclass(frozen=True)
class Job:
    """What is to be trained."""

    batch: int
    tasks: int
    classes: int = 0
    """of all tasks together"""
    images: int = 0
    """training images of all tasks together; 0 if unknown"""
    passes: int = 1
    """over each task's images"""
    covariance_batch: int = 100


def default_speed(precision: str) -> float:
    """Of an H200: measured for bf16; for other precisions the same share of the speed of plain products."""
    return Machine.speed * CEILINGS[precision] / CEILINGS["bf16"]


# Sizes


def count_sizes(
    model: nn.Module, space: NullSpace, plan: Plan | None, size: int, bf16: bool, job: Job, storage: str = "float32"
) -> Sizes:
    """`model`: on the meta device; `space`: says what trains; `plan`: of the null space, None for a method without
    one; `size`: of square images."""
    space.freeze_others()
    forward, backward = count_step_flops(model, size)
    counted = {
        name: [planned(model, images, size, bf16=bf16, again=name == "again") for images in POINTS]
        for name in ("kept", "again")
    }
    lines = {name: _line(*(one.total for one in found)) for name, found in counted.items()}
    lines["block"] = _line(*(one.block for one in counted["kept"]))
    named = dict(space.model.named_parameters())
    blocks = blocks_of(model)
    features = int(model.num_features) + 1  # type: ignore[arg-type]
    sizes = Sizes(
        parameters=sum(p.numel() for p in named.values()),
        trained=sum(named[name].numel() for name in space.trained_names()),
        blocks=len(blocks),
        block=max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0),
        head=features * job.classes,
        head_trained=features * -(-job.classes // job.tasks),
        forward=forward,
        backward=backward,
        kept_fixed=lines["kept"][0],
        kept_image=lines["kept"][1],
        again_fixed=lines["again"][0],
        again_image=lines["again"][1],
        block_fixed=lines["block"][0],
        block_image=lines["block"][1],
        matrices={},
    )
    if plan is None:
        return sizes
    shapes = [p.part.matrix(named[p.part.parameter]).shape for p in space.selection.projected()]
    return replace(
        sizes,
        matrices=plan.matrices,
        basis_values=plan.projector_bytes // ITEMS[storage],
        projected=sum(shape.numel() for shape in shapes),
        projected_tensors=len({p.part.parameter for p in space.selection.projected()}),
        projection=plan.projection_flops,
        snapshot=plan.step_bytes,
        gram=gram_operations(space, size),
        held=job.tasks if space.setting.keep_tasks else 1,
    )


def _line(first: float, second: float) -> tuple[float, float]:
    """What does not depend on the number of images, and what each of them adds."""
    few, many = POINTS
    slope = (second - first) / (many - few)
    return max(0.0, first - few * slope), slope


def gram_operations(space: NullSpace, size: int) -> float:
    """Operations of all covariances for one image: 2 n D^2 for n rows of D values."""
    wanted: dict[str, dict[tuple[str, str], str]] = {}
    named, found = dict(space.model.named_parameters()), dict[tuple[str, str], float]()
    sizes = {p.key: p.part.matrix(named[p.part.parameter]).shape[-1] for p in space.selection.projected()}
    for p in space.selection.projected():
        wanted.setdefault(p.block, {})[p.key] = p.inputs[0]

    def show(block: Block, features: Features) -> None:
        for key, name in wanted.get(block.name, {}).items():
            if name in features:
                found[key] = 2.0 * value(features, name).numel() * sizes[key]

    device = next(space.model.parameters()).device
    with watching(space.selection.blocks, show), evaluating(space.model), torch.no_grad():
        space.model(torch.empty(1, 3, size, size, device=device))
    return sum(found.values())


# What to switch on


def switched(sizes: Sizes, start: Switches, load: Load, machine: Machine, limit: float) -> list[tuple[str, Switches]]:
    """What to switch on until the limit holds, the cheapest first, each beside those before it. Leaves out what saves
    nothing. The first entry is the start; the last may change the first two switches, if with the others on another
    choice of them is faster."""
    steps: list[tuple[str, Switches]] = [("as given", start)]
    now = start
    for name, options in _in_order(start, load):
        if costs.peak(sizes, now, load, machine) <= limit:
            break
        fitting = [one for one in options if costs.peak(sizes, _changed(now, one), load, machine) <= limit]
        best = _changed(now, fitting[0] if fitting else options[-1]) if options else now
        if costs.peak(sizes, best, load, machine) < costs.peak(sizes, now, load, machine):
            now = best
            steps.append((name.format(**asdict(now)), now))
    others = [
        replace(now, accumulate=count, recompute=again)
        for again in (start.recompute, True)
        for count in (start.accumulate, *(n for n in _pieces(start, load) if load.own // n >= SMALLEST))
    ]
    able = [one for one in (now, *others) if costs.peak(sizes, one, load, machine) <= limit]
    fastest = min(able, key=lambda one: seconds_of(sizes, one, load, machine)) if able else now
    if seconds_of(sizes, fastest, load, machine) < 0.99 * seconds_of(sizes, now, load, machine):
        words = ("training.recompute true, " if fastest.recompute > now.recompute else "") + "training.accumulate"
        steps.append((f"{words} {fastest.accumulate}: the fastest that fits", fastest))
    return steps


def seconds_of(sizes: Sizes, switches: Switches, load: Load, machine: Machine) -> float:
    """Of a step."""
    return sum(costs.step_seconds(sizes, switches, load, machine).values())


def _pieces(start: Switches, load: Load) -> list[int]:
    return [n for n in (start.accumulate << k for k in range(1, load.own.bit_length() + 1)) if n < 2 * load.own]


Changes = dict[str, Any]


def _changed(switches: Switches, changes: Changes) -> Switches:
    return replace(switches, **changes)


def _in_order(start: Switches, load: Load) -> Iterator[tuple[str, list[Changes]]]:
    """Changes by cost; of several under one name, the first that fits counts."""
    pieces = _pieces(start, load)
    few = [n for n in pieces if load.own // n >= SMALLEST]
    many = [n for n in pieces if n not in few]
    yield "training.accumulate {accumulate}", [{"accumulate": n} for n in few]
    yield "training.recompute true", [{"recompute": True}]
    yield "nullspace.covariances cpu", [{"covariances": "cpu"}]
    yield "nullspace.projectors cpu", [{"projectors": "cpu"}]
    if start.storage in ("float32", "float64"):
        yield "nullspace.storage {storage}", [{"storage": "bfloat16"}]
    if load.gpus > 1:
        yield "shard true", [{"shard": True}]
    yield "training.accumulate {accumulate}", [{"accumulate": n} for n in many]


# The plan


def plan_for(
    gpus: int, sizes: Sizes, start: Switches, job: Job, machine: Machine, limit: float | None = None
) -> dict[str, Any]:
    """Bytes and seconds for a number of GPUs, with the switches that the limit needs."""
    load = Load(job.batch, gpus, job.covariance_batch)
    steps = switched(sizes, start, load, machine, float("inf") if limit is None else limit)
    chosen = steps[-1][1]
    seconds = costs.step_seconds(sizes, chosen, load, machine)
    step = sum(seconds.values())
    need = costs.peak(sizes, chosen, load, machine)
    found: dict[str, Any] = {
        "gpus": gpus,
        "images_per_gpu": load.own,
        "memory": {
            "step": costs.step_memory(sizes, chosen, load),
            "task_end": costs.task_end_memory(sizes, chosen, load),
            "reserved": machine.reserved,
            "peak": need,
        },
        "step": {**seconds, "total": step},
        "sent_per_step": costs.sent_bytes(sizes, chosen, load),
        "images_per_second": job.batch / step,
        "switches": [
            {
                "name": name,
                "peak": costs.peak(sizes, one, load, machine),
                "step": seconds_of(sizes, one, load, machine),
            }
            for name, one in steps
        ],
        "chosen": asdict(chosen),
        "fits": None if limit is None else need <= limit,
    }
    ends = costs.task_end_seconds(sizes, chosen, load, machine, job.images / job.tasks)
    found["task_end"] = {**ends, "total": sum(ends.values())}
    found["sent_per_task_end"] = costs.sent_at_task_end(sizes, chosen, load)
    if job.images:
        steps_of_task = job.passes * -(-job.images // job.tasks // job.batch)
        found["run"] = {"steps": job.tasks * steps_of_task}
        found["run"]["seconds"] = job.tasks * (steps_of_task * step + sum(ends.values()))
    return found


def record_of(
    model: str,
    size: int,
    precision: str,
    sizes: Sizes,
    start: Switches,
    job: Job,
    machine: Machine,
    gpus: Sequence[int],
    limit: float | None = None,
) -> dict[str, Any]:
    """Everything that the plan rests on, and the plan for each number of GPUs."""
    return {
        "schema": 1,
        "kind": KIND,
        "model": model,
        "pixels": size,
        "precision": precision,
        "job": asdict(job),
        "start": asdict(start),
        "machine": asdict(machine),
        "limit": limit,
        "sizes": {**asdict(sizes), "matrices": {str(size): n for size, n in sizes.matrices.items()}},
        "plans": [plan_for(count, sizes, start, job, machine, limit) for count in gpus],
    }
