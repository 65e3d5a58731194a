"""The loop, its checkpoints, and what a crash leaves."""

import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_run import CONFIG, backbone_for
from tolerance import assert_counts_alike
from training_help import assert_same_run, final_parameters, interrupted_after

import mambacl
from mambacl.classifiers import CLASSIFIERS
from mambacl.config import resolve
from mambacl.deploy.model_file import tensors_of
from mambacl.errors import UserError
from mambacl.methods import METHODS
from mambacl.methods.analytic import Analytic
from mambacl.training import checkpoints, loop
from mambacl.training.api import terminable
from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop, TrainingError
from mambacl.training.optimizers import make_optimizer
from mambacl.training.recipe import RECIPES, Recipe


def train(folder: Path, **overrides: Any) -> mambacl.Run:
    return mambacl.train(CONFIG, out=str(folder), **overrides)


def trains_in_all(method: str) -> bool:
    return METHODS.get(method).trains and not METHODS.get(method).first_task_only


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(folder)
    return folder


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """A run that was stopped in its second task."""
    with interrupted_after(6):
        train(tmp_path / "run")
    return tmp_path / "run"


# A run


def test_results_have_the_agreed_form(uninterrupted: Path) -> None:
    results = json.loads((uninterrupted / "results.json").read_text())
    assert results["schema"] == 1 and results["status"] == "finished"
    assert (results["benchmark"], results["method"], results["backbone"]) == ("small", "mamba-cl", "defocus_mamba")
    assert [len(row) for row in results["correct"]] == [1, 2, 3]
    assert results["total"] == [400, 300, 300] and [len(task) for task in results["tasks"]] == [4, 3, 3]
    assert all(results["seconds"][phase] > 0 for phase in ("train", "covariance", "decomposition", "evaluate"))
    assert results["images_per_second"] > 0 and results["peak_memory_bytes"] > 1e6
    assert set(results["metrics"]) >= {"final_accuracy_tasks", "final_accuracy_images", "forgetting"}
    assert results["protected"]["rank"] == "energy:0.9" and 0.9 <= results["protected"]["energy"] <= 1
    stream = json.loads((uninterrupted / "stream.json").read_text())
    assert stream["class_order"] == results["class_order"] and len(stream["fingerprint"]) == 64
    assert len(results["class_names"]) == 10
    events = [json.loads(line)["event"] for line in (uninterrupted / "metrics.jsonl").open()]
    assert events == ["epoch"] * 3 + ["task"] + ["epoch"] * 3 + ["task"] + ["epoch"] * 3 + ["task"]


def test_a_seed_fixes_the_run(uninterrupted: Path, tmp_path: Path) -> None:
    train(tmp_path / "again")
    assert_same_run(uninterrupted, tmp_path / "again")
    other = train(tmp_path / "other", seed=1)
    assert not torch.equal(
        final_parameters(other.folder)["method.heads.0.weight"],
        final_parameters(uninterrupted)["method.heads.0.weight"],
    )


def test_a_finished_run_is_returned_as_it_is(uninterrupted: Path) -> None:
    before = (uninterrupted / "results.json").stat().st_mtime_ns
    assert train(uninterrupted).metrics == json.loads((uninterrupted / "results.json").read_text())["metrics"]
    assert mambacl.resume(uninterrupted).results["status"] == "finished"
    assert (uninterrupted / "results.json").stat().st_mtime_ns == before


def test_another_run_is_not_overwritten_unawares(uninterrupted: Path) -> None:
    with pytest.raises(UserError, match=r"differs in seed\).*--overwrite"):
        train(uninterrupted, seed=5)


@pytest.mark.slow
def test_overwrite_trains_anew_and_keeps_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, method="frozen")
    (folder / "notes.txt").write_text("mine")
    run = train(folder, method="frozen", seed=3, overwrite=True)
    assert run.results["seed"] == 3
    assert (folder / "notes.txt").exists() and not list((folder / "checkpoints").glob("task-0*"))


def test_a_bad_configuration_writes_nothing(tmp_path: Path) -> None:
    for overrides in (
        {"method": "mambacl"},
        {"stream.dataset": "folders"},
        {"stream.tasks": 11},
        {"device": "cuda:99"},
    ):
        with pytest.raises(UserError):
            train(tmp_path / "run", **overrides)
    assert not (tmp_path / "run").exists()


