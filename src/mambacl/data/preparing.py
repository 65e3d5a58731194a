"""Turns archives and split lists, local or downloaded, into a folder to train from.

It can be interrupted at any moment: correct files stay, and the same command continues. It never moves, deletes or
overwrites the user's files, and writes nothing outside the folder.
"""

import gzip
import lzma
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from mambacl.data.dataset import DataSet
from mambacl.data.images import FileImages
from mambacl.data.sets import SOURCES, Download, Source, open_dataset
from mambacl.errors import UserError
from mambacl.files import download, expanded, locked, make_folder, require_space, write_stream
from mambacl.registry import did_you_mean
from mambacl.status import counted

Say = Callable[[str], None]


def prepare(
    name: str,
    root: str | Path,
    sources: Sequence[str | Path] = (),
    lists: str | Path | None = None,
    say: Say = lambda line: None,
) -> DataSet:
    """Puts a public data set into `root`. `sources` are its archives, a folder of them, or URLs; `lists` is a folder
    with the public split lists. Everything else is downloaded."""
    source = SOURCES.get(name)
    if source is None:
        known = ", ".join(key for key, entry in SOURCES.items() if entry.downloads)
        raise UserError(f"There is no data set '{name}' to prepare.{did_you_mean(name, SOURCES)} Known: {known}.")
    if not source.downloads:
        raise UserError(
            f"'{name}' needs no preparation: its root holds {source.layout}; check it with `mambacl data check {name}`."
        )
    if not str(root):
        raise UserError("The root is empty: name the folder to put the data set into.")
    if lists is not None and not source.lists:
        raise UserError(f"'{name}' has no split lists: remove --lists.")
    given = [str(entry) for entry in sources]
    _refuse_unused(given, source)
    root = expanded(root)
    make_folder(root)
    with locked(root / ".lock", f"is preparing {root}: wait for it."):
        for wanted in source.lists:
            _put(wanted, root, _given_list(wanted, lists), say)
        if changed := not_public(name, root):
            raise UserError(f"{changed[0]}: move it away, or choose another root.")
        complete = _is_complete(name, root, source)
        if complete:
            say("The images are already complete.")
        for wanted in () if complete else source.downloads:
            one = _given_source(wanted, given, len(source.downloads))
            if not wanted.unpack:
                _put(wanted, root, one, say)
                continue
            archive = _obtain(wanted, one, root / "downloads" / wanted.name, say)
            say(f"Unpacking {archive}")
            written, present = unpack(archive, root / wanted.folder)
            say(f"{written:,} files written, {present:,} already existed")
    return open_dataset(name, root)


def missing(dataset: DataSet) -> int:
    """The number of files that do not exist."""
    splits = [images for images in (dataset.train, dataset.test) if isinstance(images, FileImages)]
    return sum(not path.exists() for images in splits for path in images.files)


def not_public(name: str, root: str | Path) -> list[str]:
    """Files with the name of a public file but different content, in words; archives are not checked."""
    source = SOURCES.get(name)
    plain = [wanted for wanted in source.downloads if not wanted.unpack] if source else []
    folder = expanded(root)
    named = [(folder / wanted.folder / wanted.name, wanted) for wanted in plain]
    found = [(path if path.exists() else path.with_suffix(""), wanted) for path, wanted in named]
    return [_mismatch(path, wanted) for path, wanted in found if path.is_file() and not wanted.matches(path)]


def _is_complete(name: str, root: Path, source: Source) -> bool:
    """Whether every image of the public data set exists, wherever it came from."""
    try:
        dataset = open_dataset(name, root)
    except (UserError, OSError):
        return False
    counts = (len(dataset.class_names), len(dataset.train.labels), len(dataset.test.labels))
    return counts == source.counts and not missing(dataset)


def _given_list(wanted: Download, lists: str | Path | None) -> str | None:
    if lists is None:
        return None
    path = expanded(lists) / wanted.name
    if not path.is_file():
        raise UserError(f"{path} does not exist: --lists takes a folder with {wanted.name}.")
    return str(path)


def _refuse_unused(given: Sequence[str], source: Source) -> None:
    """Refuses a source that the data set does not use."""
    names = [wanted.name for wanted in source.downloads]
    for entry in given:
        path = expanded(entry)
        if "://" not in entry and not path.exists():
            raise UserError(f"{entry} does not exist: --source takes an archive, a folder of them or a URL.")
        named = entry.rstrip("/").rpartition("/")[2] in names
        fits = any((path / name).is_file() for name in names) if path.is_dir() else named or len(names) == 1
        if not fits:
            raise UserError(
                f"--source {entry} neither is nor contains one of {', '.join(names)}: rename the file accordingly."
            )


