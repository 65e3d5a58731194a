"""`mambacl bench settings`: a training step after consolidated tasks, in plain fine-tuning, `public-code` and `exact`.

The covariances come from the packaged images, so `energy:0.99` protects as many directions as in a run. Ranks differ
between tasks. If that compiles kernels again, `first steps s` shows it: the seconds of a new optimizer's steps until
one is recorded, before the first task and after each.
"""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from mambacl.backbones import create_model
from mambacl.bench.models import CLASSES, make_loop, new_step, products
from mambacl.bench.result import Result, quiet
from mambacl.bench.timing import Clock
from mambacl.data import StreamConfig, TransformConfig, open_stream
from mambacl.nullspace import Setting
from mambacl.nullspace.settings import setting_named
from mambacl.training.build import pick_device
from mambacl.training.step import WARM_UP

PUBLIC = "public-code"
SETTINGS: dict[str, tuple[str, Setting]] = {
    "sequential": ("sequential", setting_named(PUBLIC)),
    PUBLIC: ("mamba-cl", setting_named(PUBLIC)),
    "exact energy:0.99": ("mamba-cl", setting_named("exact").override(rank="energy:0.99")),
}
PIXELS, TASKS, COVARIANCE_BATCH, IN_A_ROW = 32, 5, 100, 5
NOTES = (
    "The nano model with {batch} images in {precision}, after {tasks} consolidated tasks; all settings take turns. "
    "first steps s: until a step is recorded, before the first task and after each.",
)


@quiet(logging.WARNING)
def measure(
    device: str, batch: int, precision: str, tasks: int, images: int, repeats: int = 50, budget: float = 5.0
) -> Result:
    """`images`: per task, for the covariances."""
    clock = Clock(pick_device(device), repeats, budget)
    transforms = TransformConfig(image_size=PIXELS)
    stream = open_stream(
        StreamConfig(tasks=TASKS, transforms=transforms), PIXELS, [0.5] * 3, [0.5] * 3, 0, 0, clock.device
    )
    seen = []
    for task in range(tasks):
        batches = [some.to(clock.device) for some, _ in stream.plain_batches(task, COVARIANCE_BATCH)]
        seen.append(torch.cat(batches)[:images].split(COVARIANCE_BATCH))
    steppers: dict[str, Stepper] = {}
    first: dict[str, list[float]] = {}
    with products(precision):
        for name, (method, setting) in SETTINGS.items():
            steppers[name] = Stepper(clock, method, setting, precision == "bf16", batch)
            first[name] = [steppers[name].first_steps(), *(steppers[name].after_task(some) for some in seen)]
        seconds = clock.in_turn(steppers, IN_A_ROW)
    words = {"batch": batch, "precision": precision, "tasks": tasks}
    result = Result(f"Training step by setting on {clock.device.type}", notes=[note.format(**words) for note in NOTES])
    for name, value in seconds.items():
        ratio, firsts = value / seconds[PUBLIC], " ".join(f"{each:.2f}" for each in first[name])
        result.rows.append({"step": name, "ms": 1e3 * value, f"/_{PUBLIC}": ratio, "first_steps_s": firsts})
    return result


class Stepper:
    """Takes steps of a method on the same images, with a new optimizer per task."""

    def __init__(self, clock: Clock, method: str, setting: Setting, bf16: bool, batch: int) -> None:
        torch.manual_seed(0)
        model = create_model("defocus_mamba_nano", num_classes=0, pretrained="tin32-39ep").eval().to(clock.device)
        self.clock, self.loop = clock, make_loop(method, model, setting, bf16=bf16)
        self.images = torch.randn(batch, 3, PIXELS, PIXELS, device=clock.device)
        self.labels = torch.arange(batch, device=clock.device) % CLASSES

    def __call__(self) -> None:
        self.step()

    def after_task(self, images: Iterable[Tensor]) -> float:
        self.loop.method.finish_task([(some, some) for some in images])
        return self.first_steps()

    def first_steps(self) -> float:
        """Seconds of a new optimizer's steps until one is recorded and replayed."""
        self.step = new_step(self.loop, self.images, self.labels)
        seconds = (WARM_UP + 2) * self.clock.once(self, WARM_UP + 2)
        if self.images.is_cuda and getattr(self.step.func, "_recorded", None) is None:
            raise RuntimeError("The step was not recorded.")
        return seconds
