"""What pre-training leaves behind: the weights in half precision, and a card that describes them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambacl.files import write_bytes, write_tensors
from mambacl.pretraining.options import EXECUTION, PretrainConfig

CARD = "MODEL_CARD.md"


def in_half_precision(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floats as float16; counters, and tensors with a value beyond its range, unchanged."""
    made = {}
    for name, tensor in tensors.items():
        half = tensor.half() if tensor.is_floating_point() else tensor
        made[name] = half if not half.is_floating_point() or bool(torch.isfinite(half).all()) else tensor
    return made


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    write_tensors(path, in_half_precision(tensors), {"format": "pt"})


@dataclass(frozen=True)
class Facts:
    """What the card says beside the options."""

    weights: str
    parameters: int
    classes: int
    train_images: int
    test_images: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    epochs: float
    steps: int
    seconds: float
    accuracy: Mapping[str, float]
    """top-1 of the last weights (raw), of their average (ema) and of the file (file), as shares of one"""
    device: str
    commit: str | None
    versions: Mapping[str, str]


def write_card(path: Path, config: PretrainConfig, facts: Facts) -> None:
    write_bytes(path, card(config, facts).encode())


def card(config: PretrainConfig, facts: Facts) -> str:
    """The model card, in Markdown."""
    options = {**config.backbone_options, "num_classes": facts.classes}
    call = ", ".join(
        [f'"{config.backbone}"', f'pretrained="{facts.weights}"', *(f"{k}={v!r}" for k, v in options.items())]
    )
    mean, std = (", ".join(f"{value:.3f}" for value in part) for part in (facts.mean, facts.std))
    data, versions = config.data_name, ", ".join(f"{name} {number}" for name, number in facts.versions.items())
    images = f"{facts.train_images:,} training and {facts.test_images:,} test images"
    if config.stream.validation is not None:
        images += f", which are {config.stream.validation:.0%} of the training images of each class"
    lines = [
        f"# {config.backbone}, pre-trained on {data}",
        "",
        f"`{facts.weights}` holds {facts.parameters:,} parameters in half precision. To load them:",
        "",
        "```python",
        f"mambacl.create_model({call})",
        "```",
        "",
        f"- **Data** {data}: {facts.classes} classes, {images}, {facts.image_size} x {facts.image_size} pixels. "
        f"SHA-256 of the data: {facts.fingerprint}.",
        f"- **Accuracy** top-1 on the test images: {facts.accuracy['file']:.2%} with this file. The average of the "
        f"weights in single precision: {facts.accuracy['ema']:.2%}; the weights of the last step: "
        f"{facts.accuracy['raw']:.2%}.",
        f"- **Training** from random weights: {facts.epochs:.1f} epochs ({facts.steps:,} steps) in "
        f"{facts.seconds / 60:.1f} minutes on {facts.device}, {config.precision}.",
        f"- **Input** RGB in 0..1, normalised with mean ({mean}) and deviation ({std}).",
        f"- **Software** commit {facts.commit or 'unknown'}; {versions}.",
        f"- **Licence** not chosen yet. The weights were computed from the images of {data}: check their terms before "
        "you publish the weights, and name the licence here.",
        "",
        "| option | value |",
        "|---|---|",
        *(f"| `{name}` | {value} |" for name, value in _recipe(config).items()),
        "",
    ]
    return "\n".join(lines)


def _recipe(config: PretrainConfig) -> dict[str, Any]:
    """The options that made the weights, by name."""
    left_out = [*EXECUTION, "backbone", "backbone_options", "stream", "evaluate_every", "precision"]
    left_out += ["epochs"] if config.minutes is not None else []
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in left_out}
    transforms = config.stream.transforms
    return {**{n: v for n, v in values.items() if v is not None}, "stream.transforms.augment": transforms.augment}
