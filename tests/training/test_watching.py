"""`mambacl watch`: what another process sees of a run."""

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cli_help import fails
from small_run import CONFIG

import mambacl
from mambacl.cli import main
from mambacl.log import logger
from mambacl.training.folder import RunFolder
from mambacl.training.watching import SILENT, look


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched") / "run"
    mambacl.train(CONFIG, training={"passes": 1}, stream={"tasks": [5, 5]}, out=str(folder))
    return folder


def as_running(folder: Path, pid: int, host: str | None = None, age: float = 0.0) -> None:
    run = RunFolder(folder)
    run.write_results({**run.results(), "status": "running"})
    notes = {"pid": pid, "host": host or platform.node(), "time": time.time() - age}
    state = {"phase": "training", "task": 2, "tasks": 2, "epoch": 1, "epochs": 1, "done": 8, "of": 40, "loss": 1.5}
    run.write_progress({**state, "accuracy": 0.25, "elapsed": 5.0, "left": 65.0, "memory": 2e9, "notes": notes})


def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.slow
def test_a_finished_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(finished)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{finished}: finished\n  last epoch (task 2): loss ") and "by task: " in out
    assert main(["watch", str(finished), "--once", "--every", "5"]) == 0


@pytest.mark.slow
def test_a_run_under_way_and_a_killed_one(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        as_running(finished, os.getpid())
        news = look(finished)
        assert news.status == "running" and not news.over
        assert main(["watch", "--once", str(finished)]) == 0
        text = capsys.readouterr().out
        assert "running, task 2/2 epoch 1/1 training 8/40, 0:05, 1:05 left\n" in text
        assert "this epoch: loss 1.5000 accuracy 25.0%" in text and "memory 2.00 GB" in text
        as_running(finished, gone())
        assert main(["watch", str(finished)]) == 1
        assert f": killed\n" in (text := capsys.readouterr().out) and f"`mambacl resume {finished}`" in text  # noqa: F541
        as_running(finished, gone(), host="elsewhere", age=SILENT + 60)  # nobody can tell from here
        assert look(finished).status == "running" and "No news for 6:00" in look(finished).remedy()
    finally:
        run = RunFolder(finished)
        run.write_results({**run.results(), "status": "finished"})


@pytest.mark.slow
def test_files_of_other_versions_are_no_error(finished: Path) -> None:
    run = RunFolder(finished)
    before = run.progress()
    try:
        run.write_progress({**before, "later": 1})
        assert look(finished).status == "finished"
        (finished / "progress.json").write_text("{", encoding="utf-8")
        assert look(finished).status == "finished"
        (finished / "progress.json").unlink()
        assert look(finished).status == "finished"
    finally:
        run.write_progress(before)


@pytest.mark.slow
def test_it_waits_for_a_run_and_ends_when_that_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    script = Path(__file__).parents[1] / "small_run.py"
    process: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        time.sleep(0.5)
        process.append(subprocess.Popen([sys.executable, str(script), str(folder)], stderr=subprocess.DEVNULL))
        while not (folder / "progress.json").exists() and process[0].poll() is None:
            time.sleep(0.05)
        process[0].send_signal(signal.SIGKILL)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        assert main(["watch", str(folder), "--every", "0.1"]) == 1
    finally:
        thread.join()
        process[0].wait()
    out = capsys.readouterr().out
    assert f"{folder}: waiting for the run to begin\n" in out and f"{folder}: killed\n" in out
    assert mambacl.resume(folder).results["status"] == "finished" and look(folder).over


@pytest.mark.slow
def test_quiet_is_for_one_command(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    level = logger.level
    assert main(["resume", str(finished), "--quiet"]) == 0
    captured = capsys.readouterr()
    assert not captured.err and "Report: " in captured.out and logger.level == level


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs a run folder" in fails(capsys, "watch")
    (tmp_path / "results.json").write_text("{}", encoding="utf-8")
    assert "is a file: give the run folder" in fails(capsys, "watch", str(tmp_path / "results.json"))
    assert "at least 0.1" in fails(capsys, "watch", "run", "--every", "0")
