"""Several processes train one run: same batches, counts and parameters as a single one, whatever dies on the way."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import RankError, on_ranks, outcomes
from several_processes_help import (
    SGD,
    TERMS,
    assert_same_outcome,
    events,
    results,
    stopped,
    tensors_of,
    train,
    train_few,
)
from small_run import CONFIG, OPTIONS, VIT
from tolerance import rounding
from torch import Tensor, nn

import mambacl
from mambacl import processes
from mambacl.backbones import create_model
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.nullspace import NullSpace
from mambacl.training import checkpoints
from mambacl.training.build import pick_device
from mambacl.training.loop import TrainingError
from mambacl.training.step import TrainingStep

TRAINING = [name for name in METHODS.names() if METHODS.get(name).trains]
PASSES = 30  # enough for a kill to find the run under way

# A step


def model_for(method: str) -> nn.Module:
    torch.manual_seed(0)
    attention = METHODS.get(method).needs_attention
    options = VIT["backbone_options"] if attention else CONFIG["backbone_options"]
    return create_model("vit" if attention else "defocus_mamba", num_classes=0, **options).double().eval()


def one_step(name: str, images_count: int, accumulate: int) -> tuple[dict[str, Tensor], tuple[float, int, int]] | None:
    """Gradients and sums of a step of the last task, of this process's part of the images; None if its images cannot
    be shared."""
    torch.set_default_dtype(torch.float64)
    tasks = 1 if METHODS.get(name).first_task_only else 2
    method = METHODS.get(name)(model_for(name), Setup(options=OPTIONS.get(name, {}), tasks=tasks))
    if not method.splits:
        return None
    torch.manual_seed(0)
    of = images_count if processes.count() > 1 else 0
    own = processes.part(images_count)
    own = own if own.stop > own.start else slice(0, 1)
    for task in range(tasks):
        images = torch.randn(images_count, 3, 16, 16)
        labels = torch.tensor([0, 1, 1, 0, 1, 0, 0])[:images_count] + 2 * task
        method.start_task(Task(task, 2, first_label=2 * task, seed=task))
        named = [pair for role in method.named_parameters().values() for pair in role]
        rate = 1e-3 if task + 1 < tasks else 0.0
        optimizer = torch.optim.SGD([{"params": [p for _, p in named], "lr": rate, "base_lr": rate}])
        step = TrainingStep(method, optimizer, torch.device("cpu"), False, False, accumulate=accumulate)
        if task + 1 < tasks:
            step(images[own], labels[own], 1.0, of)
            step.take_sums()
            batches = [(images[i : i + 2], labels[i : i + 2]) for i in range(0, images_count, 2)]
            method.finish_task(batches[processes.rank() :: processes.count()] if method.adds_up else batches)
            if method.classifier.updates:
                mine = processes.part(images_count)
                method.fit_classifier([(images[own], labels[mine])])
    method.start_epoch(0, lambda: [(images, labels)])
    step(images[own], labels[own], 1.0, of)
    return {name: p.grad for name, p in named if p.grad is not None}, step.take_sums()


def steps(names: list[str], images: int, accumulate: int) -> dict[str, Any]:
    return {name: one_step(name, images, accumulate) for name in names}


@pytest.fixture
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.long), 3])
def test_the_gradient_of_every_method_is_that_of_one_process(count: int) -> None:
    """Seven images, so that parts differ in size."""
    alone = steps(TRAINING, 7, 1)
    assert sum(result is not None for result in alone.values()) > 20
    for rank, found in enumerate(on_ranks(count, steps, TRAINING, 7, 1)):
        for name, expected in alone.items():
            assert_same_step(found[name], expected, f"{name}, rank {rank}")


@pytest.mark.slow
@pytest.mark.usefixtures("doubles")
def test_pieces_and_empty_parts_change_no_gradient() -> None:
    """Two images for three processes, and parts of two pieces each."""
    names = ["sequential", "coda-prompt", "mamba-cl"]
    for images, accumulate in ((2, 1), (7, 2)):
        alone = steps(names, images, 1)
        for rank, found in enumerate(on_ranks(3, steps, names, images, accumulate)):
            for name, expected in alone.items():
                assert_same_step(found[name], expected, f"{name}, rank {rank}, {images} images")


def assert_same_step(found: Any, expected: Any, what: str) -> None:
    if expected is None:
        assert found is None, what
        return
    (gradients, sums), (others, other_sums) = found, expected
    assert gradients.keys() == others.keys() and sums[1:] == other_sums[1:], what
    assert sums[0] == pytest.approx(other_sums[0], rel=rounding(TERMS, torch.float64)), what
    largest = max(gradient.abs().max().item() for gradient in others.values())
    assert largest > 0
    for name, gradient in others.items():
        assert (gradient - gradients[name]).abs().max().item() <= rounding(TERMS, torch.float64) * largest, (what, name)


# A run


SETTINGS: dict[str, dict[str, Any]] = {
    "mamba-cl": {"training": SGD},
    "exact-batched": {
        "training": SGD, "setting": "exact", "stream": {**CONFIG["stream"], "transforms": {"engine": "batched"}},
    },
    "sharded": {"training": SGD, "setting": "exact", "shard": True},
    "shared-steps": {"training": SGD, "setting": "public-code", "share_steps": True},
    "analytic": {"method": "analytic", "classifier_options": {"width": 200}},
    "sequential-lda": {"method": "sequential", "classifier": "lda", "training": SGD},
    "analytic-sharded": {"method": "analytic", "classifier_options": {"width": 200}, "shard": True},
    "depths-sharded": {"method": "sequential", "features": {"depths": 2}, "training": SGD, "shard": True},
}  # fmt: skip
LONG = ("exact-batched", "shared-steps", "sequential-lda", "depths-sharded")  # alike in much


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in SETTINGS]
)
@pytest.mark.usefixtures("few_test_images")
def test_two_and_three_processes_train_the_run_of_one(tmp_path: Path, setting: str) -> None:
    overrides = SETTINGS[setting]
    train(tmp_path / "1", **overrides)
    assert "processes" not in results(tmp_path / "1")
    for count in (2, 3):
        folder = tmp_path / str(count)
        assert on_ranks(count, train_few, folder, overrides) == [count] * count
        assert results(folder)["processes"] == count
        assert_same_outcome(folder, tmp_path / "1")


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
def test_a_run_resumes_on_another_number_of_processes(tmp_path: Path, shard: bool) -> None:
    """In the second task, with the optimizer's state."""
    adam = {**CONFIG["training"], "lr": 1e-4, "head_lr": 1e-4}
    train(tmp_path / "1", training=adam)
    on_ranks(2, stop_it, tmp_path / "run", adam, shard)
    assert results(tmp_path / "run")["status"] == "interrupted"
    on_ranks(3, resume_it, tmp_path / "run")
    assert_same_outcome(tmp_path / "run", tmp_path / "1")
    assert "optimizer." not in "".join(tensors_of(tmp_path / "run" / "checkpoints" / "last.safetensors"))


