"""Commands about models and methods: plan, models, methods, convert."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mambacl.cli.parsing import Parser
from mambacl.errors import UserError
from mambacl.registry import did_you_mean


def plan(arguments: Sequence[str]) -> int:
    """what protecting a model will cost: `mambacl plan defocus_mamba_large_22k --image-size 192`, or of a preset"""
    from mambacl.config import RunConfig, preset_names, resolve
    from mambacl.nullspace.settings import SETTINGS

    words = "Predicts the bytes, the FLOPs of a projected step and the time of a decomposition, before any training."
    parser = Parser(prog="mambacl plan", description=words)
    parser.add_argument("backbone", help="a model's name (`mambacl models` lists them), or a preset's")
    parser.add_argument("--image-size", type=int, default=None, help="pixels; the preset's or the model's own")
    parser.add_argument("--setting", default=None, help=f"one of {', '.join(SETTINGS)}; the preset's, or paper")
    parser.add_argument("--tasks", type=int, default=None, help="consolidations, for --keep-tasks and the total time")
    parser.add_argument("--protected", type=float, default=0.1, help="share of directions assumed to be protected")
    parser.add_argument("--storage", default=None, help="precision of the projectors: float32, bfloat16, ...")
    parser.add_argument("--covariances", default=None, help="where they are kept: device, cpu, disk")
    parser.add_argument("--layers", default=None, help="ssm, or all")
    parser.add_argument("--keep-tasks", action="store_true", default=None, help="each task's covariances apart")
    parser.add_argument("--blocks", type=int, default=None, help="the first so many blocks only")
    parser.add_argument("--device", default="auto", help="where it will run: cpu, cuda")
    parser.add_argument("--no-calibration", action="store_true", help="leave the time out")
    given = parser.parse_args(arguments)
    for name in ("tasks", "image_size"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(given, name)}.")

    import torch

    from mambacl.backbones import create_model
    from mambacl.nullspace import NullSpace
    from mambacl.nullspace.plan import make_plan
    from mambacl.ops.switch import serves
    from mambacl.reports.plans import plan_text
    from mambacl.training.build import pick_device

    known = given.backbone in preset_names()
    config = resolve(given.backbone, {}) if known else RunConfig(backbone=given.backbone)
    with torch.device("meta"):
        model: Any = create_model(config.backbone, num_classes=0, **config.backbone_options)
        size = given.image_size or config.stream.transforms.image_size or model.default_cfg["input_size"][-1]
        images = torch.empty(1, 3, size, size)
    keys = ("storage", "covariances", "layers", "keep_tasks", "blocks")
    changes = {key: value for key in keys if (value := getattr(given, key)) is not None}
    if given.setting and known:  # what the preset protects, in the other setting
        own_rules = config.nullspace
        changes = {"eta": own_rules.eta, "layers": own_rules.layers, "blocks": own_rules.blocks, **changes}
    space = NullSpace(model, given.setting or config.nullspace, **changes)
    own = config.stream.tasks if isinstance(config.stream.tasks, int) else len(config.stream.tasks)
    tasks, device = given.tasks or (own if known else 10), pick_device(given.device)
    calibrate_on = None if given.no_calibration else device
    made = make_plan(space, images, given.protected, tasks, calibrate_on, kernels=serves(device))
    print(plan_text(made, config.backbone, size, given.protected, tasks, space.setting.storage, str(device)))
    return 0


def models(arguments: Sequence[str]) -> int:
    """list the backbones: size, FLOPs, public weights, licence, accuracy"""
    parser = Parser(prog="mambacl models", description="Lists the backbones.")
    parser.add_argument("name", nargs="?", default="", help="only models whose name contains this")
    given = parser.parse_args(arguments)

    import torch

    from mambacl.backbones import create_model
    from mambacl.backbones.flops import count_flops
    from mambacl.backbones.registry import MODELS

    names = [name for name in sorted(MODELS.names()) if given.name in name]
    if not names:
        raise UserError(f"No model's name contains '{given.name}'.{did_you_mean(given.name, MODELS.names())}")
    print(
        f"{'name':26} {'parameters':>11} {'px':>4} {'GFLOP':>7}  {'top-1':>5}  licence and file of the public weights"
    )
    for name in names:
        with torch.device("meta"):
            model: Any = create_model(name).eval()
        size, weights = model.default_cfg["input_size"][-1], MODELS.get(name).weights
        count, flops = sum(p.numel() for p in model.parameters()), count_flops(model, size)[0]
        note, top1 = "none", ""
        if weights is not None:
            source = "in the package" if weights.packaged else str(weights.url).rpartition("/")[2]
            note, top1 = f"{weights.licence}: {source}", f"{weights.top1:.1f}" if weights.top1 else ""
        print(f"{name:26} {count / 1e6:>9.2f} M {size:>4} {flops / 1e9:>7.2f}  {top1:>5}  {note}", flush=True)
    nano = "; that of defocus_mamba_nano on Tiny-ImageNet at 32 px" if "defocus_mamba_nano" in names else ""
    print("\nGFLOP of one image: multiply-adds count as two, elementwise operations not at all, the scan as 9 "
          f"operations a token, channel and state. top-1: per cent on ImageNet-1k, as published{nano}.")  # fmt: skip
    if "defocus_mamba_large_22k" in names:
        with torch.device("meta"):
            model = create_model("defocus_mamba_large_22k", num_classes=1000, head_type="IN1k_cls", use_aux_loss=False)
        whole, scan = (operations / 1e9 for operations in count_flops(model.eval(), 192))
        print(f"De-focus-L with a linear head at 192 px: {whole:.1f}, or {whole - scan:.1f} without the scan, where "
              "the paper says 91.7.")  # fmt: skip
    return 0


def methods(arguments: Sequence[str]) -> int:
    """list the continual-learning methods"""
    from mambacl.methods import METHODS

    Parser(prog="mambacl methods", description="Lists the methods.").parse_args(arguments)
    for name in METHODS.names():
        print(f"{name:14} {METHODS.get(name).summary}")
    return 0


def convert(arguments: Sequence[str]) -> int:
    """a public checkpoint as safetensors: `mambacl convert FILE OUT.safetensors`"""
    parser = Parser(prog="mambacl convert", description="Writes the weights of a checkpoint as safetensors; nothing "
                    "from the file is run.")  # fmt: skip
    parser.add_argument("file", type=Path, help="a .pth, .pt, .bin or .safetensors file")
    parser.add_argument("out", type=Path, help="the file to write, ending in .safetensors")
    parser.add_argument("--key", default=None, help="entry that holds the weights, such as model_ema")
    given = parser.parse_args(arguments)

    from mambacl.backbones import convert as convert_file

    account = convert_file(given.file, given.out, given.key)
    print(f"Tensors written to {given.out}: {len(account.loaded)}.")
    if account.inert:
        print(f"Foreign classes made inert: {', '.join(account.inert)}.")
    return 0