# Methods that try every classifier here; `test_every_method_with_every_classifier` tries all pairs, without a run.
EVERY_CLASSIFIER = ("analytic", "mamba-cl", "seq-adapter", "l2p")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, classifier",
    [
        *((method, "auto") for method in METHODS.names()),
        *(
            pytest.param(method, name, marks=[] if method in EVERY_CLASSIFIER else pytest.mark.long)
            for method in METHODS.names()
            for name in CLASSIFIERS.names()
            if not METHODS.get(method).own_answer and (trains_in_all(method) or not CLASSIFIERS.get(name).trains)
        ),
    ],
)
@pytest.mark.usefixtures("few_test_images")
def test_every_method_trains_resumes_and_evaluates(method: str, classifier: str, tmp_path: Path) -> None:
    """With its own classifier and with every other; some answer in a way of their own."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    answers = METHODS.get(method).own_classifier if classifier == "auto" else classifier
    options = {"width": 100} if answers == "ridge" else {}
    chosen = {"method": method, "classifier": classifier, "classifier_options": options, **backbone_for(method)}
    train(whole, **chosen)
    with interrupted_after(7 if trains_in_all(method) else 2):
        train(broken, **chosen)
    mambacl.resume(broken)
    assert_same_run(whole, broken)
    evaluation = mambacl.evaluate(whole)
    assert evaluation.counted == evaluation.recorded
    evaluation = mambacl.evaluate(whole, batch_size=7)  # the batch plays no part in a prediction
    assert_counts_alike(evaluation.counted, evaluation.recorded)


def test_a_classifier_by_name(tmp_path: Path, uninterrupted: Path) -> None:
    """It answers; what trains is the same. Its statistics are a part of the task's state."""
    run = train(tmp_path / "run", classifier="nearest-mean")
    ours, theirs = final_parameters(run.folder), final_parameters(uninterrupted)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    results = json.loads((uninterrupted / "results.json").read_text())
    assert run.results["classifier"] == "nearest-mean" and run.results["correct"] != results["correct"]
    assert run.results["seconds"]["classifier"] > 0 and "classifier" not in results
    state = load_file(run.folder / "checkpoints" / "task-02.safetensors")
    assert state["classifier/counts"].tolist() == [8] * 10
    with pytest.raises(UserError, match=r"no classifier 'nearest'. Did you mean 'nearest-mean'"):
        train(tmp_path / "other", classifier="nearest")
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("few_test_images")
@pytest.mark.parametrize(
    "method, classifier, drift, options",
    [
        ("mamba-cl", "lda", "linear", {}),
        ("mamba-cl", "lda", "adc", {"images": 4, "step": 200.0}),
        ("sequential", "aligned", "efc", {}),
        ("sequential", "gaussian", "adagauss", {"hidden": 8, "epochs": 2, "samples": 20}),
        pytest.param("seq-adapter", "aligned", "linear", {}, marks=pytest.mark.slow),
        pytest.param("sequential", "gaussian", "sldc", {"steps": 5}, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_follows_the_drift(
    method: str, classifier: str, drift: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """What trains is the same, the statistics are not; it resumes in the middle of a task, when it needs the weights
    from before the task; and a model made from it leaves those out."""
    chosen = {"method": method, "classifier": classifier, "training.passes": 2}
    follows = {**chosen, "classifier_options": {"drift": drift, "drift_options": options}}
    stale = train(tmp_path / "stale", **chosen)
    run = train(tmp_path / "whole", **follows)
    with interrupted_after(5):  # after the first of two epochs of the second task
        train(tmp_path / "broken", **follows)
    assert mambacl.resume(tmp_path / "broken").trained
    assert_same_run(run.folder, tmp_path / "broken")
    ours, theirs = final_parameters(run.folder), final_parameters(stale.folder)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    state, before = (load_file(folder / "checkpoints" / "task-02.safetensors") for folder in (run.folder, stale.folder))
    sums = "classifier/statistics.sums"
    assert torch.equal(state[sums][7:], before[sums][7:]) and not torch.equal(state[sums][:7], before[sums][:7])
    start = {name for name in state if name.startswith("start/")}
    assert start and not any(name.startswith("start/") for name in before)
    evaluation = mambacl.evaluate(run.folder)
    assert evaluation.counted == evaluation.recorded
    assert not any("start/" in name for name in tensors_of(mambacl.load(run.folder).method))


ANALYTIC: dict[str, Any] = {"method": "analytic", "classifier_options": {"width": 100}}


@pytest.mark.usefixtures("few_test_images")
@pytest.mark.parametrize("mirror", ["none", "both"])
def test_a_run_without_training(mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It resumes after each task, answers the same whether or not it keeps the test images' features, says what its
    classifier sees and how large it is, and has no epochs."""
    options = {**ANALYTIC, "features.mirror": mirror}
    run = train(tmp_path / "whole", **options)
    for count in (1, 2):
        with interrupted_after(count):
            train(tmp_path / str(count), **options)
        mambacl.resume(tmp_path / str(count))
        assert_same_run(run.folder, tmp_path / str(count))
    monkeypatch.setattr(loop, "KEPT", 0)
    again = train(tmp_path / "again", **options)
    assert again.results["correct"] == run.results["correct"]
    assert_same_run(run.folder, again.folder)
    evaluation = mambacl.evaluate(run.folder, batch_size=7)
    assert_counts_alike(evaluation.counted, run.results["correct"][-1])

    results, state = run.results, load_file(run.folder / "checkpoints" / "task-02.safetensors")
    assert results["classifier"] == "ridge" and results["images_per_second"] == 0
    stored = sum(tensor.nbytes for name, tensor in state.items() if name.startswith("classifier/"))
    assert results["classifier_bytes"] == stored > 1e4 and 0 < results["kept_bytes"] < 1e5
    pool = {"count": 160, "depths": [0, 1], "pool": ["class", "mean"]}
    assert results["features"] == {**pool, "mirror": mirror}
    assert results["seconds"]["classifier"] > 0 and results["seconds"]["train"] == 0
    assert [json.loads(line)["event"] for line in (run.folder / "metrics.jsonl").open()] == ["task"] * 3
    assert state["classifier/counts"].tolist() == [8 if mirror == "none" else 16] * 10
    assert results["metrics"]["final_accuracy_tasks"] > 0.3


def test_the_size_of_a_classifier_counts_only_what_is_computed(uninterrupted: Path) -> None:
    results = json.loads((uninterrupted / "results.json").read_text())
    assert not {"classifier_bytes", "features", "classifier"} & set(results)


def test_features_that_are_kept_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test image passes through the model once if its features are kept, and once after each task if not."""
    seen = 0
    plain = Analytic.classifier_input

    def counted(self: Analytic, images: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += len(images)
        return plain(self, images)

    monkeypatch.setattr(Analytic, "classifier_input", counted)
    train(tmp_path / "kept", **ANALYTIC)
    assert seen == 80 + 1000
    monkeypatch.setattr(loop, "KEPT", 0)
    seen = 0
    train(tmp_path / "again", **ANALYTIC)
    assert seen == 80 + 3 * 400 + 2 * 300 + 300


def test_a_run_folder_from_before_classifiers_had_names_resumes(uninterrupted: Path, interrupted: Path) -> None:
    path = interrupted / "config.yaml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("classifier")]
    path.write_text("\n".join(lines) + "\n")
    mambacl.resume(interrupted)
    assert_same_run(uninterrupted, interrupted)


def test_frozen_trains_the_heads_only(tmp_path: Path) -> None:
    run = train(tmp_path / "frozen", method="frozen")
    assert all(name.startswith("method.heads.") for name in final_parameters(run.folder))


def test_sequential_is_the_same_as_mamba_cl_until_something_is_protected(uninterrupted: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", method="sequential")
    ours, theirs = final_parameters(run.folder), final_parameters(uninterrupted)
    assert torch.equal(ours["method.heads.0.weight"], theirs["method.heads.0.weight"])  # the first task is free
    assert not torch.equal(ours["method.heads.1.weight"], theirs["method.heads.1.weight"])
    assert not list((run.folder / "checkpoints").glob("task-0*"))


def test_bf16_keeps_close_to_float32(tmp_path: Path, uninterrupted: Path) -> None:
    run = train(tmp_path / "run", precision="bf16")
    losses = [
        [entry["loss"] for entry in map(json.loads, (folder / "metrics.jsonl").open()) if entry["event"] == "epoch"]
        for folder in (run.folder, uninterrupted)
    ]
    assert len(losses[0]) == 9 and losses[0] == pytest.approx(losses[1], rel=0.2)  # a step of bf16 is 0.4 per cent
    ours, theirs = final_parameters(run.folder), final_parameters(uninterrupted)
    assert all(tensor.dtype == theirs[name].dtype for name, tensor in ours.items())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, schedule", [("adamw", "cosine"), ("sgd", "constant")])
@pytest.mark.usefixtures("few_test_images")
def test_other_optimizers_and_schedules_resume_as_well(optimizer: str, schedule: str, tmp_path: Path) -> None:
    options = {"training": {**CONFIG["training"], "optimizer": optimizer, "schedule": schedule}, "stream.tasks": [9, 1]}
    train(tmp_path / "whole", **options)
    with interrupted_after(4):
        train(tmp_path / "broken", **options)
    mambacl.resume(tmp_path / "broken")
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


# Interruptions


@pytest.mark.slow
def test_a_run_interrupted_at_each_checkpoint_resumes(uninterrupted: Path, tmp_path: Path) -> None:
    """Three epochs and the end of the task, three times: each is a place to be interrupted at."""
    for count in (1, 3, 4, 5, 11):
        folder = tmp_path / str(count)
        with interrupted_after(count):
            train(folder)
        assert json.loads((folder / "results.json").read_text())["status"] == "interrupted"
        mambacl.resume(folder)
        assert_same_run(uninterrupted, folder)


@pytest.mark.slow
@pytest.mark.long
def test_sigkill_at_three_random_moments(uninterrupted: Path, tmp_path: Path) -> None:
    """Killed without warning, resumed as often as it takes: the same bits in the end. The process kills itself, because
    another one would come late on a busy machine, when the run is over."""
    script = Path(__file__).parents[1] / "small_run.py"
    environment = {**os.environ, "PYTHONPATH": str(Path(mambacl.__file__).parents[1])}
    rng, folder = random.Random(), tmp_path / "run"  # other moments each time
    for lines in sorted(rng.sample(range(1, 10), 3)):  # of the 12 of the whole run
        arguments = [sys.executable, str(script), str(folder), str(lines), str(rng.uniform(0, 0.02)), "SIGKILL"]
        assert subprocess.run(arguments, env=environment, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
        assert json.loads(results_text(folder) or "{}").get("status") in (None, "running")
    command = [sys.executable, str(script), str(folder)]
    assert subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, timeout=120).returncode == 0
    assert_same_run(uninterrupted, folder)


def results_text(folder: Path) -> str:
    """At any moment whole."""
    path = folder / "results.json"
    text = path.read_text() if path.exists() else ""
    assert not text or json.loads(text)["schema"] == 1
    return text


def test_a_damaged_checkpoint_falls_back_to_the_one_before(uninterrupted: Path, interrupted: Path) -> None:
    last = interrupted / "checkpoints" / "last.safetensors"
    data = bytearray(last.read_bytes())
    data[-3] ^= 0xFF
    last.write_bytes(data)
    mambacl.resume(interrupted)
    assert_same_run(uninterrupted, interrupted)


def test_no_whole_checkpoint_left(tmp_path: Path) -> None:
    with interrupted_after(3):
        train(tmp_path / "run")
    for name in ("last", "previous"):
        (tmp_path / "run" / "checkpoints" / f"{name}.safetensors").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="--overwrite"):
        mambacl.resume(tmp_path / "run")


@pytest.mark.parametrize("name", ["backbone", "task-end"])
def test_what_has_no_second_copy_is_damaged(name: str, interrupted: Path) -> None:
    (interrupted / "checkpoints" / f"{name}.safetensors").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=rf"{name}\.safetensors is damaged .*--overwrite"):
        mambacl.evaluate(interrupted)


def test_changed_data_are_noticed(tmp_path: Path) -> None:
    with interrupted_after(3):
        train(tmp_path / "run")
    stream = tmp_path / "run" / "stream.json"
    stream.write_text(stream.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    with pytest.raises(UserError, match="fingerprint"):
        mambacl.resume(tmp_path / "run")


def test_two_processes_do_not_train_one_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        folder.clear()  # as --overwrite does
        with pytest.raises(UserError, match="Another process"):
            train(tmp_path / "run")


@pytest.mark.slow
def test_checkpoints_of_another_run_are_not_taken_up(uninterrupted: Path, tmp_path: Path) -> None:
    """Where config.yaml is gone, what lies there belongs to no run."""
    with interrupted_after(5):
        train(tmp_path / "run", seed=9)
    (tmp_path / "run" / "config.yaml").unlink()
    with interrupted_after(1):
        train(tmp_path / "run")
    mambacl.resume(tmp_path / "run")
    assert_same_run(uninterrupted, tmp_path / "run")


def test_a_run_in_the_middle_of_a_task_is_evaluated_as_at_the_end_of_the_one_before(interrupted: Path) -> None:
    evaluation = mambacl.evaluate(interrupted)
    assert evaluation.counted == evaluation.recorded and len(evaluation.counted) == 1


def test_falling_back_keeps_a_whole_checkpoint(uninterrupted: Path, interrupted: Path) -> None:
    folder = RunFolder(interrupted)
    (folder.checkpoints / "last.safetensors").write_bytes(b"damaged")
    assert checkpoints.load(folder) is not None
    (folder.checkpoints / "previous.safetensors").unlink()
    mambacl.resume(interrupted)
    assert_same_run(uninterrupted, interrupted)


def test_relative_paths_are_kept_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve(CONFIG, {"stream.root": "data", "pretrained": "weights.pth"})
    assert config.stream.root == str(tmp_path / "data") and config.pretrained == str(tmp_path / "weights.pth")


def test_a_loss_that_is_not_finite_stops_the_run_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"lower training\.lr.*mambacl resume"):
        train(tmp_path / "run", **{"training.lr": 1e30})
    assert json.loads((tmp_path / "run" / "results.json").read_text())["status"] == "failed"


def test_random_states_come_back() -> None:
    tensors, text = checkpoints.random_state()
    drawn = (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())
    checkpoints.restore_random_state(tensors, text)
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == drawn


# The recipe


def test_the_paper_and_the_public_code_decay_at_different_passes() -> None:
    factors = {
        name: [recipe.lr_factor(epoch * recipe.passes_per_epoch) for epoch in range(recipe.epochs)]
        for name, recipe in RECIPES.items()
    }
    assert factors["paper"] == pytest.approx([1.0] * 25 + [0.1] * 15 + [0.01] * 10)
    assert factors["public-code"] == pytest.approx([1.0] * 4 + [0.1] * 3 + [0.01] * 3)  # each of five passes


def test_other_schedules() -> None:
    cosine = Recipe(passes=10, schedule="cosine")
    assert [cosine.lr_factor(p) for p in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    assert Recipe(schedule="constant").lr_factor(49) == 1.0
    by_epoch = Recipe(passes=10, passes_per_epoch=5, schedule="epoch-cosine")
    assert [by_epoch.lr_factor(p) for p in (0, 4, 5)] == pytest.approx([1.0, 1.0, 0.5])
    coda = Recipe(passes=20, schedule="coda-cosine")  # one epoch late: full for two, then to a tenth
    factors = [coda.lr_factor(p) for p in range(20)]
    assert factors[:2] == [1.0, 1.0] and factors[2] == pytest.approx(math.cos(0.495 * math.pi / 19))
    assert factors[-1] == pytest.approx(math.cos(0.495 * math.pi * 18 / 19)) and 0.09 < factors[-1] < 0.11
    assert Recipe(passes=1, schedule="coda-cosine").lr_factor(0) == 1.0


def test_wrong_recipes() -> None:
    for change in ({"passes": 0}, {"passes": 7, "passes_per_epoch": 2}, {"lr": -1.0}, {"batch_size": 0}):
        with pytest.raises(UserError, match="must be"):
            dataclasses.replace(Recipe(), **change)


def test_optimizer_state_is_kept_by_name() -> None:
    parameters = {"a": torch.nn.Parameter(torch.ones(3)), "b": torch.nn.Parameter(torch.ones(2))}
    groups = [{"params": list(parameters.values())}]
    optimizer = make_optimizer(Recipe(), groups)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = checkpoints.optimizer_tensors(optimizer, list(parameters))
    assert set(tensors) == {f"{name}.{key}" for name in "ab" for key in ("step", "exp_avg", "exp_avg_sq")}
    other = make_optimizer(Recipe(), [{"params": list(parameters.values())}])
    checkpoints.load_optimizer(other, list(parameters), tensors)
    assert torch.equal(other.state[parameters["b"]]["exp_avg"], optimizer.state[parameters["b"]]["exp_avg"])
    with pytest.raises(UserError, match="does not train"):
        checkpoints.load_optimizer(other, ["a", "c"], tensors)


def test_the_loop_knows_no_method_by_name() -> None:
    import inspect

    source = inspect.getsource(inspect.getmodule(Loop))  # type: ignore[arg-type]
    assert not any(name in source for name in ("mamba-cl", "MambaCL", "sequential", "frozen", "analytic", "Analytic"))


def test_overrides_of_the_python_interface_nest_and_have_dots() -> None:
    config = resolve(CONFIG, {"training": {"lr": 5e-4}, "nullspace.A.trains": False})
    assert config.training.lr == 5e-4 and config.training.passes == 3
    assert not config.nullspace.A.trains and config.nullspace.rank == "energy:0.9"


def test_a_worker_that_is_told_to_end_does_not_keep_the_runs_lock():
    """Workers inherit the handler of SIGTERM; one that only raised in them could leave them, and the lock, behind."""
    with terminable():
        worker = os.fork()
        if worker == 0:
            while True:
                time.sleep(1)
        time.sleep(0.2)
        os.kill(worker, signal.SIGTERM)
        _, status = os.waitpid(worker, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM
