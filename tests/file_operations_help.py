"""What a folder holds between any two file operations of a process, which is what a kill there leaves; and a disk that
is full from one of them on."""

import builtins
import errno
import hashlib
import io
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

needs_linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="file descriptors have no names here")
CHANGES = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate")
FREES = ("os.remove", "os.rmdir", "os.truncate")  # what a full disk allows
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
BY_TIME = ("progress.json", ".lock")  # files that differ by the time of day alone
Before = Callable[[str, Path], None]

_observer: Before | None = None
_one_at_a_time = threading.RLock()
_installed: list[bool] = []


@contextmanager
def observed(root: Path, before: Before) -> Iterator[None]:
    """Calls `before(operation, path)` before each operation that changes something under `root`, and before each flush
    to disk. Other threads wait meanwhile at their next operation."""
    global _observer
    fsync, inside = os.fsync, str(root.resolve()) + os.sep

    def observe(operation: str, path: Path) -> None:
        if str(path).startswith(inside) or str(path) + os.sep == inside:
            with _one_at_a_time:
                before(operation, path)

    def flush(descriptor: int) -> None:
        observe("fsync", _path(descriptor))
        fsync(descriptor)

    if not _installed:  # it stays until the process ends
        sys.addaudithook(_audit)
        _installed.append(True)
    _observer, os.fsync = observe, flush  # type: ignore[assignment]
    try:
        yield
    finally:
        _observer, os.fsync = None, fsync


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _observer is None or event not in CHANGES:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITES):
        return
    place = -1
    if event in ("os.rename", "os.link"):  # what changes is the second
        path, place = arguments[1], arguments[3]
    else:
        path = arguments[0]
        place = {"os.remove": 1, "os.mkdir": 2, "os.rmdir": 1}.get(event, -1)
        place = arguments[place] if place > 0 else -1
    found = _path(path) if isinstance(path, int) else Path(os.fsdecode(path))
    if isinstance(place, int) and place >= 0 and not found.is_absolute():
        found = _path(place) / found
    _observer(event, Path(os.path.abspath(found)))


def _path(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


# Kills


@dataclass(frozen=True)
class State:
    """A copy of the folder as it was before an operation."""

    before: str
    folder: Path

    def __str__(self) -> str:
        return f"killed before {self.before}"


def states(root: Path, to: Path, work: Callable[[], Any], unfinished: bool = False) -> list[State]:
    """The states of the folder `root` while `work` is done, each different one once, and the one after it.
    `unfinished`: also those that differ only by a file that is being written."""
    found: list[State] = []
    seen: set[str] = set()

    def keep(operation: str, path: Path) -> None:
        if not root.exists() or (digest := _digest(root, unfinished)) in seen:
            return
        seen.add(digest)
        name = re.sub(r"\.\d+\.", ".", os.path.relpath(path, root))
        state = State(f"operation {len(found)}: {operation} {name}", to / f"{len(found):03d}")
        copy(root, state.folder)
        found.append(state)

    with observed(root, keep):
        work()
    keep("the end", root)
    return found


def _digest(root: Path, unfinished: bool) -> str:
    """Of all names and contents; of unfinished files, at most the names."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        whole = path.suffix != ".part"
        if path.name in BY_TIME or not (whole or unfinished):
            continue
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        if path.is_file() and whole:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def copy(root: Path, to: Path) -> Path:
    """Copies a folder. Two names of one file stay two names of one file."""
    first: dict[int, Path] = {}
    to.mkdir(parents=True)
    for path in sorted(root.rglob("*")):
        other = to / path.relative_to(root)
        if path.is_dir():
            other.mkdir()
        elif (number := path.stat().st_ino) in first:
            os.link(first[number], other)
        else:
            first[number] = Path(shutil.copyfile(path, other))
    return to


# A full disk


class _File:
    """A file that can be written to. Before each write, `before` can raise; half is written then."""

    def __init__(self, file: Any, before: Callable[[], None]) -> None:
        self.file, self.before = file, before

    def write(self, data: Any) -> Any:
        try:
            self.before()
        except OSError:
            self.file.write(data[: len(data) // 2])
            raise
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.close()


@contextmanager
def full_from(root: Path, number: int) -> Iterator[list[str]]:
    """From this operation on, counting from 0, nothing more fits on the disk. Yields the operations, as they come."""
    done: list[str] = []

    def before(operation: str, path: Path) -> None:
        done.append(f"{operation} {path.name}")
        if len(done) > number and operation not in FREES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    opened = io.open

    def opening(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        made = opened(file, mode, *arguments, **options)
        path = None if isinstance(file, int) else Path(os.path.abspath(file))
        if path is None or root.resolve() not in path.parents or not set(mode) & set("wa+x"):
            return made
        return _File(made, lambda: before("write", path))

    builtins.open = io.open = opening
    try:
        with observed(root, before):
            yield done
    finally:
        builtins.open = io.open = opened
