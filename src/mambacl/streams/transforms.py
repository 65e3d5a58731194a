"""From an image (uint8, 3 x h x w) to the model's input: for training, for evaluation, for the covariances.

Every random choice comes from a seed that belongs to the image and the pass, so that neither the number of workers nor
an interruption changes what the model sees.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as TF

from mambacl.errors import UserError
from mambacl.registry import did_you_mean

Augment = Literal["none", "flip", "crop-flip", "autoaugment-cifar", "autoaugment-imagenet"]
Step = dict[str, Any]  # one step of a transform, for a reader
CHANGES: dict[str, tuple[Any, ...]] = {  # what the covariances may have otherwise than evaluation, and its values
    "resize": (int, None),
    "interpolation": ("bicubic", "bilinear"),
    "augment": ("none", "flip", "crop-flip", "autoaugment-cifar", "autoaugment-imagenet"),
    "augment_interpolation": ("nearest", "bilinear"),
}


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
    augment_interpolation: Literal["nearest", "bilinear"] = "bilinear"
    """training: how autoaugment turns, shears and shifts images; the released code's is bilinear"""
    mean: list[float] | None = None
    """of each channel, with pixels in 0..1; the backbone's own if empty"""
    std: list[float] | None = None
    """as the mean"""
    covariance: Literal["evaluation", "training"] | dict[str, Any] = "evaluation"
    """what the covariances see: training images as in evaluation (the released code's way), as in training, or as in
    evaluation but for the resize, interpolation, augment or augment_interpolation given here"""
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
        if isinstance(self.covariance, dict):
            _check_changes(self.covariance)
            self.for_covariance()

    def for_covariance(self) -> "TransformConfig":
        """What the covariances see, as a configuration of its own: its `augment` is theirs."""
        if self.covariance == "training":
            return dataclasses.replace(self, covariance="evaluation")
        changes = self.covariance if isinstance(self.covariance, dict) else {}
        return dataclasses.replace(self, **{"augment": "none", **changes, "covariance": "evaluation"})


def _check_changes(changes: dict[str, Any]) -> None:
    where = "stream.transforms.covariance"
    for key, value in changes.items():
        if key not in CHANGES:
            raise UserError(
                f"There is no option '{where}.{key}'.{did_you_mean(key, CHANGES)} Known: {', '.join(CHANGES)}."
            )
        kinds = CHANGES[key]
        if value not in kinds and not (int in kinds and type(value) is int):
            words = ", ".join("a whole number" if kind is int else "null" if kind is None else kind for kind in kinds)
            raise UserError(f"{where}.{key} takes one of {words}, got '{value}'.")


class Transforms:
    """Built once; `train` and `evaluate` give float images, `normalize` takes a batch of them to the model's input."""

    def __init__(self, config: TransformConfig, image_size: int, mean: list[float], std: list[float]) -> None:
        self.config, self._backbone = config, (image_size, mean, std)
        self.size = config.image_size or image_size
        self.resize = config.resize or self.size
        self.mode = InterpolationMode(config.interpolation)
        self.mean = torch.tensor(config.mean or mean).view(1, 3, 1, 1)
        self.std = torch.tensor(config.std or std).view(1, 3, 1, 1)
        self.augment = _augmentation(config, self.size, self.mode)
        self.crops_itself = config.augment.startswith("autoaugment")
        self.engine = config.engine

    @cached_property
    def covariance(self) -> "Transforms":
        """What the covariances see: `train` of these where they augment, else `evaluate`."""
        return Transforms(self.config.for_covariance(), *self._backbone)

    def describe(self) -> dict[str, list[Step]]:
        """The steps of each transform, with the values that come from the backbone."""
        return {
            "training": self._steps(True),
            "evaluation": self._steps(False),
            "covariance": self.covariance._steps(True),
        }

    def _steps(self, training: bool) -> list[Step]:
        mode, augment = self.mode.value, self.config.augment if training else "none"
        if augment.startswith("autoaugment"):
            policy = augment.partition("-")[2]
            steps: list[Step] = [{"autoaugment": policy, "interpolation": self.config.augment_interpolation}]
            steps.append({"random_resized_crop": self.size, "interpolation": mode})
        else:
            steps = [{"resize": self.resize, "interpolation": mode}]
            steps += [{"central_crop": self.size}] if self.resize != self.size else []
            steps += [{"random_crop": self.size, "padding": self.size // 8}] if augment == "crop-flip" else []
            steps += [{"random_flip": 0.5}] if augment in ("flip", "crop-flip") else []
        mean, std = ([round(value, 6) for value in part.flatten().tolist()] for part in (self.mean, self.std))
        return [*steps, {"normalise": {"mean": mean, "std": std}}]

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


def _augmentation(config: TransformConfig, size: int, mode: InterpolationMode) -> Callable[[Tensor], Tensor] | None:
    name = config.augment
    if name == "none":
        return None
    if name == "flip":
        return v2.RandomHorizontalFlip()
    if name == "crop-flip":
        return v2.Compose([v2.RandomCrop(size, padding=size // 8), v2.RandomHorizontalFlip()])
    policy = {"autoaugment-cifar": v2.AutoAugmentPolicy.CIFAR10, "autoaugment-imagenet": v2.AutoAugmentPolicy.IMAGENET}
    crop = v2.RandomResizedCrop(size, interpolation=mode, antialias=True)
    return v2.Compose([v2.AutoAugment(policy[name], InterpolationMode(config.augment_interpolation)), crop])
