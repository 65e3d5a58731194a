"""Commands about models and methods: plan, models, methods, convert."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from mambacl.config import Device, RunConfig, preset_names, resolve
from mambacl.errors import UserError
from mambacl.nullspace.settings import SETTINGS
from mambacl.options import Must, at_least
from mambacl.registry import did_you_mean
from mambacl.status import status


def plan(
    backbone: Annotated[str, "a model (`mambacl models` lists them) or a preset"],
    *,
    image_size: Annotated[int | None, "pixels; default: the preset's or the model's", at_least(1)] = None,
    setting: Annotated[str | None, f"{', '.join(SETTINGS)}; default: the preset's, or paper"] = None,
    tasks: Annotated[int | None, "number of tasks, for --keep-tasks and the total time", at_least(1)] = None,
    protected: Annotated[
        float, "share of directions assumed to be protected", Must("be between 0 and 1", lambda share: 0 <= share <= 1)
    ] = 0.1,
    storage: Annotated[str | None, "precision of the projectors: float32, bfloat16, ..."] = None,
    covariances: Annotated[str | None, "where to keep them: device, cpu, disk"] = None,
    layers: Annotated[Literal["ssm", "all"] | None, "protect the selective SSMs, or every layer"] = None,
    keep_tasks: Annotated[bool, "keep the covariances of each task separately"] = False,
    blocks: Annotated[int | None, "only the first N blocks", at_least(1)] = None,
    device: Annotated[Device, "where it will run: cpu, cuda"] = "auto",
    no_calibration: Annotated[bool, "do not measure the time"] = False,
) -> None:
    """predict the cost of protecting a model or preset: `mambacl plan defocus_mamba_large_22k --image-size 192`

    Predicts the memory, the FLOPs of a projected step and the time of a decomposition, before any training."""
    with status("loading PyTorch"):
        import torch

        from mambacl.backbones import create_model
        from mambacl.nullspace import NullSpace
        from mambacl.nullspace.plan import make_plan
        from mambacl.ops.switch import serves
        from mambacl.reports.plans import plan_text
        from mambacl.training.build import pick_device

    known = backbone in preset_names()
    config = resolve(backbone, {}) if known else RunConfig(backbone=backbone)
    with torch.device("meta"):
        model: Any = create_model(config.backbone, num_classes=0, **config.backbone_options)
        size = image_size or config.stream.transforms.image_size or model.default_cfg["input_size"][-1]
        images = torch.empty(1, 3, size, size)
    given = {"storage": storage, "covariances": covariances, "layers": layers, "blocks": blocks}
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
    print(plan_text(made, config.backbone, size, protected, count, space.setting.storage, str(where)))


def models(name: Annotated[str, "only models whose name contains this"] = "") -> None:
    """list the backbones, with their sizes, FLOPs and weights: `mambacl models vim`

    Shows accuracy, data set, licence and file of the weights."""
    known = catalogue()
    names = [other for other in known["models"] if name in other]
    if not names:
        raise UserError(f"No model's name contains '{name}'.{did_you_mean(name, known['models'])}")
    longest = max(len(tag) for name in names for tag in (*known["models"][name]["weights"], "weights"))
    head = f"{'name':26} {'parameters':>11} {'px':>4} {'GFLOP':>7}"
    print(f"{head}  {'weights':{longest}} {'top-1':>5}  data, licence, file")
    for name in names:
        entry = known["models"][name]
        about = f"{name:26} {entry['parameters'] / 1e6:>9.2f} M {entry['pixels']:>4} {entry['flops'] / 1e9:>7.2f}"
        for tag, w in entry["weights"].items():
            top1 = f"{w['top1']:.1f}" if w["top1"] else ""
            print(f"{about}  {tag:{longest}} {top1:>5}  {w['data']}, {w['licence']}, {w['file']}")
            about = " " * len(about)
        if not entry["weights"]:
            print(f"{about}  none")
    print("\nGFLOP of one image: multiply-adds count as two, elementwise operations not at all, the scan as 9 "
          "operations per token, channel and state. top-1: per cent on the data set, as published. "
          "--pretrained TAG chooses weights; the first of a model are its default.")  # fmt: skip
    if "defocus_mamba_large_22k" in names:
        total, scan = (known["linear_head"][key] / 1e9 for key in ("flops", "scan"))
        print(f"De-focus-L with a linear head at 192 px: {total:.1f}, or {total - scan:.1f} without the scan; "
              "the paper says 91.7.")  # fmt: skip


def catalogue() -> dict[str, Any]:
    """What `mambacl models` shows, with the models of other packages, if there are any."""
    from importlib.metadata import entry_points  # late: importing this is slow

    known = recorded()
    if "mambacl.backbones.registry" in sys.modules or entry_points(group="mambacl.backbones"):
        from mambacl.backbones.catalogue import described
        from mambacl.backbones.registry import MODELS

        others = {name: described(name) for name in MODELS.names() if name not in known["models"]}
        known["models"] = dict(sorted((known["models"] | others).items()))
    return known


def recorded() -> dict[str, Any]:
    """What `backbones.catalogue` has recorded. Its file is read here, because importing the backbones imports
    PyTorch."""
    return json.loads((files("mambacl") / "backbones" / "catalogue.json").read_text(encoding="utf-8"))


def methods() -> None:
    """list the continual-learning methods: `mambacl methods`"""
    from mambacl.methods.registry import stores_images, summaries

    found = summaries()
    marks = {name: "*" if stores_images(name) else "" for name in found}
    for name, summary in found.items():
        print(f"{name + marks[name]:14} {summary}")
    if any(marks.values()):
        print("* stores training images of earlier tasks (--options.memory); the others store none")


def convert(
    file: Annotated[Path, "a .pth, .pt, .bin or .safetensors file"],
    out: Annotated[Path, "the file to write, ending in .safetensors"],
    *,
    key: Annotated[str | None, "entry with the weights, such as model_ema"] = None,
) -> None:
    """convert a public checkpoint to safetensors: `mambacl convert FILE OUT.safetensors`

    Executes no code from the file."""
    with status(f"converting {file}"):
        from mambacl.backbones import convert as convert_file

        account = convert_file(file, out, key)
    print(f"Tensors written to {out}: {len(account.loaded)}.")
    if account.inert:
        print(f"Foreign classes that were not executed: {', '.join(account.inert)}.")
