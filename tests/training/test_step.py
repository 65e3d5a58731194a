"""A training step: what it adds up, and that a recorded one is the same as one that is not."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from small_run import CONFIG
from torch import Tensor, nn

import mambacl
from mambacl.methods import METHODS, Setup, Task
from mambacl.nullspace.settings import setting_named
from mambacl.training import checkpoints, loop
from mambacl.training.checkpoints import Background
from mambacl.training.folder import RunFolder
from mambacl.training.metrics import all_metrics
from mambacl.training.optimizers import make_optimizer
from mambacl.training.recipe import Recipe
from mambacl.training.step import WARM_UP, Recorder, TrainingStep, rates_are_tensors

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
CUDA = torch.device("cuda")


class Toy:
    """A linear layer and its loss."""

    def __init__(self, device: str = "cpu", waits: bool = False) -> None:
        torch.manual_seed(0)
        self.layer, self.waits = nn.Linear(12, 4).to(device), waits

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layer(images.flatten(1))
        if self.waits and float(logits.detach().sum()) == 0.5:
            return logits.sum(), labels.sum()
        return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).sum()

    def optimizer(self, name: str = "adam", recorded_on: torch.device | None = None) -> torch.optim.Optimizer:
        groups = [{"params": list(self.layer.parameters()), "lr": 0.1, "base_lr": 0.1}]
        return make_optimizer(Recipe(optimizer=name), groups, recorded_on)


def batches(device: str = "cpu", sizes: tuple[int, ...] = (6, 6, 6, 6, 6, 4)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [(torch.randn(n, 3, 2, 2, generator=generator), torch.arange(n) % 4) for n in sizes]
    return [(images.to(device), labels.to(device)) for images, labels in made]


def trained(toy: Toy, graphs: bool, name: str = "adam", recorded_on: torch.device | None = None) -> TrainingStep:
    device = toy.layer.weight.device
    step = TrainingStep(toy, toy.optimizer(name, recorded_on), device, False, graphs)
    for number, (images, labels) in enumerate(batches()):
        step(images, labels, 1.0 if number < 4 else 0.1)
    return step


def test_sums_are_those_of_the_steps() -> None:
    toy, seen, right = Toy(), 0.0, 0
    other = Toy()
    optimizer = other.optimizer()
    for number, (images, labels) in enumerate(batches()):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 if number < 4 else 0.01
        loss, correct = other.loss(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen, right = seen + float(loss) * len(images), right + int(correct)
    step = trained(toy, graphs=True)
    loss_sum, found, images_seen = step.take_sums()
    assert (found, images_seen) == (right, 34)
    assert loss_sum == pytest.approx(seen, rel=1e-5)
    assert torch.equal(toy.layer.weight, other.layer.weight)
    assert step.take_sums() == (0.0, 0, 0)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_rates_are_tensors_only_where_steps_are_recorded(name: str) -> None:
    assert not rates_are_tensors(Toy().optimizer(name))


def test_a_batch_is_recorded_of_a_size_that_was_seen_before(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, tried = Toy(), []
    step = TrainingStep(toy, toy.optimizer(), torch.device("cpu"), False, True)
    step.graphs = True
    monkeypatch.setattr(step, "_record", lambda images, labels, of: tried.append((step._taken, len(images))))
    for images, labels in batches(sizes=(6, 6, 4, 6)):
        step(images, labels, 1.0)
    assert tried == [(3, 6)]


def test_graphs_are_recorded_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = MagicMock()
    fake.mem_get_info.return_value = (1 << 40, 1 << 40)
    fake.Stream.side_effect = lambda device: MagicMock()
    monkeypatch.setattr(torch, "cuda", fake)
    recorder, done = Recorder(torch.device("cpu")), []
    for number in range(3):
        recorder.record(partial(done.append, number), 1)
    assert done == [0, 1, 2] and fake.Stream.call_count == 1


def test_a_failed_recording_is_followed_by_one_that_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed one alone, PyTorch refuses to draw random numbers."""
    fake = MagicMock()
    fake.mem_get_info.return_value = (1 << 40, 1 << 40)
    monkeypatch.setattr(torch, "cuda", fake)

    def fail() -> None:
        raise RuntimeError("operation not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        Recorder(torch.device("cpu")).record(fail, 1)
    graph = fake.CUDAGraph.return_value
    assert fake.CUDAGraph.call_count == graph.capture_begin.call_count == graph.capture_end.call_count == 3


class TestOnAGPU:
    pytestmark = gpu

    def test_graphs_take_turns_in_the_same_memory(self) -> None:
        recorder, reserved = Recorder(CUDA), []
        for _ in range(4):
            recorder.record(lambda: torch.zeros(1 << 26, device=CUDA), 1 << 28)
            reserved.append(torch.cuda.memory_reserved())
        assert len(set(reserved)) == 1

    @pytest.mark.parametrize("name", ["adam", "adamw"])
    def test_a_recorded_step_is_the_same_to_the_last_bit(self, name: str) -> None:
        plain, recorded = Toy("cuda"), Toy("cuda")
        one, other = trained(plain, False, name, CUDA), trained(recorded, True, name, CUDA)
        assert one._recorded is None and other._recorded is not None
        assert torch.equal(plain.layer.weight, recorded.layer.weight) and one.take_sums() == other.take_sums()

    def test_the_public_optimizer_is_the_same_to_rounding(self) -> None:
        plain, recorded = Toy("cuda"), Toy("cuda")
        trained(plain, False)
        trained(recorded, True, recorded_on=CUDA)
        torch.testing.assert_close(plain.layer.weight, recorded.layer.weight, rtol=1e-5, atol=1e-6)

    def test_a_method_that_waits_goes_on_as_it_is(self) -> None:
        plain, waiting = Toy("cuda"), Toy("cuda", waits=True)
        trained(plain, False, recorded_on=CUDA)
        step = trained(waiting, True, recorded_on=CUDA)
        assert step._recorded is None
        assert torch.equal(plain.layer.weight, waiting.layer.weight)
        assert torch.rand(3, device=CUDA).isfinite().all()  # the failed recording has left the generator

    @pytest.mark.parametrize("method", ["sequential", "mamba-cl"])
    @pytest.mark.parametrize("bf16", [False, True])
    def test_a_models_recorded_steps_are_the_same(self, method: str, bf16: bool, tiny_model) -> None:
        found = []
        for graphs in (False, True):
            model = tiny_model().cuda()
            learner = METHODS.get(method)(model, Setup(setting_named("exact").override(rank="energy:0.9")))
            learner.start_task(Task(0, 4, 0, 1))
            learner.finish_task([(torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(2)).cuda(), None)])
            learner.start_task(Task(1, 4, 4, 2))
            groups = [
                {"params": [p for _, p in named], "lr": 0.01, "base_lr": 0.01}
                for named in learner.named_parameters().values()
            ]
            optimizer = learner.wrap(make_optimizer(Recipe(), groups, CUDA))
            step = TrainingStep(learner, optimizer, CUDA, bf16, graphs)
            generator = torch.Generator().manual_seed(3)
            for _ in range(WARM_UP + 4):
                step(torch.randn(8, 3, 16, 16, generator=generator), 4 + torch.arange(8) % 4, 1.0)
            assert (step._recorded is not None) == graphs
            found.append([p.detach().clone() for group in groups for p in group["params"]])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    def test_a_run_without_kernels_and_graphs_learns_the_same(self, tmp_path: Path) -> None:
        runs = [
            mambacl.train(CONFIG, device="cuda", fast=fast, out=str(tmp_path / str(fast))) for fast in (True, False)
        ]
        fast, plain = (run.metrics["final_accuracy_tasks"] for run in runs)
        assert abs(fast - plain) < 0.15  # other augmentations, the same learning


