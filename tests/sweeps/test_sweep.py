"""`mambacl sweep` trains what is missing: finished runs are skipped, interrupted ones continued, failed ones tried
again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sweeps_help import KILL, RAISE, Done, InProcess, flaky, write_sweep
from training_help import assert_same_run, interrupted_after

import mambacl
from mambacl.cli import main
from mambacl.errors import UserError
from mambacl.methods.registry import METHODS
from mambacl.sweeps import api, driver
from mambacl.sweeps.driver import Sweep, reason_of
from mambacl.sweeps.engines.base import Ending
from mambacl.sweeps.engines.local import Local
from mambacl.sweeps.plan import read
from mambacl.sweeps.states import Entry, entries_of, is_busy
from mambacl.sweeps.view import LiveView, View, cells
from mambacl.training.folder import RunFolder
from mambacl.training.progress import State
from mambacl.training.watching import News


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> InProcess:
    """Sweeps train in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "EVERY", 0.0)
    made = InProcess()
    monkeypatch.setattr(api, "open_engine", lambda *_: made)
    return made


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    METHODS._entries.pop("flaky", None)
    sys.modules.pop("flaky_method", None)


def states(folder: str = "runs/few") -> dict[str, str]:
    return {run["run"]: run["state"] for run in json.loads(Path(folder, "sweep.json").read_text())["runs"]}


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_runs_are_trained_once_and_compared(
    engine: InProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_sweep(tmp_path, seeds=[0, 1]))
    assert main(["sweep", path]) == 0
    printed = capsys.readouterr()
    assert engine.started == ["small-analytic-0", "small-analytic-1"] and set(states().values()) == {"finished"}
    assert "small-analytic-0: finished, accuracy" in printed.err
    row = next(line for line in printed.out.splitlines() if line.startswith("analytic"))
    assert "0, 1" in row and "±" in row  # seeds share it
    page = Path("runs/few/comparison/report.html")
    assert page.is_file() and f"Report: {page}" in printed.out
    log = Path("runs/few/small-analytic-0/train.log").read_text()
    assert "final" in log and "Report: " in log  # what `mambacl train` prints

    assert main(["sweep", path]) == 0 and len(engine.started) == 2  # nothing is left to do
    capsys.readouterr()
    before = json.loads(Path("runs/few/sweep.json").read_text())["runs"]
    assert main(["sweep", str(write_sweep(tmp_path, seeds=[0, 1, 7])), "--keep", "results", "--quiet"]) == 0
    assert engine.started[2:] == ["small-analytic-7"]
    assert json.loads(Path("runs/few/sweep.json").read_text())["runs"][:2] == before  # with attempts and seconds
    assert all(run["attempts"] == 1 and run["seconds"] > 0 for run in before)
    assert not list(Path("runs/few/small-analytic-7/checkpoints").glob("*.safetensors"))
    assert list(Path("runs/few/small-analytic-0/checkpoints").glob("*.safetensors"))
    assert "small-analytic-7" not in capsys.readouterr().err  # --quiet

    assert main(["sweep", "runs/few"]) == 0 and len(engine.started) == 3  # the folder knows its runs
    assert main(["sweep", path, "--training.passes", "3"]) == 2 and len(engine.started) == 3
    assert "holds another run (differs in training.passes): choose another --out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images", "registered")
