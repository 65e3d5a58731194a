"""Measures how many directions each rank rule protects in one block of the packaged model, for docs/choose.md:

    python examples/spectrum.py docs/results/spectrum.json
    python tools/draw_figures.py

It takes a few seconds on one core.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

import mambacl
from mambacl.data import TransformConfig, Transforms, open_dataset
from mambacl.nullspace import null_rank

BLOCK = 6  # of 12, counted from 0
RULES = ("corner", "smoothed-corner", "energy:0.9", "energy:0.99", "energy:0.999", "tolerance:1e-12")


def measure(size: int = 32, images: int = 400) -> dict[str, Any]:
    """By number of leading directions: the share of the energy of an SSM's input that lies in them, in per cent."""
    model = mambacl.create_model("defocus_mamba_nano", num_classes=0, pretrained="tin32-39ep").eval()
    about: Any = model.default_cfg
    transforms = Transforms(TransformConfig(image_size=size), size, list(about["mean"]), list(about["std"]))
    data = open_dataset("fashion-mnist-small", None).train
    chosen = [number for number, label in enumerate(data.labels) if label < 2][:images]
    inputs = transforms.normalize(torch.stack([transforms.evaluate(data.image(number)) for number in chosen]))
    space = mambacl.NullSpace(model, "exact", blocks=[BLOCK])
    space.consolidate(inputs.split(50))
    [spectrum] = {id(part): part.spectrum for name, part in space.decompositions().items() if "x_proj" in name}.values()
    values = spectrum.clamp(min=0)
    energy = 100 * values.cumsum(0) / values.sum()
    return {
        "what": f"input of the SSM in block {BLOCK + 1} of 12, nano model before training, {len(chosen)} images of two "
        "classes of Fashion-MNIST",
        "energy": [round(float(share), 3) for share in energy],
        "protected": {rule: len(values) - null_rank(values, rule) for rule in RULES},
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure()) + "\n", encoding="utf-8")
