"""Tensors that are cut among the processes of a run, on disk: each process writes the rows that it holds.

    last.safetensors             the other tensors; its text names the folder
    parts-000001/0-of-2.safetensors    rows of the first of two processes, and where they lie in the tensors

`write` writes the parts first, and returns the text for the file that names them: writing that file is the step that
counts. A folder never changes once it is named, and `remove_unnamed` removes it when no file names it any more. Nobody
gathers whole tensors to write them, and any number of processes can read them: `read`.

The format of torch.distributed.checkpoint does the same, but its metadata are a pickle, which can run anything when
it is read.
"""

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambacl import processes
from mambacl.errors import UserError
from mambacl.files import check_tensors, opened, read_text, sync_folder, write_tensors
from mambacl.nullspace.shards import rows_of, rows_on_this_rank, with_rows
from mambacl.nullspace.sharing import failing_together, is_cut

CUT, ROWS = "cut", "rows"  # entries of a file's text: the folder with its parts; the rows in a part, by tensor
FOLDER = re.compile(r"parts-(\d{6,})")


@dataclass(frozen=True)
class Parts:
    """The files that so many processes have written into a folder."""

    folder: Path
    count: int

    def path(self, number: int) -> Path:
        return self.folder / f"{number}-of-{self.count}.safetensors"

    def paths(self) -> list[Path]:
        return [self.path(number) for number in range(self.count)]

    def check(self, number: int = 0, of: int = 1) -> None:
        """Raises a `UserError` if a file is missing or damaged. `of`: so many processes share the files."""
        for path in self.paths()[number::of]:
            check_tensors(path)


def write(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Writes those that are cut. Returns the others, and the text that names the parts. All processes call it."""
    cut = {name: tensor for name, tensor in tensors.items() if is_cut(tensor)}
    if not cut:
        return dict(tensors), {}
    parts = Parts(folder / processes.decide(lambda: _new_folder(folder)), processes.count())
    own, rows = {}, {}
    for name, tensor in cut.items():
        held, local = rows_of(tensor), tensor.to_local()  # type: ignore[attr-defined]
        if len(local) and (held is not None or processes.is_first()):
            own[name], rows[name] = local, (0 if held is None else held.start, len(tensor))
    with failing_together():
        write_tensors(parts.path(processes.rank()), own, {ROWS: json.dumps(rows)})
    rest = {name: tensor for name, tensor in tensors.items() if name not in cut}
    return rest, {CUT: json.dumps({"folder": parts.folder.name, "count": parts.count})}


def _new_folder(folder: Path) -> str:
    numbers = [int(found[1]) for path in folder.iterdir() if (found := FOLDER.fullmatch(path.name))]
    name = f"parts-{max(numbers, default=0) + 1:06d}"
    (folder / name).mkdir()
    sync_folder(folder)
    return name


def named_by(path: Path, text: Mapping[str, str]) -> Parts | None:
    """The parts that belong to a file with this text; None if it is complete."""
    if CUT not in text:
        return None
    try:
        found = json.loads(text[CUT])
        name, count = str(found["folder"]), int(found["count"])
    except (KeyError, TypeError, ValueError):
        name, count = "", 0
    if not FOLDER.fullmatch(name) or count < 1:
        raise UserError(f"{path} is damaged: it names no parts that this version reads.")
    return Parts(path.parent / name, count)


def read(parts: Parts, like: Tensor | None = None) -> dict[str, Tensor]:
    """The tensors. If `like` is a parameter that is cut, they are cut like it, and this process reads only its rows."""
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        pieces: dict[str, list[tuple[int, int, Any]]] = {}  # by tensor: first row, rows of all, and the piece
        for path in parts.paths():
            file = stack.enter_context(opened(path))
            for name, (start, size) in json.loads(file.metadata()[ROWS]).items():
                pieces.setdefault(name, []).append((start, size, file.get_slice(name)))
        for name, some in pieces.items():
            size = some[0][1]
            here = None if like is None else rows_on_this_rank(size, like)
            own = _rows(some, *((0, size) if here is None else (here.start, here.end)))
            found[name] = own if like is None else with_rows(own, size, like)
    return found


def _rows(pieces: list[tuple[int, int, Any]], start: int, end: int) -> Tensor:
    """The rows from `start` to before `end`."""
    found = []
    for first, _, piece in sorted(pieces, key=lambda piece: piece[0]):
        begin, until = max(start, first), min(end, first + piece.get_shape()[0])
        if begin < until:
            found.append(piece[begin - first : until - first])
    return torch.cat(found) if found else pieces[0][2][:1][:0].clone()  # as a copy: the file can be removed


def remove_unnamed(folder: Path) -> None:
    """Removes the parts that no file in the folder names."""
    there = [path for path in folder.glob("parts-*") if FOLDER.fullmatch(path.name)]
    named = {_named(path) for path in folder.glob("*.safetensors")} if there else set()
    for path in there:
        if path not in named:
            shutil.rmtree(path, ignore_errors=True)


def _named(path: Path) -> Path | None:
    try:
        parts = named_by(path, read_text(path))
    except UserError:
        return None
    return None if parts is None else parts.folder