def stop_it(folder: Path, training: dict[str, Any], shard: bool) -> None:
    stopped(folder, 6, training=training, shard=shard)
    if processes.is_first():
        kept = tensors_of(folder / "checkpoints" / "last.safetensors")
        assert any(name.startswith("optimizer.") for name in kept)


def resume_it(folder: Path) -> None:
    mambacl.resume(folder)


# A process that dies


DIES = {
    "training": (TrainingStep, "_run", 7),
    "consolidation": (NullSpace, "protect", 3),
    "writing": (checkpoints, "write_tensors", 6),
}
"""by name: what a process is killed in, and in which call"""


def killed_in(folder: Path, moment: str, victim: int) -> None:
    holder, name, call = DIES[moment]
    original, calls = getattr(holder, name), []

    def dies(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        if len(calls) == call and processes.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)

    setattr(holder, name, dies)
    train(folder, training=SGD)


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "victim"), [("training", 1), ("consolidation", 1), ("writing", 0)])
def test_a_process_killed_at_any_work_loses_nothing(tmp_path: Path, moment: str, victim: int) -> None:
    """The other one ends with one sentence, and two resume."""
    train(tmp_path / "1", training=SGD)
    found = outcomes(2, killed_in, tmp_path / "run", moment, victim)
    assert "exit code -9" in found[victim].text
    assert isinstance(found[1 - victim].error, TrainingError) and "Another process" in str(found[1 - victim].error)
    assert results(tmp_path / "run")["status"] != "finished"
    assert "Traceback" in (tmp_path / "run" / "lost.log").read_text()
    on_ranks(2, resume_it, tmp_path / "run")
    assert_same_outcome(tmp_path / "run", tmp_path / "1")


