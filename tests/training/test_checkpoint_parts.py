"""Checkpoints of a model that is cut: each process writes and reads its own rows, and a kill between any two file
operations of any process loses nothing."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data_help import fewer_test_images
from file_operations_help import needs_linux, states
from kills_help import TASKS
from processes import on_ranks
from safetensors.torch import load_file
from several_processes_help import SGD, assert_same_outcome, stopped
from small_run import CONFIG
from torch import Tensor

import mambacl
from mambacl import processes
from mambacl.errors import UserError
from mambacl.files import read_text, write_tensors
from mambacl.nullspace.sharing import is_cut
from mambacl.training import parts
from mambacl.training.api import Evaluation
from mambacl.training.folder import RunFolder

SMALL: dict[str, Any] = {
    "stream": {**CONFIG["stream"], "tasks": TASKS, "train_per_class": 3},
    "training": {**SGD, "passes": 2},
}


@pytest.fixture(autouse=True)
def few_images() -> Iterator[None]:
    with fewer_test_images(2):
        yield


def train(folder: Path, **overrides: Any) -> None:
    torch.set_num_threads(1)
    mambacl.train(CONFIG, out=str(folder), device="cpu", **{**SMALL, **overrides})


def parts_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").glob("parts-*")}


def named_in(folder: Path) -> set[str]:
    texts = [(path, read_text(path)) for path in (folder / "checkpoints").glob("*.safetensors")]
    return {found.folder.name for path, text in texts if (found := parts.named_by(path, text)) is not None}


# Rows


def some() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"matrix": (7, 3), "vector": (4,), "one row": (1, 5)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write_some(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (processes.count(),))
    tensors = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in some().items()}
    return parts.write(folder, {**tensors, "whole": torch.arange(3)})


def read_some(folder: Path, text: dict[str, str]) -> dict[str, Tensor]:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    like = distribute_tensor(torch.zeros(5), init_device_mesh("cpu", (processes.count(),)), [Shard(0)])
    named = parts.named_by(folder / "last.safetensors", text)
    assert named is not None
    found = parts.read(named, like)
    assert all(is_cut(tensor) for tensor in found.values())
    assert all(torch.equal(found[name].full_tensor(), tensor) for name, tensor in some().items())  # type: ignore[attr-defined]
    return {name: tensor.to_local() for name, tensor in found.items()}  # type: ignore[attr-defined]


@pytest.mark.slow
def test_any_number_of_processes_reads_its_rows(tmp_path: Path) -> None:
    [(rest, text), (other_rest, other_text)] = on_ranks(2, write_some, tmp_path)
    assert list(rest) == list(other_rest) == ["whole"] and text == other_text
    held = [{name: len(t) for name, t in load_file(path).items()} for path in sorted(tmp_path.glob("parts-*/*"))]
    assert held == [{"matrix": 4, "vector": 2, "one row": 1}, {"matrix": 3, "vector": 2}]
    named = parts.named_by(tmp_path / "last.safetensors", text)
    assert named is not None
    alone = parts.read(named)
    assert all(torch.equal(alone[name], tensor) for name, tensor in some().items()) and len(alone) == len(some())
    for count in (2, 3):
        for rank, found in enumerate(on_ranks(count, read_some, tmp_path, text)):
            for name, tensor in some().items():
                each = -(-len(tensor) // count)
                assert torch.equal(found[name], tensor[rank * each : (rank + 1) * each]), (count, rank, name)


def test_parts_that_two_processes_have_written_are_read(tmp_path: Path) -> None:
    """Without processes: three rows, then two."""
    tensor, found = torch.randn(5, 2), parts.Parts(tmp_path, 2)
    for number, rows in enumerate((slice(0, 3), slice(3, 5))):
        write_tensors(found.path(number), {"a": tensor[rows]}, {parts.ROWS: json.dumps({"a": [rows.start, 5]})})
    found.check()
    assert torch.equal(parts.read(found)["a"], tensor)
    found.path(1).unlink()
    with pytest.raises(UserError, match="does not exist"):
        found.check()


def test_parts_that_no_file_names_are_removed(tmp_path: Path) -> None:
    names = ["parts-000001", "parts-000002", "parts-000003"]
    for name in names:
        (tmp_path / name).mkdir()
        for number in range(2):
            write_tensors(tmp_path / name / f"{number}-of-2.safetensors", {"a": torch.zeros(1)}, {})
    text = {parts.CUT: json.dumps({"folder": names[1], "count": 2})}
    write_tensors(tmp_path / "previous.safetensors", {"a": torch.zeros(1)}, text)
    (tmp_path / "last.safetensors").write_bytes(b"damaged")
    parts.remove_unnamed(tmp_path)
    assert [path.name for path in tmp_path.glob("parts-*")] == names[1:2]


@pytest.mark.parametrize("named", ["[]", '{"folder": "../../elsewhere", "count": 1}', '{"folder": "parts-000001"}'])
def test_a_name_that_is_none_is_refused(named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is damaged: it names no parts"):
        parts.named_by(tmp_path / "last.safetensors", {parts.CUT: named})


# A run


def stop_it(folder: Path) -> None:
    with fewer_test_images(2):
        stopped(folder, 4, **{**SMALL, "shard": True})  # in the second task


@pytest.mark.slow
def test_a_part_that_is_damaged_or_gone_leaves_the_checkpoint_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a single process continues what two have begun."""
    train(tmp_path / "1")
    on_ranks(2, stop_it, tmp_path / "run")
    for name in ("intact", "damaged", "gone"):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "run", folder)
        last = folder / "checkpoints" / "last.safetensors"
        found = parts.named_by(last, read_text(last))
        assert found is not None and found.count == 2 and load_file(found.path(1))
        if name == "gone":
            found.path(1).unlink()
        if name == "damaged":
            data = bytearray(found.path(1).read_bytes())
            data[-1] ^= 1
            found.path(1).write_bytes(data)
        caplog.clear()
        mambacl.resume(folder)
        assert ("Trying the previous checkpoint" in caplog.text) == (name != "intact")
        assert_same_outcome(folder, tmp_path / "1")
        assert parts_in(folder) == named_in(folder)


