"""The options of a stream of tasks. No PyTorch here: options are checked before it is imported."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mambacl.data.tasks import Tasks, is_file
from mambacl.files import expanded
from mambacl.options import Must, OptionError, Options, at_least, options_of, suggestion
from mambacl.scenarios import Scenario

Augment = Literal["none", "flip", "crop-flip", "resized-crop-flip", "autoaugment-cifar", "autoaugment-imagenet"]
CHANGES = ("resize", "interpolation", "augment", "augment_interpolation")
"""the options that can differ between covariances and evaluation"""
TEST_SHARE = 0.2


@dataclass(frozen=True)
class TransformConfig(Options):
    """How images become inputs."""

    image_size: Annotated[int | None, at_least(1)] = None
    """height and width of the model's input in pixels; the backbone's if empty"""
    resize: int | None = None
    """evaluation: resize to this size before the central crop; no crop if empty"""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """how images are resized"""
    augment: Augment = "none"
    """training: none, flip, crop-flip (padding of an eighth), resized-crop-flip (at least a quarter of the area),
    autoaugment-cifar, autoaugment-imagenet (then a random resized crop)"""
    augment_interpolation: Literal["nearest", "bilinear"] = "bilinear"
    """training: how autoaugment rotates, shears and shifts images; bilinear in the released code"""
    mean: Annotated[list[float] | None, Must("be three numbers", lambda mean: len(mean) == 3)] = None
    """mean of each channel, with pixels in 0..1; the backbone's if empty"""
    std: Annotated[
        list[float] | None, Must("be three positive numbers", lambda std: len(std) == 3 and min(std) > 0)
    ] = None
    """standard deviation of each channel, with pixels in 0..1; the backbone's if empty"""
    covariance: Literal["evaluation", "training"] | dict[str, Any] = "evaluation"
    """which images the covariances see: training images transformed as in evaluation (as the released code does) or as
    in training; or a mapping of resize, interpolation, augment and augment_interpolation that changes evaluation"""
    engine: Literal["auto", "torchvision", "batched"] = "auto"
    """torchvision transforms image by image on the CPU; batched transforms blocks of images on the run's device, with
    the same distributions; auto is batched on a GPU and torchvision on the CPU"""

    def check(self) -> None:
        if self.resize is not None and (self.image_size is None or self.resize < self.image_size):
            raise OptionError("{group}resize must be at least image_size: set both.")
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
        """The transforms of the images that the covariances see: its `augment` applies to them."""
        if self.covariance == "training":
            return dataclasses.replace(self, covariance="evaluation")
        changes = self.covariance if isinstance(self.covariance, dict) else {}
        return dataclasses.replace(self, **{"augment": "none", **changes, "covariance": "evaluation"})


@dataclass(frozen=True)
class StreamConfig(Options):
    """Which data, in which tasks."""

    dataset: str = "fashion-mnist-small"
    """name of a data set; `mambacl data list` lists them, and 'folders' is for your own images"""
    root: str | None = None
    """folder with the data set's files; for 'manifest', the file itself"""
    tasks: int | list[int] = 5
    """number of tasks, or the number of classes in each"""
    own_tasks: bool = False
    """use the tasks that the data set defines, as a manifest can, instead of `tasks`"""
    scenario: Scenario = "class"
    """class: the model chooses among all classes seen; task: it is told the task of each test image and chooses among
    that task's classes; domain: each domain of the data set is a task, with the same classes; few-shot: after the first
    task, each task brings `way` classes with `shot` images each"""
    first_task: int | None = None
    """number of classes in the first task; the other tasks share the rest (nearly) equally; few-shot: the base classes,
    about three fifths if empty"""
    way: Annotated[int, at_least(1)] = 5
    """few-shot: classes in each task after the first"""
    shot: Annotated[int, at_least(1)] = 5
    """few-shot: training images of each of these classes"""
    shot_seed: Annotated[int, at_least(0)] = 0
    """few-shot: seed of the choice of these images"""
    session_lists: str | None = None
    """few-shot: folder with a protocol's own lists, session_2.txt and so on, one training image per line by number or
    file name; these give classes and images, and session_1.txt, if there, those of the first task"""
    order: str | list[int] = "natural"
    """class order: natural, pilot, mamba-cl, coda-prompt, a list of all class numbers, or a file with one class per
    line; with domains, the order of the domains"""
    order_seed: int | None = None
    """seed of that order; the first seed of its code base if empty"""
    train_per_class: int | None = None
    """use only the first N training images per class, or per class and domain if domains are the tasks"""
    validation: Annotated[
        float | None, Must("be a share of the training images between 0 and 1", lambda share: 0 < share < 1)
    ] = None
    """hold back this share of each class's training images and evaluate on them instead of the test images"""
    test_share: Annotated[float, Must("be a share between 0 and 1", lambda share: 0 < share < 1)] = TEST_SHARE
    """share of each class's images that is held out for testing if 'folders' has no test folder; always the same
    images"""
    skip_bad: bool = False
    """leave out images that cannot be read; results.json and the report name them"""
    transforms: TransformConfig = field(default_factory=TransformConfig)
    """how images become inputs"""

    def check(self) -> None:
        if isinstance(self.order, str) and is_file(self.order):  # so that a run can be resumed from any folder
            object.__setattr__(self, "order", str(expanded(self.order).absolute()))
        if self.session_lists is not None:
            if not self.few_shot:
                raise OptionError("{group}session_lists needs {group}scenario few-shot: set both.")
            object.__setattr__(self, "session_lists", str(expanded(self.session_lists).absolute()))
        if self.few_shot and (self.own_tasks or isinstance(self.tasks, list)):
            raise OptionError(
                "With {group}scenario few-shot, the tasks follow from {group}first_task and {group}way: remove "
                "{group}own_tasks and sizes in {group}tasks."
            )
        if self.by_domain and (self.first_task is not None or isinstance(self.tasks, list)):
            raise OptionError(
                "With {group}scenario domain, each domain is a task with all classes: remove {group}first_task and "
                "sizes in {group}tasks."
            )

    @property
    def by_domain(self) -> bool:
        return self.scenario == "domain"

    @property
    def few_shot(self) -> bool:
        return self.scenario == "few-shot"

    @property
    def cut(self) -> tuple[Tasks, str | list[int], int | None, int | None]:
        """What makes the tasks: their number or sizes, the order, its seed, the first task. Few-shot tasks are the data
        set's own, because `open_data` has made them."""
        if self.few_shot:
            return "own", "natural", None, None
        return "own" if self.own_tasks else self.tasks, self.order, self.order_seed, self.first_task
