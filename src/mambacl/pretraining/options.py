"""The options of pre-training, checked before PyTorch is imported."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from mambacl.config import Device
from mambacl.data.config import StreamConfig, TransformConfig
from mambacl.errors import UserError
from mambacl.files import expanded
from mambacl.options import Must, OptionError, Options, at_least, between, build, finite_from, merge, nested

Count = Annotated[int, at_least(1)]
Amount = Annotated[float, finite_from(0)]
Share = Annotated[float, between(0, 1)]
BelowOne = Annotated[float, Must("be at least 0 and below 1", lambda value: 0 <= value < 1)]
EXECUTION = ("out", "device", "fast", "eval_batch_size")
"""where and how fast it is computed; these do not affect what is computed"""
ALL_AT_ONCE = {"tasks": 1, "own_tasks": False, "scenario": "class", "first_task": None, "order": "natural"}
"""options of a stream that pre-training does not use, with the only value it takes"""


def _stream() -> StreamConfig:
    return StreamConfig(
        dataset="folders", tasks=1, transforms=TransformConfig(augment="resized-crop-flip", engine="batched")
    )


@dataclass(frozen=True)
class PretrainConfig(Options):
    """Pre-training. The defaults suit images of 32 pixels and models of up to 5 million parameters."""

    backbone: str = "defocus_mamba_nano"
    """model to pre-train; `mambacl models` lists them"""
    backbone_options: dict[str, Any] = field(default_factory=dict)
    """changes to the model's configuration"""
    stream: StreamConfig = field(default_factory=_stream)
    """which images, and how they are augmented"""
    epochs: Count = 100
    """passes over the training images"""
    minutes: Annotated[float | None, Must("be positive", lambda minutes: 0 < minutes < math.inf)] = None
    """train for this long instead of a number of epochs; the learning rate follows the clock"""
    batch_size: Count = 512
    """images per step; the last, smaller batch of an epoch is left out"""
    lr: Amount = 1.5e-3
    """learning rate of AdamW after the warm-up"""
    final_lr: Share = 0.005
    """share of the learning rate that is left at the end of the cosine"""
    warmup: BelowOne = 0.05
    """share of the training in which the learning rate rises from 0"""
    weight_decay: Amount = 0.1
    """weight decay of matrices and convolutions; norms, biases, A, D and embeddings have none"""
    clip: Amount = 1.0
    """largest norm of the gradient; 0 for no limit"""
    label_smoothing: BelowOne = 0.1
    """share of each target that is spread over all classes"""
    mixup: Amount = 0.8
    """mixup: parameter of the beta distribution of the shares; 0 for no mixup"""
    cutmix: Amount = 1.0
    """cutmix: parameter of the beta distribution of the areas; 0 for no cutmix"""
    mix_share: Share = 0.9
    """share of the batches with mixup or cutmix"""
    jitter: Share = 0.3
    """brightness, contrast and saturation of each image change by up to this share"""
    erase: Share = 0.25
    """share of the images in which a random box, up to a third of the image, is erased"""
    drop_path: BelowOne = 0.15
    """rate at which the last block's branches are dropped; it rises from 0 in the first block"""
    ema: BelowOne = 0.999
    """decay of the average of the weights, which is what is exported; 0 exports the weights of the last step"""
    evaluate_every: Count = 5
    """epochs between evaluations on the test images"""
    eval_batch_size: Count = 500
    """images per batch in evaluation"""
    seed: Annotated[int, between(0, 2**63 - 1)] = 0
    """seed of the initial weights, the order of the images, their augmentation and their mixing"""
    device: Device = "auto"
    """auto (cuda if available), cpu, cuda or cuda:N"""
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    """auto is bf16 on a GPU that supports it, else float32"""
    fast: bool = True
    """on a GPU: fused kernels, steps recorded as CUDA graphs, images transformed on the GPU; false uses the plain twin
    of each"""
    out: str | None = None
    """folder to write to; default: pretrained/BACKBONE-DATA-SEED"""

    def check(self) -> None:
        for name, value in ALL_AT_ONCE.items():
            if getattr(self.stream, name) != value:
                raise OptionError(f"Pre-training learns all classes at once: remove {{group}}stream.{name}.")
        for name, instead in (("num_classes", "the data set sets it"), ("drop_path_rate", "set drop_path")):
            if name in self.backbone_options:
                raise OptionError(f"{{group}}backbone_options cannot contain '{name}': {instead}.")

    @property
    def data_name(self) -> str:
        """The data set's name, or that of the user's own folder or manifest."""
        own = self.stream.dataset in ("folders", "domain-folders", "manifest") and self.stream.root is not None
        return Path(str(self.stream.root)).stem if own else self.stream.dataset

    @property
    def folder(self) -> Path:
        return Path(self.out) if self.out else Path("pretrained") / f"{self.backbone}-{self.data_name}-{self.seed}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def as_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False)


def from_options(options: Mapping[str, Any]) -> PretrainConfig:
    """The complete configuration: the given options, with the defaults of pre-training for all others."""
    config = build(PretrainConfig, merge(PretrainConfig().as_dict(), nested(options)), from_text=True)
    if config.stream.root is None:
        if config.stream.dataset == "folders":
            raise UserError(
                "Name the images to train on: --stream.root DIR for your own, in DIR/train/CLASS and DIR/test/CLASS, "
                "or --stream.dataset NAME (`mambacl data list`)."
            )
        return config
    root = str(expanded(config.stream.root).absolute())  # so that it can be continued from any folder
    return dataclasses.replace(config, stream=dataclasses.replace(config.stream, root=root))