# Mistakes


def test_a_loss_of_whole_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        on_ranks(2, train, tmp_path / "run")  # to see that the processes work
        on_ranks(2, train_method, tmp_path / "other", "mamba-fscil")
    assert isinstance(caught.value.error, UserError)
    assert re.search(r"affect each other in the loss of 'mamba-fscil'.*a single process", str(caught.value.error))
    assert not (tmp_path / "other").exists()


def train_method(folder: Path, method: str) -> None:
    train(folder, method=method, options=OPTIONS.get(method, {}))


def test_all_processes_hear_what_the_first_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("method: [")
    found = outcomes(2, train, tmp_path / "run")
    assert all(isinstance(one.error, UserError) for one in found) and str(found[0].error) == str(found[1].error)


def train_apart(folder: Path) -> None:
    """As if the second process had computed something else by itself."""
    kind = METHODS.get("sequential")
    start = kind.start_task

    def start_task(self: Any, task: Task) -> None:
        start(self, task)
        if processes.rank() == 1 and task.index == 1:
            self.tuning.trained()[0][1].data.view(-1)[0] += 1e-3

    kind.start_task = start_task  # type: ignore[method-assign]
    train(folder, method="sequential")


@pytest.mark.slow
def test_processes_that_hold_different_values_do_not_go_on(tmp_path: Path) -> None:
    found = outcomes(2, train_apart, tmp_path / "run")
    assert all(isinstance(one.error, TrainingError) for one in found)
    assert "hold different values of" in str(found[0].error) and "at the start of task 2" in str(found[0].error)


def test_a_checksum_sees_signs_and_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in bases that two machines have computed: a vector with as many signs of each kind, or two that changed
    places."""
    bases = torch.linalg.qr(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))[0]
    bases[:, 0] = torch.tensor([1.0, -1.0] * 3) / 6**0.5
    for words in (processes.WORDS, 5):
        monkeypatch.setattr(processes, "WORDS", words)
        signs, order = bases * torch.tensor([-1.0, 1, 1, 1]), bases[:, [1, 0, 2, 3]]
        assert len({processes.checksum(x) for x in (bases, signs, order, bases.double(), torch.empty(0))}) == 5
        assert processes.checksum(bases.clone()) == processes.checksum(bases)
        assert processes.checksum(bases.T.contiguous().T) == processes.checksum(bases)  # whatever the strides


def what_differs() -> str | None:
    same = {"a": torch.arange(6.0), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor([True])}
    other = same | {"b": same["b"] * (1 + processes.rank()), "none": torch.empty(0)}
    assert processes.differing(same) is None
    return processes.differing(other)


def test_the_tensor_that_differs_is_named() -> None:
    assert on_ranks(2, what_differs) == ["b", "b"]


# Devices


def test_under_torchrun_a_gpu_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the process is the only one on its machine: NCCL refuses a device without an index."""
    chosen: list[int] = []
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 0) and chosen == [0, 0]
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes need 2 GPUs, but this machine has 1"):
        pick_device("auto")


# From the command line


def command(*words: str, launcher: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *launcher, "-m", "mambacl", *words]


def environment() -> dict[str, str]:
    places = os.pathsep.join([str(Path(mambacl.__file__).parents[1]), str(Path(__file__).parents[1])])
    return {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}


