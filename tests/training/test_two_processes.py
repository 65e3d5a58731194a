"""Two processes with one run folder: the second is refused in one sentence that names the first."""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_run import CONFIG
from training_help import assert_same_run

import mambacl
from mambacl import files
from mambacl.errors import UserError
from mambacl.training.folder import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(files.fcntl is None, reason="nothing can be locked here"),
]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(mambacl.__file__).parents[1])}
HOLDER = """
import sys
from mambacl.training.folder import RunFolder
with RunFolder(sys.argv[1]).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mambacl.train(CONFIG, out=str(tmp_path_factory.mktemp("whole") / "run")).folder


@contextmanager
def refused(process: subprocess.Popen[Any], run: Path, remedy: str) -> Iterator[None]:
    """Within it, the error that names this process."""
    who = f"{process.pid} on {platform.node()}, since "
    with pytest.raises(UserError) as caught:
        yield
    sentence = re.sub(r"since [\d: -]{19}", "since ", str(caught.value))
    assert sentence == f"Another process ({who}) is training {run}: {remedy}."


def test_a_run_that_another_process_trains(whole: Path, tmp_path: Path) -> None:
    """The first one is stopped in the middle, then killed: its lock ends with it."""
    script, run = Path(__file__).parents[1] / "small_run.py", tmp_path / "run"
    first = subprocess.Popen([sys.executable, str(script), str(run), "4", "0", "SIGSTOP"], env=ENVIRONMENT,
                             stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        assert os.WIFSTOPPED(os.waitpid(first.pid, os.WUNTRACED)[1])
        attempts: list[Callable[[], Any]] = [
            lambda: mambacl.resume(run),
            lambda: mambacl.train(CONFIG, out=str(run)),
            lambda: mambacl.train(CONFIG, out=str(run), overwrite=True, seed=1),
        ]
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        for attempt in attempts:
            with refused(first, run, "wait for it, or choose --out"):
                attempt()
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert (run / ".lock").read_text().startswith(f"process {first.pid} on ")
    mambacl.resume(run)
    assert_same_run(whole, run)
    assert not (run / ".lock").exists()


def test_a_run_that_another_process_changes(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    first = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], env=ENVIRONMENT, text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert first.stdout is not None and first.stdout.readline() == "locked\n"
        with refused(first, run, "wait for it"):
            mambacl.learn(run, tmp_path)
        with refused(first, run, "wait for it"):
            mambacl.rollback(run, 3)
        assert mambacl.resume(run).results["status"] == "finished"  # changes nothing
        assert mambacl.evaluate(run).counted == mambacl.evaluate(whole).counted
    finally:
        first.kill()
        first.communicate()
    assert mambacl.rollback(run, 3) == mambacl.load(run).classes


def test_a_run_that_another_process_has_made_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While this one read its data."""
    run = tmp_path / "run"
    lock = RunFolder.locked

    def late(folder: RunFolder, *arguments: str) -> Any:
        monkeypatch.undo()
        mambacl.train(CONFIG, out=str(run))
        return lock(folder, *arguments)

    monkeypatch.setattr(RunFolder, "locked", late)
    with pytest.raises(UserError, match=r"Another process has trained .* meanwhile: repeat the command"):
        mambacl.train(CONFIG, out=str(run))
    assert mambacl.train(CONFIG, out=str(run)).trained is False
