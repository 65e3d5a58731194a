"""What a stream of tasks is configured by. Without PyTorch: options are checked before it is loaded."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from mambacl.errors import UserError
from mambacl.paths import expanded
from mambacl.registry import did_you_mean
from mambacl.scenarios import SCENARIOS, Scenario
from mambacl.streams.orders import is_file

Augment = Literal["none", "flip", "crop-flip", "autoaugment-cifar", "autoaugment-imagenet"]
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


@dataclass(frozen=True)
class StreamConfig:
    """Which data, in which tasks."""

    dataset: str = "fashion-mnist-small"
    """name of a data set, as `mambacl data list` prints them; 'folders' for your own images"""
    root: str | None = None
    """folder with the data set's files; of 'manifest' the file itself"""
    tasks: int | list[int] = 5
    """number of tasks, or the number of classes in each"""
    own_tasks: bool = False
    """the tasks that the data set itself names, as a manifest can, in place of `tasks`"""
    scenario: Scenario = "class"
    """class: a test image may be of any class seen; task: the task of a test image is known, and only its classes
    compete; domain: every domain of the data set is a task, with the same classes"""
    first_task: int | None = None
    """classes in the first task, where the others are of (nearly) equal size"""
    order: str | list[int] = "natural"
    """class order: natural, pilot, mamba-cl, coda-prompt, a list of all class numbers, or a file with one class a
    line; of domains, their order"""
    order_seed: int | None = None
    """seed of that order; the one its code base starts from if empty"""
    train_per_class: int | None = None
    """use only the first so many training images of each class, in each domain where these are the tasks"""
    validation: float | None = None
    """evaluate on this share of each class's training images, held back from training, and not on the test images"""
    skip_bad: bool = False
    """leave out images that cannot be read; results.json and the report name them"""
    transforms: TransformConfig = field(default_factory=TransformConfig)
    """how images become inputs"""

    def __post_init__(self) -> None:
        if isinstance(self.order, str) and is_file(self.order):  # so that a run can be continued from any folder
            object.__setattr__(self, "order", str(expanded(self.order).absolute()))
        if self.validation is not None and not 0 < self.validation < 1:
            raise UserError(f"validation is a share of the training images between 0 and 1, got {self.validation}.")
        if self.scenario not in SCENARIOS:
            raise UserError(f"stream.scenario is one of {', '.join(SCENARIOS)}, got '{self.scenario}'.")
        if self.by_domain and (self.first_task is not None or isinstance(self.tasks, list)):
            raise UserError(
                "With stream.scenario domain each domain is a task with all classes: leave stream.first_task and sizes "
                "in stream.tasks out."
            )

    @property
    def by_domain(self) -> bool:
        return self.scenario == "domain"
