"""Work in the background of a run that fails."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mambacl.training.checkpoints import Background

# The mistake is found at once. The background is in PyTorch until long after, and asks for the GIL many times.
SLOW_BACKGROUND = """
import sys
import time

import torch

from mambacl.cli import main
from mambacl.data import Stream

describe = Stream.describe


def slowly(stream):
    square, end = torch.ones(100, 100), time.monotonic() + 1
    while time.monotonic() < end:
        square @ square
    print("described", flush=True)
    return describe(stream)


Stream.describe = slowly
sys.exit(main(["train", "demo", "--pretrained", "missing.pth"]))
"""


@pytest.mark.slow
def test_a_mistake_is_one_sentence_whatever_the_background_does(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SLOW_BACKGROUND], cwd=tmp_path, capture_output=True, text=True)
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("mambacl: There is no weights file")
    assert (done.returncode, done.stdout) == (2, "described\n")


def test_ctrl_c_ends_the_wait_for_a_job_but_not_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    background, done, may_end = Background(True), [], threading.Event()

    def job() -> None:
        may_end.wait(20)
        done.append(True)

    def interrupted() -> None:
        raise KeyboardInterrupt

    background.do(job)
    assert background._pending is not None
    with monkeypatch.context() as patched:
        patched.setattr(background._pending, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            background.wait()
    assert background.busy and not done
    may_end.set()
    background.wait()
    assert done and not background.busy


def test_the_error_of_a_job_is_raised_once() -> None:
    background = Background(True)
    background.do(lambda: [][0])
    with pytest.raises(IndexError):
        background.wait()
    background.wait()
