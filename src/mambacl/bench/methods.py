"""`mambacl bench methods`: what each method costs beside the frozen backbone, and how much of it its passes explain.

A step and an answer are measured as in a run: recorded as a CUDA graph where the method allows it. They take turns with
the frozen backbone's forward, and its forward and backward, whose time says what the method's passes alone would take.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.backbones import create_model
from mambacl.bench.models import free_memory, products
from mambacl.bench.passes import PassCounter, Passes
from mambacl.bench.result import Result, Row, quiet, shown
from mambacl.bench.timing import Clock
from mambacl.config import resolve
from mambacl.methods import METHODS
from mambacl.reports.rendering import pipe_table
from mambacl.training.build import build, pick_device
from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop
from mambacl.training.optimizers import make_optimizer
from mambacl.training.recipe import Recipe
from mambacl.training.recorded import CUDAGraphs, Recorded
from mambacl.training.step import WARM_UP, Recorder, TrainingStep, autocast

KIND, ANSWER = "methods", "test image"
VIT, MAMBA = "vit_nano", "defocus_mamba_nano"
OTHER = {VIT: MAMBA, MAMBA: VIT}
OPTIONS: dict[str, dict[str, Any]] = {"lgcl": {"stand_in": "random"}}  # that methods need
TASKS, EPOCHS, LIMIT, IN_A_ROW = 2, 10, 1.3, 5
BATCH = {"cuda": 100, "cpu": 8}
NOTES = (
    "{batch} images of {size} pixels in {precision}, in the second of {tasks} tasks; of methods that train only in the "
    "first, a step of that. / forward: as a multiple of the frozen backbone's forward without gradients.",
    "passes: through the backbone. Their work is counted in the linear layers of its blocks, so prompt tokens count, "
    "and is 1 for one pass without them: forward only; through, with a backward pass to the images; training, with "
    "gradients of weights. by passes: the time of that much work in the frozen backbone's forward, its forward and "
    f"backward to the images, and a step of fine-tuning. above {LIMIT}: more than {LIMIT} times that.",
)


class Plain:
    """A backbone as a method. Its step trains all weights, or, if `frozen`, only carries a gradient to the images."""

    def __init__(self, model: nn.Module, device: torch.device, bf16: bool, frozen: bool) -> None:
        self.model, self.device, self.bf16 = model.eval().requires_grad_(not frozen), device, bf16
        self.shift = nn.Parameter(torch.zeros(1, 3, 1, 1, device=device))
        trained = [self.shift] if frozen else list(model.parameters())
        groups: list[dict[str, Any]] = [{"params": trained, "lr": 0.0, "base_lr": 0.0}]
        optimizer = make_optimizer(Recipe(), groups, device if device.type == "cuda" else None)
        self.step = TrainingStep(self, optimizer, device, bf16, graphs=True)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(images + self.shift).float().mean(), torch.zeros((), dtype=torch.int64, device=self.device)

    def taking_steps(self, images: Tensor, labels: Tensor) -> Callable[[], object]:
        step = partial(self.step, images, labels, 1.0)
        warm_up(step, self.device)
        return step

    def answering(self, images: Tensor) -> Callable[[], object]:
        return partial(answering(self.model, self.device, self.bf16, Recorder(self.device)), images)


def answering(
    call: Callable[[Tensor], Tensor], device: torch.device, bf16: bool, recorder: Recorder | None
) -> Callable[[Tensor], Tensor]:
    """A function of images as the evaluation of a run calls it; recorded if there is a recorder and a GPU."""

    @torch.no_grad()
    def plain(images: Tensor) -> Tensor:
        with autocast(device, bf16):
            return call(images)

    if recorder is None or device.type != "cuda":
        return plain
    recorded = Recorded(plain, tuple, record=CUDAGraphs(recorder))
    return torch.no_grad()(recorded.__call__)


def warm_up(step: Callable[[], object], device: torch.device) -> None:
    """Takes steps until one is recorded, which needs a low peak of memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARM_UP + 1):
        step()


@quiet(logging.WARNING)
def measure(
    names: Sequence[str], backbone: str, device: str, batch: int | None, repeats: int = 12, budget: float = 0.8
) -> Result:
    """`names`: of methods, all if empty. One that cannot work on the backbone is measured on the other kind's nano."""
    clock = Clock(pick_device(device), repeats, budget)
    count = batch or BATCH[clock.device.type]
    for name in names:
        METHODS.check(name)
    result = Result(f"Methods on {clock.device.type}", kind=KIND)
    said: dict[str, Any] = {}
    left_out = []
    for name in names or METHODS.names():
        problems = []
        for place in dict.fromkeys((backbone, OTHER.get(backbone, VIT))):
            try:
                with TemporaryDirectory() as folder:
                    result.rows += _rows(clock, name, place, count, Path(folder), said)
                break
            except Exception as error:  # one method that fails does not cost the others' figures
                problems.append(f"{type(error).__name__}: {error}")
        else:
            left_out.append(f"{name} could not be measured: {problems[0]}")
        free_memory()
    result.notes = [note.format(batch=count, tasks=TASKS, **said) for note in NOTES if said] + left_out
    return result


