"""From an image (uint8, 3 x h x w) to the model's input, for training and for evaluation.

Every random choice comes from a seed that belongs to the image and the pass, so that neither the number of workers nor
an interruption changes what the model sees.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as TF

from mambacl.errors import UserError

Augment = Literal["none", "flip", "crop-flip", "autoaugment-cifar", "autoaugment-imagenet"]


@dataclass(frozen=True)
class TransformConfig:
    """How images become inputs."""

    image_size: int | None = None
    """height and width in pixels of the model's input; the backbone's own if empty"""
    resize: int | None = None
    """evaluation: resize to this before the central crop; the image size itself (no crop) if empty"""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """how images are resized"""
    augment: Augment = "none"
    """training: none, flip, crop-flip (padding of an eighth), autoaugment-cifar, autoaugment-imagenet (then a random
    resized crop)"""
    mean: list[float] | None = None
    """of each channel, with pixels in 0..1; the backbone's own if empty"""
    std: list[float] | None = None
    """as the mean"""
    covariance: Literal["evaluation"] = "evaluation"
    """what the covariances see: training images as in evaluation. The paper and its code know no other way, nor does
    mambacl; it is named so that a run's configuration says it"""
    engine: Literal["auto", "torchvision", "batched"] = "auto"
    """who transforms: torchvision, image by image on the CPU; batched, whole blocks of images on the run's device, with
    the same distributions; auto: batched on a GPU, torchvision on the CPU"""

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise UserError(f"image_size must be positive, got {self.image_size}.")
        if self.resize is not None and (self.image_size is None or self.resize < self.image_size):
            raise UserError("resize must be at least image_size, which must be given with it.")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and (len(values) != 3 or (name == "std" and min(values) <= 0)):
                raise UserError(f"{name} must be three numbers (those of std positive), got {values}.")


class Transforms:
    """Built once; `train` and `evaluate` give float images, `normalize` takes a batch of them to the model's input."""

    def __init__(self, config: TransformConfig, image_size: int, mean: list[float], std: list[float]) -> None:
        self.size = config.image_size or image_size
        self.resize = config.resize or self.size
        self.mode = InterpolationMode(config.interpolation)
        self.mean = torch.tensor(config.mean or mean).view(1, 3, 1, 1)
        self.std = torch.tensor(config.std or std).view(1, 3, 1, 1)
        self.augment = _augmentation(config.augment, self.size, self.mode)
        self.crops_itself = config.augment.startswith("autoaugment")
        self.engine = config.engine

    def evaluate(self, image: Tensor) -> Tensor:
        return TF.center_crop(self._resized(image, self.resize), [self.size, self.size])

    def train(self, image: Tensor, seed: int) -> Tensor:
        if self.augment is None:
            return self.evaluate(image)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.augment(image if self.crops_itself else self.evaluate(image))

    def normalize(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self.mean) / self.std

    def _resized(self, image: Tensor, size: int) -> Tensor:
        if image.shape[-2:] == (size, size):
            return image
        return TF.resize(image, [size, size], interpolation=self.mode, antialias=True)


def _augmentation(name: Augment, size: int, mode: InterpolationMode) -> Callable[[Tensor], Tensor] | None:
    if name == "none":
        return None
    if name == "flip":
        return v2.RandomHorizontalFlip()
    if name == "crop-flip":
        return v2.Compose([v2.RandomCrop(size, padding=size // 8), v2.RandomHorizontalFlip()])
    policy = {"autoaugment-cifar": v2.AutoAugmentPolicy.CIFAR10, "autoaugment-imagenet": v2.AutoAugmentPolicy.IMAGENET}
    crop = v2.RandomResizedCrop(size, interpolation=mode, antialias=True)
    return v2.Compose([v2.AutoAugment(policy[name]), crop])
