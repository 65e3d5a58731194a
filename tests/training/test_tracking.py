"""Trackers: what they get, what happens when one fails, and the real libraries offline."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cli_help import fails
from small_run import CONFIG

import mambacl
from mambacl.cli import main
from mambacl.training import trackers, tracking
from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop
from mambacl.training.tracking import Trackers, values_of

SMALL = {"training": {**CONFIG["training"], "passes": 2}, "stream": {**CONFIG["stream"], "tasks": [5, 5]}}
EPOCH = {"event": "epoch", "task": 0, "epoch": 0, "loss": 1.0, "accuracy": 0.5, "lr": 0.1, "images": 8, "seconds": 2.0}
TASK = {"event": "task", "task": 1, "correct": [3, 4], "total": [10, 8]}


class Memory:
    """A tracker that keeps everything in a list, as the adapters do in their libraries."""

    name, keeps_files = "memory", True
    runs: dict[str, list[Any]] = {}  # noqa: RUF012
    fails_at: str | None = None

    def __init__(self, config: Any, folder: Path, identity: Mapping[str, str] | None) -> None:
        self.identity = dict(identity or {"id": folder.name})
        self.kept = self.runs.setdefault(self.identity["id"], [])
        self._note("open", config.seed)

    def _note(self, what: str, *values: Any) -> None:
        if self.fails_at == what:
            raise ConnectionError("no route to host")
        self.kept.append((what, *values))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._note("log", step, dict(values))

    def summary(self, metrics: Mapping[str, float]) -> None:
        self._note("summary", dict(metrics))

    def attach(self, path: Path) -> None:
        self._note("attach", path.name)

    def close(self, status: str) -> None:
        self._note("close", status)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> type[Memory]:
    monkeypatch.setattr(trackers, "KINDS", {"wandb": Memory})
    monkeypatch.setattr(tracking, "find_spec", lambda name: True)
    monkeypatch.setattr(Memory, "runs", {})
    return Memory


def train(folder: Path, **options: Any) -> mambacl.Run:
    return mambacl.train(CONFIG, **{**SMALL, "out": str(folder), **options})


def test_what_an_event_says() -> None:
    assert values_of(EPOCH) == {
        "train/loss": 1.0, "train/accuracy": 0.5, "train/learning_rate": 0.1, "train/images_per_second": 4.0,
        "train/task": 1,
    }  # fmt: skip
    found = values_of(TASK, [[5], [3, 4]])
    assert found["accuracy/task_01"] == 0.3 and found["accuracy/task_02"] == 0.5
    assert found["metrics/final_accuracy_tasks"] == pytest.approx(0.4) and found["metrics/forgetting"] == 0.2
    assert values_of({"event": "old-losses", "task": 0}) == {}


def test_known_events_are_not_sent_again(memory: type[Memory], tmp_path: Path) -> None:
    config = mambacl.RunConfig()
    tracker = Memory(config, tmp_path / "a", None)
    made = Trackers([tracker], epochs=3, known=[EPOCH])
    made.event(EPOCH)
    made.event({**EPOCH, "epoch": 1})
    made.event({"event": "old-losses", "task": 0})
    made.event({**TASK, "task": 0, "correct": [3], "total": [10]})
    assert [note[:2] for note in tracker.kept] == [("open", 0), ("log", 2), ("log", 3)]


def test_a_missing_library_is_named_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    words = "--track mlflow needs the library mlflow: pip install 'mambacl[mlflow]'."
    assert words in fails(capsys, "train", "demo", "--track", "mlflow", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert "tensorboard, wandb, mlflow, trackio" in fails(capsys, "train", "demo", "--track", "mlfow")


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_a_resumed_run_continues_in_its_tracker(
    memory: type[Memory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untracked = train(tmp_path / "plain")
    whole = train(tmp_path / "whole", track=["wandb"])
    assert whole.results["correct"] == untracked.results["correct"]
    record = Loop._record

    def stopped(self: Loop, event: str, **values: Any) -> None:
        record(self, event, **values)
        if event == "epoch" and values["task"] == 1 and values["epoch"] == 0:
            raise KeyboardInterrupt  # between an event and its checkpoint

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_record", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "part", track=["wandb"])
    mambacl.resume(tmp_path / "part")

    def logged(name: str) -> list[Any]:
        return [
            {k: v for k, v in note[2].items() if "per_second" not in k}
            for note in memory.runs[name]
            if note[0] == "log"
        ]

    assert logged("part") == logged("whole") and len(logged("whole")) == 6
    assert [note[1] for note in memory.runs["whole"] if note[0] == "log"] == [1, 2, 2, 3, 4, 4]
    assert [note[1] for note in memory.runs["part"] if note[0] == "close"] == ["interrupted", "finished"]
    assert memory.runs["whole"][-2] == ("summary", whole.metrics)


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
@pytest.mark.parametrize("where", ["open", "log", "summary", "close"])
def test_a_tracker_that_fails_costs_one_warning(
    where: str, memory: type[Memory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Memory, "fails_at", where)
    with caplog.at_level(logging.WARNING, "mambacl"):
        assert train(tmp_path / "run", track=["wandb"]).results["status"] == "finished"
    said = [record.message for record in caplog.records if "tracker" in record.message]
    name = "wandb" if where == "open" else "memory"
    assert said == [f"The tracker {name} failed (ConnectionError: no route to host); the run goes on without it."]


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_a_tracker_that_joins_later_gets_all_events(memory: type[Memory], tmp_path: Path) -> None:
    train(tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    opened = tracking.open_trackers(mambacl.RunConfig(track=["wandb"], training=run.config().training), run)
    opened.close("finished")
    steps = [note[1] for note in memory.runs["run"] if note[0] == "log"]
    assert steps == [1, 2, 2, 3, 4, 4] and run.tracking() == {"wandb": {"id": "run"}}


# The real libraries, offline


@pytest.fixture
def tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_test_images: None) -> Any:
    """Trains through the command line with a tracker, interrupted once, and returns the folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")

    def run(name: str) -> RunFolder:
        pytest.importorskip(name)
        record = Loop._record

        def stopped(self: Loop, event: str, **values: Any) -> None:
            record(self, event, **values)
            if event == "task" and values["task"] == 0:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Loop, "_record", stopped)
            with pytest.raises(KeyboardInterrupt):
                train(tmp_path / "run", track=[name])
        assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
        return RunFolder(tmp_path / "run")

    return run


