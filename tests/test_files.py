"""Files: what is written comes back, damage is noticed, and a failure leaves the file before it."""

import gzip
import hashlib
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mambacl import files
from mambacl.errors import UserError
from mambacl.files import has_checksum, keep_as, locked, read_tensors, write_bytes, write_tensors

TENSORS = {
    "float64": torch.randn(3, 4, dtype=torch.float64),
    "float32": torch.randn(7),
    "bfloat16": torch.randn(2, 3).bfloat16(),
    "int64": torch.arange(5),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


def test_round_trip_keeps_values_types_and_text(path):
    write_tensors(path, TENSORS, {"setting": '{"eta": 0.95}', "note": "Δ"})
    tensors, text = read_tensors(path)
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name
    assert text == {"setting": '{"eta": 0.95}', "note": "Δ"}
    assert torch.equal(load_file(path)["float32"], TENSORS["float32"])  # any safetensors reader can open it


def test_a_foreign_safetensors_file_without_checksum_is_read(path):
    save_file({"w": torch.ones(2)}, path, metadata={"from": "elsewhere"})
    tensors, text = read_tensors(path)
    assert torch.equal(tensors["w"], torch.ones(2)) and text == {"from": "elsewhere"}


def test_strided_tensors_and_parameters_are_written_as_they_look(path):
    base = torch.arange(12.0).view(3, 4)
    write_tensors(path, {"transposed": base.T, "row": base[1], "parameter": torch.nn.Parameter(base[:, ::2])}, {})
    tensors, _ = read_tensors(path)
    assert torch.equal(tensors["transposed"], base.T) and torch.equal(tensors["row"], base[1])
    assert torch.equal(tensors["parameter"], base[:, ::2]) and not tensors["parameter"].requires_grad


def test_a_tensor_with_two_names_is_written_once_and_read_under_both(path):
    shared = torch.randn(100, 100)
    write_tensors(path, {"a": shared, "b": shared, "c": shared.clone()}, {"k": "v"})
    tensors, text = read_tensors(path)
    assert sorted(load_file(path)) == ["a", "c"]
    assert path.stat().st_size < 2.1 * shared.numel() * 4
    assert all(torch.equal(tensors[name], shared) for name in "abc") and text == {"k": "v"}


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(lambda base: base.T, id="the same memory transposed"),
        pytest.param(lambda base: base.view(torch.int32), id="the same memory as another type"),
        pytest.param(lambda base: base[:2], id="the first rows"),
    ],
)
def test_tensors_that_only_share_memory_keep_their_own_values(path, second):
    base = torch.randn(4, 4)
    write_tensors(path, {"base": base, "other": second(base)}, {})
    tensors, _ = read_tensors(path)
    assert torch.equal(tensors["base"], base)
    assert tensors["other"].dtype == second(base).dtype and torch.equal(tensors["other"], second(base))


def test_missing_bytes_and_every_flipped_byte_are_noticed(path):
    write_tensors(path, {"w": torch.arange(6.0), "n": torch.tensor(3)}, {"k": "v"})
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(UserError, match="damaged"):
        read_tensors(path)
    data_starts = 8 + int.from_bytes(whole[:8], "little")
    for position in range(data_starts, len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged: its contents do not match"):
            read_tensors(path)


def test_a_tensor_under_another_name_is_noticed(path):
    write_tensors(path, {"weight_a": torch.ones(2), "weight_b": torch.zeros(2)}, {})
    path.write_bytes(path.read_bytes().replace(b"weight_a", b"weight_0"))
    with pytest.raises(UserError, match="damaged"):
        read_tensors(path)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"PK\x03\x04 not tensors at all"])
def test_what_is_no_tensor_file_is_called_damaged(path, content):
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        read_tensors(path)


def test_a_missing_file_is_named(path):
    with pytest.raises(UserError, match=r"state\.safetensors does not exist"):
        read_tensors(path)


def test_writing_over_a_file_replaces_it_and_leaves_nothing_else(path):
    write_tensors(path, {"w": torch.zeros(2)}, {})
    write_tensors(path, {"w": torch.ones(3)}, {})
    assert torch.equal(read_tensors(path)[0]["w"], torch.ones(3))
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_while_writing_leaves_the_old_file(path, monkeypatch, failing):
    write_tensors(path, {"w": torch.zeros(2)}, {})

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, failing, fail)
    with pytest.raises(OSError, match="no space left"):
        write_tensors(path, {"w": torch.ones(2)}, {})
    monkeypatch.undo()
    assert torch.equal(read_tensors(path)[0]["w"], torch.zeros(2))


def test_bytes_are_written_whole(path):
    write_bytes(path, b"one")
    write_bytes(path, b"two words")
    assert path.read_bytes() == b"two words" and os.listdir(path.parent) == [path.name]