def _rows(clock: Clock, name: str, backbone: str, batch: int, folder: Path, said: dict[str, Any]) -> list[Row]:
    stream = {"dataset": "fashion-mnist-small", "tasks": 5, "train_per_class": 10}
    given = {"method": name, "backbone": backbone, "stream": stream, "device": str(clock.device), "out": str(folder)}
    training = {"passes": EPOCHS, "batch_size": 10, "schedule": "constant"}
    config = resolve(given, {"training": training, "options": OPTIONS.get(name, {}), "pretrained": False})
    parts = build(config)
    size, bf16 = parts.stream.transforms.size, clock.device.type == "cuda"
    said.update(size=size, precision="bf16" if bf16 else "float32")
    loop = parts.loop(RunFolder(folder))
    loop.bf16 = bf16
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1)).to(clock.device)
    labels = torch.zeros(batch, dtype=torch.int64, device=clock.device)
    with torch.device(clock.device):
        frozen, tuned = (
            Plain(create_model(backbone, num_classes=0), clock.device, bf16, frozen) for frozen in (True, False)
        )
    counter = PassCounter(frozen.model, images)
    rows: list[Row] = []

    def row(what: str, found: Passes, call: Callable[[], object]) -> Row:
        calls = {"own": call, "forward": frozen.answering(images)}
        if found.through:
            calls["through"] = frozen.taking_steps(images, labels)
        if found.training:
            calls["training"] = tuned.taking_steps(images, labels)
        seconds = clock.in_turn(calls, IN_A_ROW)
        forward, own = seconds["forward"], seconds["own"]
        explained = sum(getattr(found, kind) * seconds[kind] for kind in calls if kind != "own")
        return {
            "method": name, "backbone": backbone, "what": what, "ms": 1e3 * own, "/_forward": own / forward,
            "passes": found.passes, "forward": found.forward, "through": found.through, "training": found.training,
            "by_passes": explained / forward, "measured_/_by_passes": own / explained,
            f"above_{LIMIT}": "!" if own > LIMIT * explained else "",
        }  # fmt: skip

    with products("bf16" if bf16 else "float32"):
        for phase, step, last in _steps(loop, images):
            if last:
                passes = counter.count(loop.method.model, step)
                warm_up(step, clock.device)
                rows.append(row(f"step{phase}", passes, step))
                if clock.device.type == "cuda":
                    rows[-1]["recorded"] = getattr(loop.step, "_recorded", None) is not None
        method = loop.method
        passes = counter.count(method.model, partial(answering(method.answer, clock.device, bf16, None), images))
        answer = answering(method.answer, clock.device, bf16, loop.recorder if method.recordable else None)
        rows.append(row(ANSWER, passes, partial(answer, images)))
    return rows


def _steps(loop: Loop, images: Tensor) -> Iterator[tuple[str, partial[None], bool]]:
    """Goes through the first tasks of a run with one step per phase: the phase, the step, and whether this is the last
    task that trains. A step can be taken more often."""
    method, stream = loop.method, loop.stream
    for task in range(TASKS):
        loop._start_task(task)
        last = task == (0 if method.first_task_only else TASKS - 1)
        first, classes = stream.first_label(task), len(stream.tasks[task])
        labels = first + torch.arange(len(images), device=images.device) % classes
        seen = set()
        for epoch in range(EPOCHS * method.trains_in(task)):
            loop._enter_phase(epoch)
            method.start_epoch(epoch, partial(stream.train_batches, task, epoch, loop.recipe.batch_size))
            loop._enter_phase(epoch)  # which `start_epoch` may have decided
            phase = method.current
            if phase in seen or phase.roles == ():  # the same phase goes on, or nothing trains
                continue
            seen.add(phase)
            assert loop.step is not None
            step = partial(loop.step, images, labels, 1.0)
            step()
            yield f", {phase.name}" if phase.name else "", step, last
        loop.optimizer = loop.step = None
        loop._consolidate(task)


def markdown(record: Mapping[str, Any]) -> str:
    """A line with command, commit, machine and date; a table with a row per method: its slowest step and its answer."""
    methods: dict[tuple[str, str], dict[bool, Row]] = {}
    for row in record["rows"]:
        found, trains = methods.setdefault((row["method"], row["backbone"]), {}), row["what"] != ANSWER
        if trains not in found or row["ms"] > found[trains]["ms"]:
            found[trains] = row
    lines = [
        [f"`{method}`", backbone, *(cell for trains in (True, False) for cell in _cells(found.get(trains)))]
        for (method, backbone), found in methods.items()
    ]
    head = ["method", "backbone", "step / forward", "passes", "/ passes", "answer / forward", "passes", "/ passes"]
    machine, options = record["machine"], record["options"]
    words = ["`mambacl bench methods`", *([f"commit {record['commit']}"] if record.get("commit") else [])]
    words.append(str(machine.get("cpu", machine["device"]) if options["device"] == "cpu" else machine["device"]))
    words += [f"{machine['threads']} threads, {machine['vectors']}"] if options["device"] == "cpu" else []
    words += [f"PyTorch {record['versions']['torch']}", record["date"][:10]]
    return "; ".join(words) + f".\n\n{pipe_table(head, lines)}"


def _cells(row: Row | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    return [str(shown(float(row[name]))) for name in ("/_forward", "passes", "measured_/_by_passes")]
