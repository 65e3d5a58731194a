"""Steps of several processes that are recorded: two graphs and one exchange of gradients between them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import on_ranks
from several_processes_help import TERMS
from small_run import CONFIG
from tolerance import assert_near
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mambacl import processes
from mambacl.backbones import create_model
from mambacl.methods import METHODS, Setup, Task
from mambacl.nullspace.settings import setting_named
from mambacl.training import step as step_module
from mambacl.training.exchange import ALIGNED, Buffers
from mambacl.training.optimizers import make_optimizer
from mambacl.training.recipe import Recipe
from mambacl.training.step import WARM_UP, TrainingStep

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
SIZES = [7] * (WARM_UP + 2) + [5, 7, 5, 7]  # of whole batches: processes have parts of unequal sizes
REPLAYED = 4  # of them: those of 7 images after the warm-up, from the first that is recorded on


class Replays:
    """Records nothing and runs the work in each replay, as a graph would; recording itself changes nothing."""

    def __init__(self) -> None:
        self.works = 0
        self.replayed = 0

    def record(self, work: Callable[[], object], needed: int) -> "Replay":
        self.works += 1
        return Replay(self, work)


class Replay:
    def __init__(self, recorder: Replays, work: Callable[[], object]) -> None:
        self.recorder, self.work = recorder, work

    def replay(self) -> None:
        self.recorder.replayed += 1
        self.work()


class CannotRecord(Replays):
    """In one of the processes only."""

    def record(self, work: Callable[[], object], needed: int) -> Replay:
        if processes.rank() == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(work, needed)


class Toy(nn.Module):
    """One layer that all processes use, one that only the first uses, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.some, self.none = nn.Linear(12, 4), nn.Linear(12, 4), nn.Linear(12, 4)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = images.flatten(1)
        logits = self.layer(x) if processes.rank() else self.layer(x) + self.some(x)
        return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).sum()


def toy(device: torch.device, clip: float, accumulate: int, recorder: Any, graphs: bool) -> tuple[Any, list[Tensor]]:
    model = Toy().to(device)
    groups: Any = [{"params": list(model.parameters()), "lr": 0.1, "base_lr": 0.1}]
    optimizer: torch.optim.Optimizer
    if device.type == "cuda":
        optimizer = make_optimizer(Recipe(), groups, device)
    else:  # rates that are tensors, which all recorded steps need
        groups[0]["lr"] = torch.tensor(0.1)
        optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1)
    step = TrainingStep(model, optimizer, device, False, graphs, recorder, clip, accumulate)
    take(step, 12)
    return step, list(model.parameters())


def method(name: str, device: torch.device, recorder: Any, graphs: bool) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    model = create_model("defocus_mamba", num_classes=0, **CONFIG["backbone_options"]).to(device).eval()
    learner = METHODS.get(name)(model, Setup(setting_named("exact").override(rank="energy:0.9")))
    learner.start_task(Task(0, 4, 0, 1))
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    learner.finish_task([(images.to(device), torch.arange(8) % 4)])
    learner.start_task(Task(1, 4, 4, 2))
    roles = learner.named_parameters().values()
    groups = [{"params": [p for _, p in named], "lr": 0.01, "base_lr": 0.01} for named in roles]
    made = make_optimizer(Recipe(), groups, device if device.type == "cuda" else None)
    if device.type == "cpu":
        for group in made.param_groups:
            group["lr"] = torch.tensor(0.01)
    step = TrainingStep(learner, learner.wrap(made), device, False, graphs, recorder)
    take(step, 3 * 16 * 16, first_label=4)
    return step, [p for named in roles for _, p in named]


def take(step: TrainingStep, values: int, first_label: int = 0) -> None:
    generator = torch.Generator().manual_seed(1)
    for number, size in enumerate(SIZES):
        side = int((values / 3) ** 0.5)
        images, labels = torch.randn(size, 3, side, side, generator=generator), first_label + torch.arange(size) % 4
        own = processes.part(size)
        step(images[own], labels[own], 1.0 if number < 4 else 0.1, size)


