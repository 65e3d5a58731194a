"""Commands about models and methods: models, methods, convert."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from mambacl.errors import UserError
from mambacl.registry import did_you_mean
from mambacl.status import status


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