def test_a_failed_run_is_tried_again_and_goes_on_where_it_was(
    engine: InProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = flaky(tmp_path, RAISE, 1)
    path = str(write_sweep(tmp_path, methods=["flaky", "analytic"]))
    assert main(["sweep", path, "--import", str(script)]) == 0
    assert engine.started == ["small-flaky-0", "small-flaky-0", "small-analytic-0"]
    said = capsys.readouterr().err
    assert "small-flaky-0: failed, trying again: RuntimeError: the disk has gone" in said
    [first, _] = json.loads(Path("runs/few/sweep.json").read_text())["runs"]
    assert (first["state"], first["attempts"]) == ("finished", 2) and "reason" not in first
    assert len(script.with_suffix(".mark").read_text()) == 3  # task 1, and task 2 twice: task 1 was not learned again


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images", "registered")
def test_a_run_that_keeps_failing_is_reported_and_the_others_are_trained(
    engine: InProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = flaky(tmp_path, RAISE, 100)
    path = str(write_sweep(tmp_path, methods=["flaky", "analytic"]))
    assert main(["sweep", path, "--import", str(script), "--retries", "2"]) == 1
    assert engine.started == ["small-flaky-0"] * 3 + ["small-analytic-0"]
    printed = capsys.readouterr()
    *_, one, last = printed.err.strip().splitlines()
    log = Path("runs/few/small-flaky-0/train.log")
    assert one.startswith(
        "small-flaky-0 failed after 3 attempts: RuntimeError: the disk has gone (the traceback is in "
    )
    assert one.endswith(f"Log: {log}") and log.is_file() and last == "mambacl: 1 of 2 runs failed."
    assert "analytic" in printed.out and states() == {"small-flaky-0": "failed", "small-analytic-0": "finished"}
    assert json.loads(Path("runs/few/sweep.json").read_text())["runs"][0]["reason"].startswith("RuntimeError")
    assert main(["sweep", path, "--import", str(script), "--retries", "0"]) == 1  # repeating tries it again
    assert engine.started[4:] == ["small-flaky-0"]


@pytest.mark.usefixtures("few_test_images")
def test_a_run_with_a_mistake_is_not_tried_again(
    engine: InProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(tmp_path, options={"stream.transforms.image_size": 15})  # no multiple of the patch
    assert main(["sweep", str(path)]) == 1 and engine.started == ["small-analytic-0"]
    err = capsys.readouterr().err
    assert "small-analytic-0 failed: " in err and "image_size" in err and "attempts" not in err


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_an_interrupted_run_is_continued(engine: InProcess, tmp_path: Path) -> None:
    plan = read(write_sweep(tmp_path, methods=["sequential"], options={"training.passes": 2}), {})
    [run] = plan.runs
    with interrupted_after(3):
        mambacl.train(run.config)
    [entry] = entries_of(plan.runs)
    assert entry.state == "interrupted" and entry.open
    assert main(["sweep", str(tmp_path / "sweep.yaml")]) == 0 and engine.started == [run.key]
    mambacl.train(run.config, out="once")
    assert_same_run(Path("once"), run.folder)


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_a_run_that_another_process_trains_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "EVERY", 0.0)
    plan = read(write_sweep(tmp_path), {})
    [run] = plan.runs
    assert not is_busy(run)
    with interrupted_after(1):
        mambacl.train(run.config)
    engine = InProcess()

    class Shown(View):
        looks = 0

        def show(self, entries: list[Entry]) -> None:
            self.looks += 1
            if self.looks == 1:
                assert entries[0].state == "running elsewhere" and is_busy(run)
            if self.looks == 3:
                lock.__exit__(None, None, None)

    lock = RunFolder(run.folder).locked()
    lock.__enter__()
    view = Shown(quiet=True)
    sweep = Sweep(plan, view)
    assert sweep.run(engine) == [] and view.looks > 3
    assert engine.started == [run.key] and sweep.entries[0].attempts == 1  # then this sweep has continued it


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = Sweep(read(write_sweep(tmp_path), {}), View(quiet=True))
    Path("runs/few").mkdir(parents=True)
    with (
        RunFolder(Path("runs/few")).locked(),
        pytest.raises(UserError, match="works on runs/few: wait for it, or choose another --out"),
    ):
        sweep.run(InProcess())


def test_ctrl_c_stops_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "EVERY", 0.0)
    sweep = Sweep(read(write_sweep(tmp_path, seeds=[0, 1, 2]), {}), View(quiet=True))
    asked: list[str] = []

    class Slow(Done):
        def __init__(self, name: str) -> None:
            self.name, self.ended = name, False

        def ending(self) -> Ending | None:
            return Ending(130) if self.ended else None

        def stop(self) -> None:
            asked.append(self.name)
            self.ended = True

    class Two(InProcess):
        slots = 2

        def start(self, task) -> Slow:
            return Slow(task.name)

    def interrupt(_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # what batch systems send; Ctrl-C is the same from here on

    monkeypatch.setattr(sweep.view, "show", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(Two())
    assert asked == ["small-analytic-0", "small-analytic-1"]
    assert list(states().values()) == ["interrupted", "interrupted", "not started"]


def test_the_reason_of_a_failure_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("mambacl: an earlier attempt\n")
    start = log.stat().st_size
    with open(log, "a") as file:
        file.write("Training\nmambacl: The disk is full.\n\n")
    assert reason_of(Ending(2), log, start) == "The disk is full." and reason_of(Ending(1, "job 3"), log, 0) == "job 3"
    with open(log, "a") as file:
        file.write("no more\nSegmentation fault\n")
    assert reason_of(Ending(1), log, log.stat().st_size - 27) == "Segmentation fault"
    assert reason_of(Ending(-9), log, start) == "killed by SIGKILL, as when memory runs out"
    assert reason_of(Ending(-15), log, start) == "killed by SIGTERM"
    assert reason_of(Ending(1), tmp_path / "none", 0) == "exit code 1, without a word"


def test_processes_share_gpus_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    two = Local(3, ["4", "5"], 16)
    assert [two.variables(place) for place in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "5"} for gpu in ("4", "5", "4")
    ]
    assert Local(1, [], 8).variables(0) == {} and Local(9, [], 2).variables(8) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert Local(2, [], 8).variables(1) == {}


def test_the_table_shows_every_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    plan = read(write_sweep(tmp_path, seeds=list(range(40))), {})
    entries = [Entry(run, "waiting") for run in plan.runs]
    state = State(task=2, tasks=5, epoch=1, epochs=3, phase="training", left=75.0)
    news = News(Path("x"), "running", state, {"final_accuracy_tasks": 0.5}, [0.5], {})
    entries[30] = Entry(plan.runs[30], "running", 2, news=news)
    entries[31] = Entry(plan.runs[31], "failed", 2, "the disk has gone", news=news)
    key = plan.runs[30].key
    assert cells(entries[30]) == (key, "running, try 2", "task 2/5 epoch 1/3 training", "50.0%", "1:15")
    assert cells(entries[31])[1:3] == ("failed", "the disk has gone")
    view = LiveView()
    view.console = Console(width=100, height=20, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    view.console.print(view.table(entries))
    text = view.console.export_text()
    assert key in text and "the disk has gone" in text and "... and 28 more" in text
    assert "0 finished, 1 running, 1 failed of 40 runs" in text and len(text.splitlines()) <= 20


# In processes of their own


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_a_killed_process_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at the same time; one kills itself with SIGKILL in its second task."""
    monkeypatch.chdir(tmp_path)
    script = flaky(tmp_path, KILL, 1)
    path = write_sweep(tmp_path, methods=["flaky", "analytic"])
    assert main(["sweep", str(path), "--jobs", "2", "--import", str(script)]) == 0
    runs = {run["run"]: run for run in json.loads(Path("runs/few/sweep.json").read_text())["runs"]}
    assert [run["attempts"] for run in runs.values()] == [2, 1]
    log = Path("runs/few/small-flaky-0/train.log").read_text()
    assert "Continuing runs/few/small-flaky-0 in task 2" in log and "Report: " in log
    results = json.loads(Path("runs/few/small-flaky-0/results.json").read_text())
    assert results["status"] == "finished" and len(script.with_suffix(".mark").read_text()) == 3


@pytest.mark.long
def test_ctrl_c_leaves_runs_that_go_on(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, methods=["sequential"], options={"training.passes": 80})
    call = [sys.executable, "-m", "mambacl", "sweep", str(path)]
    process = subprocess.Popen(
        call, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    run = tmp_path / "runs" / "few" / "small-sequential-0"
    until = time.monotonic() + 120
    while not (run / "checkpoints" / "last.safetensors").exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 130 and "Stopping 1 run" in said
    assert said.splitlines()[-2:] == ["mambacl: repeat the command to continue.", "mambacl: Interrupted."]
    assert RunFolder(run).results()["status"] == "interrupted"
    assert states(str(tmp_path / "runs" / "few")) == {"small-sequential-0": "interrupted"}
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and RunFolder(run).finished(), done.stderr
    assert "Continuing" in (run / "train.log").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_from_python(engine: InProcess, tmp_path: Path) -> None:
    write_sweep(tmp_path)
    found = mambacl.sweep({"presets": ["small.yaml"], "seeds": [0, 1]}, out="mine", training={"passes": 1})
    assert list(found.runs) == ["small-analytic-0", "small-analytic-1"] == engine.started and found.failed == {}
    assert found.report == Path("mine/comparison/report.html") and found.report.is_file()
    again = mambacl.sweep("mine")
    assert again.runs == found.runs and len(engine.started) == 2