def compared(kind: str, device: str, options: dict[str, Any], recorded: Any = None) -> dict[str, Any]:
    """Parameters and sums of the same steps with `DistributedDataParallel`, and recorded."""
    found: dict[str, Any] = {}
    where = torch.device(device)
    for name, recorder in (("ddp", None), ("recorded", recorded() if recorded else None)):
        graphs = name == "recorded"
        if kind == "toy":
            step, parameters = toy(where, recorder=recorder, graphs=graphs, **options)
        else:
            step, parameters = method(kind, where, recorder, graphs)
        assert isinstance(step.loss, DistributedDataParallel) == (step._recorded is None)
        found[name] = [p.detach().cpu() for p in parameters], step.take_sums()
        found[name + " without gradient"] = [n for n, p in enumerate(parameters) if p.grad is None]
        if graphs:
            found["parts"] = 0 if step._recorded is None else len(step._recorded.parts)
            found["replays"] = None if recorder is None else (recorder.works, recorder.replayed)
    return found


def assert_same(found: dict[str, Any], exactly: bool) -> None:
    (plain, sums), (others, other_sums) = found["ddp"], found["recorded"]
    assert sums[1:] == other_sums[1:] and sums[2] == sum(SIZES)
    assert sums[0] == pytest.approx(other_sums[0], rel=1e-4)
    for one, other in zip(plain, others, strict=True):
        assert torch.equal(one, other) if exactly else True
        assert_near(other, one, TERMS)


def test_the_buffers_of_a_single_process() -> None:
    """A parameter without a gradient here has one elsewhere; the others have none in any process."""
    layer, other = nn.Linear(3, 2), nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    before = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    buffers = Buffers([*layer.parameters(), other.weight], [other.bias])
    buffers.collect()
    buffers.send()
    buffers.hand_out()
    now = [p.grad for p in layer.parameters() if p.grad is not None]
    assert all(torch.equal(*pair) for pair in zip(now, before, strict=True)) and len(now) == 2
    assert other.weight.grad is not None and not other.weight.grad.any() and other.bias.grad is None
    assert [view.storage_offset() % ALIGNED for view in buffers.views] == [0, 0, 0]
    other(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="other parameters have gradients"):
        buffers.collect()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("options", [{"clip": 0.0, "accumulate": 1}, {"clip": 0.5, "accumulate": 2}])
def test_replayed_steps_are_those_of_ddp(count: int, options: dict[str, Any]) -> None:
    """With two processes, there is only one order in which to add their gradients."""
    results = on_ranks(count, compared, "toy", "cpu", options, Replays)
    for found in results:
        assert found["parts"] == 3 and found["replays"] == (2, 2 * REPLAYED)
        assert found["ddp without gradient"] == found["recorded without gradient"] == [4, 5]
        assert_same(found, exactly=count == 2)
        assert all(torch.equal(*pair) for pair in zip(found["recorded"][0], results[0]["recorded"][0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequential", "mamba-cl"])
def test_replayed_steps_of_a_method_are_those_of_ddp(name: str) -> None:
    for found in on_ranks(2, compared, name, "cpu", {}, Replays):
        assert found["parts"] == 3 and found["replays"] == (2, 2 * REPLAYED)
        assert_same(found, exactly=True)


@pytest.mark.slow
def test_all_processes_go_on_with_ddp_if_one_cannot_record() -> None:
    for found in on_ranks(2, compared, "toy", "cpu", {"clip": 0.0, "accumulate": 1}, CannotRecord):
        assert found["parts"] == 0 and found["replays"][1] == 0
        assert_same(found, exactly=True)


def exchanges(sent: int) -> bool:
    step_module.SENT = sent
    step, _ = toy(torch.device("cpu"), 0.0, 1, Replays(), True)
    return step.exchange is not None


@pytest.mark.slow
def test_many_gradients_are_exchanged_during_the_backward_pass() -> None:
    size = sum(p.nbytes for p in Toy().parameters())
    assert on_ranks(2, exchanges, size) == [True, True] and on_ranks(2, exchanges, size - 1) == [False, False]


class TestOnAGPU:
    """Two processes share it, and exchange through gloo."""

    pytestmark = gpu

    @pytest.mark.parametrize("options", [{"clip": 0.0, "accumulate": 1}, {"clip": 0.5, "accumulate": 2}])
    def test_recorded_steps_are_those_of_ddp(self, options: dict[str, Any]) -> None:
        for found in on_ranks(2, compared, "toy", "cuda", options):
            assert found["parts"] == 3
            assert_same(found, exactly=not options["clip"])

    @pytest.mark.parametrize("name", ["sequential", "mamba-cl"])
    def test_recorded_steps_of_a_method_are_those_of_ddp(self, name: str) -> None:
        for found in on_ranks(2, compared, name, "cuda", {}):
            assert found["parts"] == 3
            assert_same(found, exactly=False)