def config_file(folder: Path, passes: int) -> Path:
    path = folder / "small.yaml"
    path.write_text(json.dumps({**CONFIG, "training": {**SGD, "passes": passes}, "device": "cpu"}))
    return path


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_one_process_under_torchrun_on_a_gpu_is_a_plain_run(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    for folder, launcher in (("plain", ()), ("launched", torchrun)):
        words = ["train", str(config_file(tmp_path, 2)), "--out", str(tmp_path / folder), "--device", "cuda"]
        done = subprocess.run(
            command(*words, launcher=launcher), env=environment(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    one, other = (results(tmp_path / folder) for folder in ("plain", "launched"))
    assert one["correct"] == other["correct"] and "processes" not in other


@pytest.mark.slow
def test_gpus_starts_the_processes_and_a_mistake_is_told_once(tmp_path: Path) -> None:
    words = ["train", str(config_file(tmp_path, 3)), "--gpus", "2", "--out", str(tmp_path / "run")]
    done = subprocess.run(command(*words), env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "run")["processes"] == 2 and done.stdout.count("Report:") == 1
    assert done.stderr.count("after task 3/3") == 1
    again = subprocess.run(
        command(*words, "--training.lr", "0.5"), env=environment(), capture_output=True, text=True, timeout=120
    )
    sentences = [line for line in again.stderr.splitlines() if line.startswith("mambacl: ")]
    assert again.returncode == 2 and len(sentences) == 1 and "holds another run" in sentences[0]
    assert "Traceback" not in again.stderr and "ChildFailedError" not in again.stderr


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run_which_continues(tmp_path: Path, victim: int) -> None:
    folder = tmp_path / "run"
    words = ["train", str(config_file(tmp_path, PASSES)), "--gpus", "2", "--out", str(folder)]
    launcher = subprocess.Popen(command(*words), env=environment(), stderr=subprocess.PIPE, text=True)
    kill(launcher, victim, folder)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and f"Process {victim + 1} of 2 was ended by SIGKILL" in err, err
    assert "Traceback" not in err and err.count("mambacl: ") <= 2
    done = subprocess.run(
        command("resume", str(folder), "--gpus", "2"), env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert_every_image_counted_once(folder)


@pytest.mark.slow
def test_torchrun_restarts_a_run_by_itself(tmp_path: Path) -> None:
    """Even with --overwrite, which must not throw away what was trained before the restart."""
    folder = tmp_path / "run"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    words = ["train", str(config_file(tmp_path, PASSES)), "--out", str(folder), "--overwrite"]
    launcher = subprocess.Popen(
        command(*words, launcher=torchrun), env=environment(), stderr=subprocess.PIPE, text=True
    )
    kill(launcher, 1, folder)
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, err
    assert "Continuing" in err
    assert_every_image_counted_once(folder)


@pytest.mark.long
def test_a_restart_before_anything_is_overwritten_still_overwrites(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    words = ["train", str(config_file(tmp_path, 1)), "--out", str(folder)]
    subprocess.run(command(*words), env=environment(), check=True, capture_output=True, timeout=120)
    before = events(folder, "epoch")
    launcher = subprocess.Popen(
        command(*words, "--overwrite", launcher=torchrun), env=environment(), stderr=subprocess.PIPE, text=True
    )
    kill(launcher, 1, folder)  # at once, because the old run has a checkpoint
    assert events(folder, "epoch") == before
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0 and "Continuing" not in err and "already finished" not in err, err
    assert results(folder)["status"] == "finished" and results(folder)["processes"] == 2


def assert_every_image_counted_once(folder: Path) -> None:
    assert results(folder)["status"] == "finished"
    per_task = [len(task) * CONFIG["stream"]["train_per_class"] for task in results(folder)["tasks"]]
    assert [event["images"] for event in events(folder, "epoch")] == [n for n in per_task for _ in range(PASSES)]


def kill(launcher: subprocess.Popen[str], victim: int, folder: Path) -> None:
    """Kills one of the launcher's processes once the run has a checkpoint."""
    deadline = time.monotonic() + 60
    while not (folder / "checkpoints" / "last.safetensors").exists():
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    while time.monotonic() < deadline:
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if int((path / "stat").read_text().rsplit(")", 1)[1].split()[1]) != launcher.pid:
                    continue
                variables = dict(entry.partition("=")[::2] for entry in (path / "environ").read_text().split("\0"))
            except OSError:
                continue
            if variables.get("RANK") == str(victim):
                os.kill(int(path.name), signal.SIGKILL)
                return
    raise AssertionError("no such process")