def test_files_are_written_beside_the_training_in_order() -> None:
    done, background = [], Background(on=True)
    for number in range(5):
        background.do(partial(done.append, number))
    background.wait()
    assert done == list(range(5))


def test_what_goes_wrong_beside_the_training_is_raised_by_the_next_call() -> None:
    def fail() -> None:
        raise OSError("no space left")

    background = Background(on=True)
    background.do(fail)
    with pytest.raises(OSError, match="no space left"):
        background.do(lambda: None)
    background.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_a_checkpoint_written_beside_the_training_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mambacl.train(CONFIG, device="cpu", out=str(tmp_path / "plain"))
    monkeypatch.setattr(loop, "Background", lambda on: Background(on=True))
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 0.0)
    monkeypatch.setattr(Background, "busy", False)
    beside = mambacl.train(CONFIG, device="cpu", out=str(tmp_path / "beside"))
    for name in ("last", "previous", "task-end", "task-01", "task-02"):
        one, other = (load_file(run.folder / "checkpoints" / f"{name}.safetensors") for run in (plain, beside))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), name
    assert plain.results["correct"] == beside.results["correct"]


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
@pytest.mark.parametrize("slow", [False, True])
def test_a_disk_that_is_behind_keeps_no_epoch_waiting(
    slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a task, checkpoints are left out while one is being written, or right after one; at its end none is."""
    written: list[tuple[int, int]] = []
    write = checkpoints.write
    monkeypatch.setattr(loop, "Background", lambda on: Background(on=True))
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 0.0 if slow else 1e9)
    monkeypatch.setattr(Background, "busy", slow)
    monkeypatch.setattr(
        checkpoints, "write", lambda *given: written.append((given[1].task, given[1].epoch)) or write(*given)
    )
    run = mambacl.train(CONFIG, device="cpu", out=str(tmp_path / "run"))
    first = [] if slow else [(0, 1)]
    assert written == [*first, (1, 0), (2, 0), (3, 0)]
    assert mambacl.evaluate(run.folder).counted == run.results["correct"][-1]


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_results_written_late_are_those_of_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Background):
        """Begins a job when the next one is there."""

        job = staticmethod(lambda: None)

        def do(self, job):  # type: ignore[no-untyped-def]
            self.wait()
            self.job = job

        def wait(self) -> None:
            job, self.job = self.job, lambda: None
            job()

    written, write = [], RunFolder.write_results
    monkeypatch.setattr(loop, "Background", lambda on: Late(on=True))
    monkeypatch.setattr(RunFolder, "write_results", lambda *given: written.append(deepcopy(given[-1])) or write(*given))
    mambacl.train(CONFIG, device="cpu", out=str(tmp_path / "late"))
    found = [results for results in written if "correct" in results]
    assert len(found) > 2
    for results in found:
        assert results["metrics"] == all_metrics(results["correct"], results["total"])


def test_a_gradient_is_clipped() -> None:
    """Over all parameters together: a step of plain SGD is the direction of the gradient, as long as `clip` allows."""
    moved = []
    for clip in (0.0, 1e-3):
        toy = Toy()
        optimizer = torch.optim.SGD([{"params": list(toy.layer.parameters()), "lr": 1.0, "base_lr": 1.0}])
        before = [p.detach().clone() for p in toy.layer.parameters()]
        TrainingStep(toy, optimizer, torch.device("cpu"), False, False, clip=clip)(*batches()[0], 1.0)
        moved.append(
            torch.cat([(p.detach() - q).flatten() for p, q in zip(toy.layer.parameters(), before, strict=True)])
        )
    free, clipped = moved
    assert free.norm() > 1e-2 and abs(float(clipped.norm()) - 1e-3) < 1e-6
    assert torch.nn.functional.cosine_similarity(free, clipped, dim=0) > 1 - 1e-4
