"""A disk that takes no more: one sentence with the remedy, and what was there stays.

The system's limit on the size of a file stands for the disk, because a test cannot fill one.
"""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from small_run import CONFIG
from training_help import assert_same_run

import mambacl
from mambacl.errors import UserError
from mambacl.files import disk_error, full_disk, write_bytes
from mambacl.nullspace.memory import Store
from mambacl.reports.writing import write_files
from mambacl.training.loop import TrainingError

resource = pytest.importorskip("resource")
OPTIONS = {"method": "analytic", "classifier_options": {"width": 256}, "training": {"passes": 1}}


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_sentences() -> None:
    full, large, other = (OSError(n, os.strerror(n)) for n in (errno.ENOSPC, errno.EFBIG, errno.ENOENT))
    assert str(full_disk(full, "here")).startswith("The disk is full at here: free some space")
    assert str(full_disk(full)).startswith("The disk is full: free some space")
    assert "here is larger than a file may be here: raise the limit" in str(full_disk(large, "here"))
    assert full_disk(other, "here") is None and disk_error(other, Path("here")) is other


def test_a_file_that_cannot_be_written_is_named_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_bytes(path, b"old")
    with files_up_to(1000), pytest.raises(OSError, match=r"results\.json") as caught:
        write_bytes(path, bytes(10_000))
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_report_that_does_not_fit_leaves_no_new_folder(tmp_path: Path) -> None:
    files = {"figures/small.png": b"small", "report.html": bytes(10_000)}
    (tmp_path / "old").mkdir()
    for name in ("new", "old"):
        with files_up_to(1000), pytest.raises(UserError, match=r"cannot be written .* choose another folder"):
            write_files(tmp_path / name, files)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_covariances_on_a_full_disk_raise_instead_of_killing_the_process(tmp_path: Path) -> None:
    store = Store("disk", torch.device("cpu"), tmp_path)
    assert torch.equal(store.put(torch.eye(8)), torch.eye(8))
    with files_up_to(1000), pytest.raises(OSError, match="File too large"):
        store.put(torch.eye(100))


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_a_run_says_how_to_continue_and_does(tmp_path: Path) -> None:
    whole = mambacl.train(CONFIG, **OPTIONS, out=str(tmp_path / "whole")).folder
    sizes = {path.name: path.stat().st_size for path in (whole / "checkpoints").iterdir()}
    assert sizes["backbone.safetensors"] < sizes["task-02.safetensors"]  # so that the run can begin
    out = tmp_path / "run"
    with files_up_to(sizes["task-02.safetensors"] - 1), pytest.raises(TrainingError) as caught:
        mambacl.train(CONFIG, **OPTIONS, out=str(out))
    sentence = str(caught.value)
    assert sentence.startswith(f"{out / 'checkpoints' / 'task-0'}") and "is larger than a file may be here" in sentence
    assert sentence.endswith(f"(`mambacl resume {out}` continues from the last checkpoint)")
    assert not (out / "error.log").exists()
    mambacl.resume(out)
    assert_same_run(whole, out)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_standard_output_on_a_full_disk() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(mambacl.__file__).parents[1])}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mambacl", "methods"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    assert done.stderr == "mambacl: The disk is full: free some space and repeat the command; finished files stay.\n"
    assert done.returncode == 2
