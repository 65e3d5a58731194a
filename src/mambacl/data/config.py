"""What a stream of tasks is configured by. Without PyTorch: options are checked before it is loaded."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mambacl.data.tasks import is_file
from mambacl.files import expanded
from mambacl.options import Must, OptionError, Options, at_least, options_of, suggestion
from mambacl.scenarios import Scenario

Augment = Literal["none", "flip", "crop-flip", "autoaugment-cifar", "autoaugment-imagenet"]
CHANGES = ("resize", "interpolation", "augment", "augment_interpolation")
"""what the covariances may have otherwise than evaluation"""


@dataclass(frozen=True)
class TransformConfig(Options):
    """How images become inputs."""

    image_size: Annotated[int | None, at_least(1)] = None
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
    mean: Annotated[list[float] | None, Must("be three numbers", lambda mean: len(mean) == 3)] = None
    """of each channel, with pixels in 0..1; the backbone's own if empty"""
    std: Annotated[
        list[float] | None, Must("be three positive numbers", lambda std: len(std) == 3 and min(std) > 0)
    ] = None
    """as the mean"""
    covariance: Literal["evaluation", "training"] | dict[str, Any] = "evaluation"
    """what the covariances see: training images as in evaluation (the released code's way), as in training, or as in
    evaluation but for the resize, interpolation, augment or augment_interpolation given here"""
    engine: Literal["auto", "torchvision", "batched"] = "auto"
    """who transforms: torchvision, image by image on the CPU; batched, whole blocks of images on the run's device, with
    the same distributions; auto: batched on a GPU, torchvision on the CPU"""

    def check(self) -> None:
        if self.resize is not None and (self.image_size is None or self.resize < self.image_size):
            raise OptionError("{group}resize must be at least image_size, which must be given with it.")
        if isinstance(self.covariance, dict):
            try:
                for key, value in self.covariance.items():
                    if key not in CHANGES:
                        hint = suggestion(key, CHANGES, "{group}")
                        raise OptionError(f"There is no option '{{group}}{key}'.{hint} Known: {', '.join(CHANGES)}.")
                    options_of(TransformConfig)[key].check(value)
                self.for_covariance()
            except OptionError as error:
                raise error.inside("covariance") from None

    def for_covariance(self) -> "TransformConfig":
        """What the covariances see, as a configuration of its own: its `augment` is theirs."""
        if self.covariance == "training":
            return dataclasses.replace(self, covariance="evaluation")
        changes = self.covariance if isinstance(self.covariance, dict) else {}
        return dataclasses.replace(self, **{"augment": "none", **changes, "covariance": "evaluation"})


@dataclass(frozen=True)
class StreamConfig(Options):
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
    validation: Annotated[
        float | None, Must("be a share of the training images between 0 and 1", lambda share: 0 < share < 1)
    ] = None
    """evaluate on this share of each class's training images, held back from training, and not on the test images"""
    skip_bad: bool = False
    """leave out images that cannot be read; results.json and the report name them"""
    transforms: TransformConfig = field(default_factory=TransformConfig)
    """how images become inputs"""

    def check(self) -> None:
        if isinstance(self.order, str) and is_file(self.order):  # so that a run can be continued from any folder
            object.__setattr__(self, "order", str(expanded(self.order).absolute()))
        if self.by_domain and (self.first_task is not None or isinstance(self.tasks, list)):
            raise OptionError(
                "With {group}scenario domain each domain is a task with all classes: leave {group}first_task and sizes "
                "in {group}tasks out."
            )

    @property
    def by_domain(self) -> bool:
        return self.scenario == "domain"
