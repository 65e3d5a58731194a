"""Commands about models and methods: plan, models, methods, convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from mambacl.config import Device, RunConfig, preset_names, resolve
from mambacl.errors import UserError
from mambacl.nullspace.settings import SETTINGS
from mambacl.options import Must, at_least
from mambacl.registry import did_you_mean


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
    made = make_plan(space, images, protected, count, None if no_calibration else where, kernels=serves(where))
    print(plan_text(made, config.backbone, size, protected, count, space.setting.storage, str(where)))


def models(name: Annotated[str, "only models whose name contains this"] = "") -> None:
    """list the backbones: size, FLOPs, and their weights with accuracy, data set, licence, file"""
    import torch

    from mambacl.backbones import create_model
    from mambacl.backbones.flops import count_flops
    from mambacl.backbones.registry import MODELS

    names = [other for other in sorted(MODELS.names()) if name in other]
    if not names:
        raise UserError(f"No model's name contains '{name}'.{did_you_mean(name, MODELS.names())}")
    longest = max(len(tag) for name in names for tag in (*MODELS.get(name).weights, "weights"))
    head = f"{'name':26} {'parameters':>11} {'px':>4} {'GFLOP':>7}"
    print(f"{head}  {'weights':{longest}} {'top-1':>5}  data, licence, file")
    for name in names:
        with torch.device("meta"):
            model: Any = create_model(name).eval()
        size, weights = model.default_cfg["input_size"][-1], MODELS.get(name).weights
        count, flops = sum(p.numel() for p in model.parameters()), count_flops(model, size)[0]
        about = f"{name:26} {count / 1e6:>9.2f} M {size:>4} {flops / 1e9:>7.2f}"
        for tag, w in weights.items():
            top1, file = f"{w.top1:.1f}" if w.top1 else "", "in the package" if w.packaged else w.file
            print(f"{about}  {tag:{longest}} {top1:>5}  {w.data}, {w.licence}, {file}", flush=True)
            about = " " * len(about)
        if not weights:
            print(f"{about}  none", flush=True)
    print("\nGFLOP of one image: multiply-adds count as two, elementwise operations not at all, the scan as 9 "
          "operations per token, channel and state. top-1: per cent on the data set, as published. "
          "--pretrained TAG chooses weights; the first of a model are its default.")  # fmt: skip
    if "defocus_mamba_large_22k" in names:
        with torch.device("meta"):
            model = create_model("defocus_mamba_large_22k", num_classes=1000, head_type="IN1k_cls", use_aux_loss=False)
        total, scan = (operations / 1e9 for operations in count_flops(model.eval(), 192))
        print(f"De-focus-L with a linear head at 192 px: {total:.1f}, or {total - scan:.1f} without the scan; "
              "the paper says 91.7.")  # fmt: skip


def methods() -> None:
    """list the continual-learning methods"""
    from mambacl.methods import METHODS

    for name in METHODS.names():
        print(f"{name:14} {METHODS.get(name).summary}")


def convert(
    file: Annotated[Path, "a .pth, .pt, .bin or .safetensors file"],
    out: Annotated[Path, "the file to write, ending in .safetensors"],
    *,
    key: Annotated[str | None, "entry with the weights, such as model_ema"] = None,
) -> None:
    """convert a public checkpoint to safetensors: `mambacl convert FILE OUT.safetensors`

    Executes no code from the file."""
    from mambacl.backbones import convert as convert_file

    account = convert_file(file, out, key)
    print(f"Tensors written to {out}: {len(account.loaded)}.")
    if account.inert:
        print(f"Foreign classes that were not executed: {', '.join(account.inert)}.")
