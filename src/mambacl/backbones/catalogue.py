"""What `mambacl models` shows of each backbone. Building every model and counting its operations takes many seconds, so
the package has the results in catalogue.json. After a change to a backbone: `python -m mambacl.backbones.catalogue`."""

import json
from pathlib import Path
from typing import Any

import torch

from mambacl.backbones.flops import count_flops
from mambacl.backbones.loading import create_model
from mambacl.backbones.registry import MODELS
from mambacl.files import write_bytes

FILE = Path(__file__).with_name("catalogue.json")


def described(name: str) -> dict[str, Any]:
    """Parameters, pixels of an image's side, operations for one image, and weights by tag, the default first."""
    with torch.device("meta"):
        model: Any = create_model(name).eval()
    size = model.default_cfg["input_size"][-1]
    weights = {
        tag: {
            "top1": w.top1,
            "data": w.data,
            "licence": w.licence,
            "file": "in the package" if w.packaged else w.file,
        }
        for tag, w in MODELS.get(name).weights.items()
    }
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": count, "pixels": size, "flops": count_flops(model, size)[0], "weights": weights}


def linear_head() -> dict[str, int]:
    """Operations of De-focus-L with a linear head at 192 px, which the paper also states, and those of the scan."""
    with torch.device("meta"):
        model = create_model("defocus_mamba_large_22k", num_classes=1000, head_type="IN1k_cls", use_aux_loss=False)
    total, scan = count_flops(model.eval(), 192)
    return {"flops": total, "scan": scan}


def catalogue() -> dict[str, Any]:
    """The contents of the file: the models of this package, without those of other packages."""
    return {"models": {name: described(name) for name in sorted(MODELS.known())}, "linear_head": linear_head()}


if __name__ == "__main__":
    write_bytes(FILE, (json.dumps(catalogue(), indent=1) + "\n").encode())