def _given_source(wanted: Download, given: Sequence[str], downloads: int) -> str | None:
    """The given source for this download: matched by file name, found in a folder, or the only one."""
    for entry in given:
        path = expanded(entry)
        if path.is_dir() and (path / wanted.name).is_file():
            return str(path / wanted.name)
        if entry.rstrip("/").rpartition("/")[2] == wanted.name:
            return entry
    single = [entry for entry in given if not expanded(entry).is_dir()]
    if downloads == 1 and len(single) == 1:
        return single[0]
    return None


def _put(wanted: Download, root: Path, given: str | None, say: Say) -> None:
    """Puts a file that needs no unpacking in place."""
    path = root / wanted.folder / wanted.name
    refuse_dangling(path)
    file = _obtain(wanted, None if path.exists() else given, path, say)
    if file != path:
        with open(file, "rb") as source:
            write_stream(path, source)


def _obtain(wanted: Download, given: str | None, path: Path, say: Say) -> Path:
    """The given local file, or `path`, downloaded if it does not exist. Verifies the checksum."""
    if given is not None and "://" not in given:
        local = expanded(given)
        if not local.is_file():
            raise UserError(f"{local} does not exist: --source takes an archive, a folder of them or a URL.")
        _verify(local, wanted, "get the right one")
        return local
    if path.exists():
        _verify(path, wanted, "move it away")
        return path
    option = "--lists" if wanted.folder == "lists" else "--source"
    otherwise = f"fetch it elsewhere and give its path with {option}"
    download(given or wanted.url, path, wanted.checksum, otherwise, wanted.content, say)
    return path


def _verify(path: Path, wanted: Download, remedy: str) -> None:
    if not wanted.matches(path):
        raise UserError(f"{_mismatch(path, wanted)}: {remedy}.")


def _mismatch(path: Path, wanted: Download) -> str:
    kind, _, expected = wanted.checksum.partition(":")
    return f"{path} is not {wanted.name} ({kind.upper()} {expected} expected)"


# Archives


Member = tuple[str, int, Callable[[], IO[bytes]]]  # name, size, and a function that opens it


def unpack(archive: Path, folder: Path) -> tuple[int, int]:
    """Returns how many files were written, and how many existed already with the same size."""
    written = present = 0
    try:
        wanted = [(target(folder, name, archive), size) for name, size, _ in members(archive)]
        refuse_others(wanted, archive)  # before the first file is written
        require_space(folder, sum(size for path, size in wanted if not path.exists()))
        for name, _, opened in counted(members(archive), len(wanted), "files"):
            path = target(folder, name, archive)
            if path.exists():
                present += 1
                continue
            with opened() as source:
                write_stream(path, source)
            written += 1
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise UserError(f"{archive} is damaged ({error}): download it again; unpacked files stay.") from None
    return written, present


def members(archive: Path) -> Iterator[Member]:
    """The files of a zip or tar archive, in order. Skips folders and refuses links and devices."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                mode = info.external_attr >> 16
                if stat.S_ISLNK(mode):
                    raise UserError(f"{archive} contains '{info.filename}', a link: use another archive.")
                if not info.is_dir():
                    yield info.filename, info.file_size, partial(zipped.open, info)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tar:
            for entry in tar:
                if not entry.isdir() and not entry.isreg():
                    raise UserError(f"{archive} contains '{entry.name}', a link or device: use another archive.")
                if entry.isreg():
                    yield entry.name, entry.size, partial(tar.extractfile, entry)  # type: ignore[misc]
    else:
        raise UserError(f"{archive} is neither a zip nor a tar archive, or is damaged: download it again.")


def target(folder: Path, name: str, archive: Path) -> Path:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match("[A-Za-z]:", name) or "\0" in name:
        raise UserError(
            f"{archive} would write outside {folder} ('{name}'): nothing was unpacked; use another archive."
        )
    return folder / path


def refuse_others(wanted: list[tuple[Path, int]], archive: Path) -> None:
    """Refuses files of another size: a file with its final name is complete, so they are not ours."""
    for path, size in wanted:
        refuse_dangling(path)
        if path.is_dir() or (path.exists() and path.stat().st_size != size):
            raise UserError(
                f"{path} already exists and differs from the file in {archive}: move it away, or choose another root."
            )


def refuse_dangling(path: Path) -> None:
    """Refuses a dangling link: it belongs to the user, although it leads to no file."""
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path} is a dangling link: remove it, or choose another root.")