@pytest.mark.extras
@pytest.mark.slow
def test_tensorboard(tracked: Any) -> None:
    run = tracked("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    expected = [(2 * e["task"] + e["epoch"] + 1, pytest.approx(e["loss"])) for e in run.events("epoch")]
    assert losses == expected and len(losses) == 4
    assert found.Scalars("final/forgetting")[0].value == pytest.approx(run.results()["metrics"]["forgetting"])
    assert [event.step for event in found.Scalars("accuracy/task_01")] == [2, 4]


@pytest.mark.extras
@pytest.mark.slow
def test_mlflow(tracked: Any) -> None:
    run = tracked("mlflow")
    from mlflow import MlflowClient

    identity = run.tracking()["mlflow"]
    client = MlflowClient(tracking_uri=identity["uri"])
    found = client.get_run(identity["run"])
    losses = [(m.step, m.value) for m in client.get_metric_history(identity["run"], "train/loss")]
    assert sorted(losses) == [(2 * e["task"] + e["epoch"] + 1, e["loss"]) for e in run.events("epoch")]
    assert found.info.status == "FINISHED" and found.data.params["training.passes"] == "2"
    assert found.data.metrics["final/forgetting"] == run.results()["metrics"]["forgetting"]
    assert [file.path for file in client.list_artifacts(identity["run"])] == ["report.html"]


@pytest.mark.extras
@pytest.mark.slow
def test_trackio(tracked: Any) -> None:
    run = tracked("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(trackers.PROJECT, run.tracking()["trackio"]["name"])
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(2 * e["task"] + e["epoch"] + 1, e["loss"]) for e in run.events("epoch")]
    assert [r["final/forgetting"] for r in rows if "final/forgetting" in r] == [run.results()["metrics"]["forgetting"]]


@pytest.mark.extras
@pytest.mark.slow
def test_wandb(tracked: Any) -> None:
    run = tracked("wandb")
    name = run.tracking()["wandb"]["id"]
    parts = sorted((run.path / "wandb").glob(f"offline-run-*-{name}"))
    assert len(parts) == 3  # until the interruption, until the end, and the report
    for part, words in zip(parts, (b"train/loss", b"final/forgetting", b"report.html"), strict=True):
        until = time.monotonic() + 60
        while words not in (part / f"run-{name}.wandb").read_bytes():  # another process writes it
            assert time.monotonic() < until, words
            time.sleep(0.1)
