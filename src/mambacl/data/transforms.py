"""Turns an image (uint8, 3 x h x w) into the model's input: for training, evaluation and the covariances.

Every random choice comes from a seed of the image and the pass, so that neither the number of workers nor an
interruption changes what the model sees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mambacl.data.config import TransformConfig

if TYPE_CHECKING:
    from torchvision.transforms import InterpolationMode

Step = dict[str, Any]  # one step of a transform, for stream.json
CROP_AREA = (0.25, 1.0)  # of resized-crop-flip, as shares of the image


class Transforms:
    """`train` and `evaluate` transform an image; `normalize` turns a batch of them into the model's input.

    torchvision is imported on first use, because that takes seconds and the batched engine rarely needs it.
    """

    @classmethod
    def of_model(cls, config: TransformConfig, model: Any) -> Transforms:
        """With the size, mean and deviation that the backbone names in timm's `default_cfg`."""
        data = model.default_cfg
        return cls(config, data["input_size"][-1], list(data["mean"]), list(data["std"]))

    def __init__(self, config: TransformConfig, image_size: int, mean: list[float], std: list[float]) -> None:
        self.config, self._backbone = config, (image_size, mean, std)
        self.size = config.image_size or image_size
        self.resize = config.resize or self.size
        self.mean = torch.tensor(config.mean or mean).view(1, 3, 1, 1)
        self.std = torch.tensor(config.std or std).view(1, 3, 1, 1)
        self.augments, self.uses_autoaugment = config.augment != "none", config.augment.startswith("autoaugment")
        self.resizes_crops = config.augment == "resized-crop-flip"
        self.padding = self.size // 8 if config.augment == "crop-flip" else 0
        self.engine = config.engine

    @cached_property
    def mode(self) -> InterpolationMode:
        from torchvision.transforms import InterpolationMode

        return InterpolationMode(self.config.interpolation)

    @cached_property
    def augment(self) -> Callable[[Tensor], Tensor] | None:
        from torchvision.transforms import InterpolationMode, v2

        name = self.config.augment
        if name == "none":
            return None
        if name == "flip":
            return v2.RandomHorizontalFlip()
        if name == "crop-flip":
            return v2.Compose([v2.RandomCrop(self.size, padding=self.padding), v2.RandomHorizontalFlip()])
        if name == "resized-crop-flip":
            resized = v2.RandomResizedCrop(self.size, scale=CROP_AREA, interpolation=self.mode, antialias=True)
            return v2.Compose([resized, v2.RandomHorizontalFlip()])
        policy = v2.AutoAugmentPolicy.CIFAR10 if name == "autoaugment-cifar" else v2.AutoAugmentPolicy.IMAGENET
        crop = v2.RandomResizedCrop(self.size, interpolation=self.mode, antialias=True)
        return v2.Compose([v2.AutoAugment(policy, InterpolationMode(self.config.augment_interpolation)), crop])

    @cached_property
    def covariance(self) -> Transforms:
        """The transforms for the covariances, which use `train` if they augment and `evaluate` otherwise."""
        return Transforms(self.config.for_covariance(), *self._backbone)

    def describe(self) -> dict[str, list[Step]]:
        """The steps of each transform, including values that come from the backbone."""
        return {
            "training": self._steps(True),
            "evaluation": self._steps(False),
            "covariance": self.covariance._steps(True),
        }

    def _steps(self, training: bool) -> list[Step]:
        mode, augment = self.config.interpolation, self.config.augment if training else "none"
        if augment.startswith("autoaugment"):
            policy = augment.partition("-")[2]
            steps: list[Step] = [{"autoaugment": policy, "interpolation": self.config.augment_interpolation}]
            steps.append({"random_resized_crop": self.size, "interpolation": mode})
        elif augment == "resized-crop-flip":
            steps = [{"random_resized_crop": self.size, "interpolation": mode, "area": list(CROP_AREA)}]
            steps += [{"random_flip": 0.5}]
        else:
            steps = [{"resize": self.resize, "interpolation": mode}]
            steps += [{"central_crop": self.size}] if self.resize != self.size else []
            steps += [{"random_crop": self.size, "padding": self.padding}] if augment == "crop-flip" else []
            steps += [{"random_flip": 0.5}] if augment in ("flip", "crop-flip") else []
        mean, std = ([round(value, 6) for value in part.flatten().tolist()] for part in (self.mean, self.std))
        return [*steps, {"normalise": {"mean": mean, "std": std}}]

    def evaluate(self, image: Tensor) -> Tensor:
        return self.cropped(self.resized(image))

    def resized(self, image: Tensor) -> Tensor:
        from torchvision.transforms.v2 import functional as TF

        if image.shape[-2:] == (self.resize, self.resize):
            return image
        return TF.resize(image, [self.resize, self.resize], interpolation=self.mode, antialias=True)

    def cropped(self, images: Tensor) -> Tensor:
        """The centre of resized images."""
        edge = round((self.resize - self.size) / 2)
        return images[..., edge : edge + self.size, edge : edge + self.size]

    def train(self, image: Tensor, seed: int) -> Tensor:
        if self.augment is None:
            return self.evaluate(image)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed GPUs as well, and is slow
            return self.augment(image if self.uses_autoaugment or self.resizes_crops else self.evaluate(image))

    def normalize(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self.mean) / self.std
