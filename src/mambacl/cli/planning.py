"""The command plan."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from mambacl.config import Device, RunConfig, preset_names, resolve
from mambacl.errors import UserError
from mambacl.lazy import loading_pytorch
from mambacl.nullspace.settings import SETTINGS
from mambacl.options import Must, Options, at_least
from mambacl.quantities import is_quantity, quantity
from mambacl.status import status

Bytes = Annotated[str | None, Must("be a size such as 80GB", partial(is_quantity, "B"))]
Rate = Annotated[str, Must("be a rate such as 50GB/s", partial(is_quantity, "B/s"))]


@dataclass(frozen=True)
class Cluster(Options):
    """GPUs and the network between them, for `--gpus`"""

    gpu_memory: Bytes = None
    """limit: says what to switch on to fit into it, the cheapest first"""
    bandwidth: Rate = "50GB/s"
    """bytes per second between GPUs, of each GPU's slowest link"""
    latency: Annotated[str, Must("be a time such as 20us", partial(is_quantity, "s"))] = "20us"
    """time of a message between GPUs"""
    speed: Annotated[str | None, Must("be a speed such as 180TFLOP/s", partial(is_quantity, "FLOP/s"))] = None
    """operations per second of a GPU in training; default: what an H200 reached"""


@dataclass(frozen=True)
class Workload(Options):
    """What is trained, for `--gpus`"""

    method: Literal["mamba-cl", "sequential"] = "mamba-cl"
    """with the null space, or plain fine-tuning of the same parameters"""
    batch_size: Annotated[int | None, at_least(1)] = None
    """images of a step on all GPUs together; default: the preset's, or 200"""
    precision: Literal["bf16", "tf32", "float32"] = "bf16"
    """of training"""
    accumulate: Annotated[int | None, at_least(1)] = None
    """pieces of each batch; default: the preset's, or 1"""
    recompute: bool = False
    """gradient checkpointing"""
    shard: bool = False
    """FSDP2 in place of DDP, as in runs"""
    share_steps: bool = False
    """the projection shared out, as in runs"""
    images: Annotated[int, at_least(0)] = 0
    """training images of all tasks together, for the time of the run"""
    classes: Annotated[int, at_least(0)] = 0
    """classes of all tasks together, for the classifier's memory"""
    passes: Annotated[int | None, at_least(1)] = None
    """passes over each task's images; default: the preset's, or 50"""


