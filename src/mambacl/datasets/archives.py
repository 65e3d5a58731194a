"""Unpacking that can be interrupted at any moment, writes nowhere but below its folder, and overwrites nothing."""

import errno
import gzip
import lzma
import os
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from mambacl.errors import UserError

PART = ".mambacl-part"  # what a file is called until it is whole


@dataclass(frozen=True)
class Member:
    name: str
    size: int
    open: Callable[[], IO[bytes] | None]


def unpack(archive: Path, folder: Path) -> tuple[int, int]:
    """How many files were written, and how many were there already with the same size."""
    written = present = 0
    try:
        wanted = [
            (target(folder, member.name, archive), member.size) for member in members(archive)
        ]  # before any write
        refuse_others(wanted, archive)
        need = sum(size for path, size in wanted if not path.exists())
        require_space(folder, need)
        for member in members(archive):
            path = target(folder, member.name, archive)
            if path.exists():
                present += 1
                continue
            source = member.open()
            if source is not None:
                with source:
                    place(source, path)
                written += 1
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise UserError(f"{archive} is damaged ({error}): download it again; what was unpacked stays.") from None
    return written, present


def members(archive: Path) -> Iterator[Member]:
    """The files of a zip or tar archive, in its order; folders are left out, links and devices are refused."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                mode = info.external_attr >> 16
                if stat.S_ISLNK(mode):
                    raise UserError(f"{archive} holds the link '{info.filename}', which is not unpacked: get another.")
                if not info.is_dir():
                    yield Member(info.filename, info.file_size, lambda info=info: zipped.open(info))  # type: ignore[misc]
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tar:
            for entry in tar:
                if not entry.isdir() and not entry.isreg():
                    raise UserError(f"{archive} holds '{entry.name}', a link or device, which is not unpacked: "
                                    "get another archive.")  # fmt: skip
                if entry.isreg():
                    yield Member(entry.name, entry.size, lambda entry=entry: tar.extractfile(entry))  # type: ignore[misc]
    else:
        raise UserError(f"{archive} is neither a zip nor a tar archive, or is damaged: download it again.")


def target(folder: Path, name: str, archive: Path) -> Path:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match("[A-Za-z]:", name) or "\0" in name:
        raise UserError(
            f"{archive} would write outside {folder} ('{name}'): nothing was unpacked; get another archive."
        )
    return folder / path


def refuse_others(wanted: list[tuple[Path, int]], archive: Path) -> None:
    """Files under final names are whole, so one of another size is not ours."""
    for path, size in wanted:
        refuse_dangling(path)
        if path.is_dir() or (path.exists() and path.stat().st_size != size):
            raise UserError(
                f"{path} is there already and is not what {archive} holds: move it away, or choose another root."
            )


def refuse_dangling(path: Path) -> None:
    """A link to nothing is the user's, though there is no file."""
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path} is a link to nothing: remove it, or choose another root.")


def require_space(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        raise UserError(f"{folder} has room for {gigabytes(free)}, but {gigabytes(need)} are needed: make room.")


def place(source: IO[bytes], path: Path) -> None:
    """The stream as a file, which has its name only when it is whole."""
    make_folder(path.parent)
    part = path.parent / PART
    try:
        with open(part, "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise refusal(error, path) from None


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal(error, folder) from None


def refusal(error: OSError, path: Path) -> Exception:
    """A sentence for a disk that is full or may not be written; the error itself otherwise."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"The disk is full at {path}: make room and give the same command again; what is done stays.")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return UserError(f"{path} may not be written ({error.strerror}): choose a root that you may write to.")
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return UserError(f"{path} is a file where a folder is needed: move it away, or choose another root.")
    return error


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