@pytest.mark.long
def test_a_run_of_cut_weights_is_loaded_and_its_folder_used_again(tmp_path: Path) -> None:
    folder, again = tmp_path / "run", {**SMALL, "shard": True, "training": {**SGD, "passes": 1}}
    on_ranks(2, train_cut, folder)
    assert parts_in(folder) == named_in(folder) and parts_in(folder)
    assert "model.layers" not in "".join(load_file(folder / "checkpoints" / "last.safetensors"))
    found = mambacl.evaluate(folder)
    for evaluation in on_ranks(2, evaluate_cut, folder):
        assert evaluation.recorded == found.recorded
        assert max(abs(a - b) for a, b in zip(evaluation.counted, found.counted, strict=True)) <= 1
    assert len(mambacl.load(folder, "cpu").classes) == sum(TASKS)
    start = {"pretrained": str(folder), "method": "analytic"}
    mambacl.train(CONFIG, out=str(tmp_path / "next"), device="cpu", **{**SMALL, **start})
    mambacl.train(CONFIG, out=str(folder), device="cpu", overwrite=True, **again)
    assert not parts_in(folder)


def train_cut(folder: Path) -> None:
    with fewer_test_images(2):
        train(folder, shard=True)


def evaluate_cut(folder: Path) -> Evaluation:
    with fewer_test_images(2):
        return mambacl.evaluate(folder)


# Kills


def observed_train(folder: Path, to: Path) -> list[Path]:
    """The states of the folder before each file operation of this process. Processes write their parts in turns, so
    that none copies what another one is changing."""

    def in_turns(*arguments: Any) -> None:
        for number in range(processes.count()):
            if processes.rank() == number:
                write_tensors(*arguments)
            processes.wait()

    parts.write_tensors = in_turns  # type: ignore[attr-defined]
    RunFolder.write_progress = lambda *_: None  # type: ignore[assignment,method-assign]
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    return [state.folder for state in states(folder, to / str(processes.rank()), lambda: train_cut(folder))]


@needs_linux
@pytest.mark.slow
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_before_each_file_operation_of_each_process(every: int, tmp_path: Path) -> None:
    train(tmp_path / "1")
    found = on_ranks(2, observed_train, tmp_path / "run", tmp_path / "states")
    assert len(found[0]) > 40 and len(found[1]) > 10
    within = 0
    for folder in [*found[0][::every], *found[1][::every]]:
        print(folder)
        if not RunFolder(folder).exists():
            continue
        within += bool(parts_in(folder) - named_in(folder))
        assert named_in(folder) <= parts_in(folder)
        rows = RunFolder(folder).results().get("correct", [])
        if rows:
            assert len(mambacl.load(folder, "cpu").classes) == sum(TASKS[: len(rows)])
            assert len(mambacl.evaluate(folder).counted) == len(rows)
        mambacl.resume(folder)
        assert_same_outcome(folder, tmp_path / "1")
        assert parts_in(folder) == named_in(folder)
        shutil.rmtree(folder)
    assert within > 3  # kills while there are parts that no checkpoint names yet, or not any more