def test_a_second_name_is_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    old, new, link = tmp_path / "old", tmp_path / "new", tmp_path / "link"
    for path in (old, new):
        write_bytes(path, path.name.encode())
    keep_as(old, link)
    assert link.samefile(old) and link.stat().st_nlink == 2
    keep_as(old, link)  # as it is

    def nothing_was_lost() -> None:
        assert link.read_bytes() == b"old" and old.exists() and new.read_bytes() == b"new"

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", lambda *_: nothing_was_lost())
        keep_as(new, link)
    nothing_was_lost()
    files.remove_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["link", "new", "old"]
    keep_as(new, link)
    assert link.samefile(new) and old.read_bytes() == b"old"


def test_without_links_a_second_name_is_a_copy(tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(files.os, "link", refused)
    write_bytes(tmp_path / "one", b"content")
    keep_as(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_bytes() == b"content" and not (tmp_path / "two").samefile(tmp_path / "one")
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]


def test_the_text_alone(path):
    write_tensors(path, TENSORS, {"k": "v"})
    assert files.read_text(path)["k"] == "v"
    path.write_bytes(b"rubbish")
    with pytest.raises(UserError, match="damaged"):
        files.read_text(path)


# Locks

HOLDER = """
import sys
from pathlib import Path
from mambacl.files import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(files.fcntl is None, reason="nothing can be locked here")
def test_one_process_at_a_time(tmp_path):
    lock = tmp_path / ".lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        who = rf"Another process \({holder.pid} on {re.escape(platform.node())}, since 20.*\) is at work"
        with pytest.raises(UserError, match=who), locked(lock, "is at work"):
            pass
    finally:
        holder.kill()
        holder.communicate()
    assert lock.exists()  # a killed process leaves the file, and no lock
    with locked(lock, "is at work"):
        assert lock.read_text().startswith(f"process {os.getpid()} on ")
    assert not lock.exists()


FORKING = """
import os
import sys
import time
from pathlib import Path
from mambacl.files import locked
with locked(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:  # it has given up the lock now
        print(os.getpid(), flush=True)
        time.sleep(60)
    sys.stdin.read()
"""


@pytest.mark.skipif(files.fcntl is None, reason="nothing can be locked here")
def test_a_lock_ends_with_its_process_whatever_that_has_started(tmp_path):
    """A worker of a killed process can live on for seconds."""
    lock = tmp_path / ".lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", FORKING, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    worker = int(holder.stdout.readline())
    try:
        holder.kill()
        holder.wait()
        os.kill(worker, 0)  # it lives
        with locked(lock, "is at work"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        holder.communicate()


@pytest.mark.skipif(files.fcntl is None, reason="nothing can be locked here")
def test_a_forked_process_leaves_its_parents_lock(tmp_path):
    """Even if it runs to the end of the block."""
    lock = tmp_path / ".lock"
    with locked(lock, "is at work"):
        child = os.fork()
        if child == 0:
            try:
                with locked(tmp_path / "own", "is at work"):
                    pass
                raise SystemExit
            finally:
                os._exit(0 if lock.exists() else 1)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(UserError, match=rf"\({os.getpid()} on .*\) is at work"), locked(lock, "is at work"):
            pass
    assert not lock.exists()


@pytest.mark.skipif(files.fcntl is None, reason="nothing can be locked here")
@pytest.mark.parametrize("content", [b"", b"rubbish", b"process \xff", b"process \x1b[2J"])
def test_a_lock_that_does_not_say_who_holds_it(tmp_path, content):
    lock = tmp_path / ".lock"
    with locked(lock, "is at work"):
        lock.write_bytes(content)
        with pytest.raises(UserError, match=r"^Another process is at work$"), locked(lock, "is at work"):
            pass


@pytest.mark.skipif(files.fcntl is None, reason="nothing can be locked here")
def test_a_lock_removed_while_another_waits_is_taken_again(tmp_path):
    """Never two at a time, however the waiting ones come and go."""
    lock, inside, seen = tmp_path / ".lock", [], []

    def enter():
        for _ in range(50):
            with locked(lock):
                inside.append(1)
                seen.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * 200 and not lock.exists()


def test_where_nothing_can_be_written_nothing_is_locked(tmp_path):
    with locked(tmp_path / "no folder" / ".lock", "is at work"):
        pass
    assert not list(tmp_path.iterdir())


# Checksums


@pytest.mark.parametrize("kind", ["md5", "sha256"])
def test_checksums_of_a_file_and_of_its_content(tmp_path, kind):
    def checksum(data):
        return f"{kind}:{hashlib.new(kind, data).hexdigest()}"

    packed = gzip.compress(b"content", mtime=0)
    (tmp_path / "a.gz").write_bytes(packed)
    (tmp_path / "a").write_bytes(b"content")
    assert has_checksum(tmp_path / "a.gz", checksum(packed)) and not has_checksum(tmp_path / "a.gz", checksum(b"other"))
    assert has_checksum(tmp_path / "a.gz", checksum(b"other"), checksum(b"content"))
    assert has_checksum(tmp_path / "a", checksum(b"other"), checksum(b"content"))
    (tmp_path / "a.gz").write_bytes(packed[:-4])
    assert not has_checksum(tmp_path / "a.gz", checksum(packed), checksum(b"content"))