def plan(
    backbone: Annotated[str, "a model (`mambacl models` lists them), a preset or a YAML file"],
    *,
    image_size: Annotated[int | None, "pixels; default: the preset's or the model's", at_least(1)] = None,
    setting: Annotated[str | None, f"{', '.join(SETTINGS)}; default: the preset's, or paper"] = None,
    tasks: Annotated[int | None, "number of tasks, for --keep-tasks and the total time", at_least(1)] = None,
    protected: Annotated[
        float, "share of directions assumed to be protected", Must("be between 0 and 1", lambda share: 0 <= share <= 1)
    ] = 0.1,
    storage: Annotated[str | None, "precision of the projectors: float32, bfloat16, ..."] = None,
    covariances: Annotated[str | None, "where to keep them: device, cpu, disk"] = None,
    projectors: Annotated[str | None, "where to keep them: device, cpu, disk"] = None,
    layers: Annotated[Literal["ssm", "all"] | None, "protect the selective SSMs, or every layer"] = None,
    keep_tasks: Annotated[bool, "keep the covariances of each task separately"] = False,
    blocks: Annotated[int | None, "only the first N blocks", at_least(1)] = None,
    device: Annotated[Device, "where it will run: cpu, cuda"] = "auto",
    no_calibration: Annotated[bool, "do not measure the time"] = False,
    gpus_: Annotated[tuple[int, ...], "also plan the training on so many GPUs: one or more numbers", at_least(1)] = (),
    workload: Workload = Workload(),
    cluster: Cluster = Cluster(),
    json: Annotated[Path | None, "write the plan for several GPUs to this file, too"] = None,
) -> None:
    """predict the cost of protecting a model or preset: `mambacl plan defocus_mamba_large_22k --image-size 192`

    Predicts the memory, the FLOPs of a projected step and the time of a decomposition, before any training; with
    `--gpus 8 64` also what training needs on 8 and on 64 GPUs."""
    with loading_pytorch():
        import torch

        from mambacl.backbones import create_model
        from mambacl.bench.result import quiet
        from mambacl.nullspace import NullSpace
        from mambacl.nullspace.plan import make_plan
        from mambacl.ops.switch import serves
        from mambacl.reports.plans import plan_text
        from mambacl.training.build import pick_device

    if not gpus_ and (workload, cluster, json) != (Workload(), Cluster(), None):
        raise UserError("The options for training on several GPUs need their number: add --gpus 8.")
    known = backbone in preset_names() or Path(backbone).suffix in (".yaml", ".yml")
    config = resolve(backbone, {}) if known else RunConfig(backbone=backbone)
    with torch.device("meta"):
        model: Any = create_model(config.backbone, num_classes=0, **config.backbone_options)
        size = image_size or config.stream.transforms.image_size or model.default_cfg["input_size"][-1]
        images = torch.empty(1, 3, size, size)
    given = {
        "storage": storage, "covariances": covariances, "projectors": projectors, "layers": layers, "blocks": blocks,
    }  # fmt: skip
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if keep_tasks:
        changes["keep_tasks"] = True
    if setting and known:  # keep what the preset protects
        own_rules = config.nullspace
        changes = {"eta": own_rules.eta, "layers": own_rules.layers, "blocks": own_rules.blocks, **changes}
    space = NullSpace(model, setting or config.nullspace, **changes)
    own = config.stream.tasks if isinstance(config.stream.tasks, int) else len(config.stream.tasks)
    count, where = tasks or (own if known else 10), pick_device(device)
    with status("measuring this machine"):
        made = make_plan(space, images, protected, count, None if no_calibration else where, kernels=serves(where))
    name = config.name if known else config.backbone
    print(plan_text(made, config.backbone, size, protected, count, space.setting.storage, str(where)))
    if gpus_:
        if serves(torch.device("cuda")) != serves(where):  # a GPU's kernels need less
            with quiet(logging.WARNING):  # the space is described already
                made = make_plan(space, images, protected, count, kernels=serves(torch.device("cuda")))
        _several(name, size, config, space, made, count, gpus_, workload, cluster, json)


def _several(
    name: str, size: int, config: RunConfig, space: Any, plan: Any, tasks: int, gpus: tuple[int, ...],
    workload: Workload, cluster: Cluster, json: Path | None,
) -> None:  # fmt: skip
    """Plans the training on several GPUs, shows it and writes it."""
    from mambacl.bench.result import check_writable, save
    from mambacl.reports import gpu_plans
    from mambacl.training.costs import Machine, Switches
    from mambacl.training.planning import Job, count_sizes, default_speed, record_of

    check_writable(json)
    recipe, setting = config.training, space.setting
    batch = workload.batch_size or recipe.batch_size
    if max(gpus) > batch:
        raise UserError(f"A batch of {batch} images is too small for {max(gpus)} GPUs: set --batch-size.")
    job = Job(
        batch, tasks, workload.classes, workload.images, workload.passes or recipe.passes, recipe.covariance_batch_size
    )
    own_accumulate = workload.accumulate or recipe.accumulate
    start = Switches(
        own_accumulate, workload.recompute or recipe.recompute, setting.covariances, setting.projectors,
        setting.storage, workload.shard or config.shard, workload.share_steps or config.share_steps,
    )  # fmt: skip
    machine = replace(
        Machine(),
        speed=quantity(cluster.speed, "FLOP/s") if cluster.speed else default_speed(workload.precision),
        bandwidth=quantity(cluster.bandwidth, "B/s"),
        latency=quantity(cluster.latency, "s"),
    )
    bf16 = workload.precision == "bf16"
    with status("counting activations"):
        protecting = plan if workload.method == "mamba-cl" else None
        sizes = count_sizes(space.model, space, protecting, size, bf16, job, setting.storage)
    limit = quantity(cluster.gpu_memory, "B") if cluster.gpu_memory else None
    record = record_of(name, size, workload.precision, sizes, start, job, machine, gpus, limit)
    print("\n" + gpu_plans.text(record))
    save(record, json)
