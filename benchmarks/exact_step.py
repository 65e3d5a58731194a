"""A training step of the nano model after a consolidated task: plain fine-tuning, `public-code`, and `exact`.

    python benchmarks/exact_step.py [--batch 200] [--precision bf16] [--tasks 3]

Spectra are those of the packaged images, so that `energy:0.99` protects as many directions as in a run. `first steps`:
seconds until a step is recorded, task after task. Each task has other ranks; a kernel that is compiled again for them
shows there. The last table is of steps in turn after the last task, in one process.
"""

import argparse
import logging
import time

import torch

from mambacl.backbones import create_model
from mambacl.bench.models import CLASSES, make_loop, products
from mambacl.bench.timing import Clock
from mambacl.log import logger
from mambacl.nullspace import Setting
from mambacl.nullspace.projected_step import ProjectedParts
from mambacl.nullspace.settings import setting_named
from mambacl.streams import StreamConfig, TransformConfig, open_stream
from mambacl.training.step import WARM_UP

SETTINGS: dict[str, tuple[str, Setting]] = {
    "sequential": ("sequential", setting_named("public-code")),
    "public-code": ("mamba-cl", setting_named("public-code")),
    "exact energy:0.99": ("mamba-cl", setting_named("exact").override(rank="energy:0.99")),
}
PIXELS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--precision", choices=("float32", "tf32", "bf16"), default="bf16")
    parser.add_argument("--tasks", type=int, default=3, help="consolidated one after the other, of the five there are")
    parser.add_argument("--images", type=int, default=500, help="of each task, for the covariances")
    given = parser.parse_args()
    logger.setLevel(logging.WARNING)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transforms = TransformConfig(image_size=PIXELS)
    stream = open_stream(StreamConfig(transforms=transforms), PIXELS, [0.5] * 3, [0.5] * 3, 0, 0, device)
    steps: dict[str, Stepper] = {}
    with products(given.precision):
        for name, (method, setting) in SETTINGS.items():
            step = Stepper(method, setting, device, given.precision == "bf16", given.batch)
            first = [step.first_steps()]
            for task in range(given.tasks):
                batches = [images.to(device) for images, _ in stream.plain_batches(task, 100)]
                kept = torch.cat(batches)[: given.images].split(100)
                step.loop.method.finish_task([(images, images) for images in kept])
                first.append(step.first_steps())
            print(f"{name:18} first steps, s: {' '.join(f'{s:.2f}' for s in first)}{step.projections()}", flush=True)
            steps[name] = step
        clock = Clock(device, 50, 5.0)
        seconds = clock.in_turn(steps, 5)
    print(f"\n{'step':18} {'ms':>8} {'/ public-code':>14}")
    for name, value in seconds.items():
        print(f"{name:18} {1e3 * value:8.2f} {value / seconds['public-code']:14.2f}")


class Stepper:
    """Steps of a method on the same images, with a new optimizer for each task."""

    def __init__(self, method: str, setting: Setting, device: torch.device, bf16: bool, batch: int) -> None:
        torch.manual_seed(0)
        model = create_model("defocus_mamba_nano", num_classes=0, pretrained=True).eval().to(device)
        self.loop = make_loop(method, model, setting, bf16=bf16)
        self.images = torch.randn(batch, 3, PIXELS, PIXELS, device=device)
        self.labels = torch.arange(batch, device=device) % CLASSES

    def __call__(self) -> None:
        assert self.loop.step is not None
        self.loop.step(self.images, self.labels, 1.0)

    def first_steps(self) -> float:
        """Seconds of a new optimizer's steps until one is recorded and replayed."""
        self.loop._new_optimizer()
        self.loop._new_step()
        started = time.perf_counter()
        for _ in range(WARM_UP + 2):
            self()
        if self.images.is_cuda:
            torch.cuda.synchronize(self.images.device)
            assert self.loop.step is not None and self.loop.step._recorded is not None, "the step was not recorded"
        return time.perf_counter() - started

    def projections(self) -> str:
        space = getattr(self.loop.method, "space", None)
        constraints = [] if space is None else space.projected_step.constraints
        found = [constraint for constraint in constraints if isinstance(constraint, ProjectedParts)]
        if not found:
            return ""
        bases = {id(one.bases): tuple(one.bases.basis.shape[-2:]) for one in found}
        return f"; {len(found)} batched projections, of bases {list(bases.values())}"


if __name__ == "__main__":
    main()
