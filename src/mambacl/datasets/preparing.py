"""From archives and lists, at hand or on the network, to a folder that can be trained from.

Whatever is there and right is left as it is, so that the same command again continues where it was interrupted.
Nothing of the user's is moved, deleted or overwritten.
"""

import gzip
import hashlib
import http.client
import os
import shutil
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mambacl.datasets.archives import gigabytes, make_folder, place, refusal, refuse_dangling, require_space, unpack
from mambacl.datasets.base import DataSet, FileImages, open_dataset
from mambacl.datasets.sources import SOURCES, Download, Source
from mambacl.errors import UserError
from mambacl.paths import expanded
from mambacl.registry import did_you_mean

try:
    import fcntl
except ImportError:  # not on Windows: there nothing keeps two processes apart
    fcntl = None  # type: ignore[assignment]

Say = Callable[[str], None]


def prepare(
    name: str,
    root: str | Path,
    sources: Sequence[str | Path] = (),
    lists: str | Path | None = None,
    say: Say = lambda line: None,
) -> DataSet:
    """Makes `root` hold a public data set. `sources` are its archives, a folder of them, or addresses; `lists` a folder
    with the public split lists. What is not given is downloaded."""
    source = SOURCES.get(name)
    if source is None:
        known = ", ".join(key for key, entry in SOURCES.items() if entry.downloads)
        raise UserError(f"There is nothing to prepare for '{name}'.{did_you_mean(name, SOURCES)} Known: {known}.")
    if not source.downloads:
        raise UserError(f"'{name}' needs no preparing: the root holds {source.layout}; `mambacl data check {name}`.")
    if not str(root):
        raise UserError("The root is an empty name: give the folder that is to hold the data set.")
    if lists is not None and not source.lists:
        raise UserError(f"'{name}' has no split lists: leave --lists out.")
    given = [str(entry) for entry in sources]
    _refuse_strange(given, source)
    root = expanded(root)
    make_folder(root)
    with _alone(root):
        for wanted in source.lists:
            _put(wanted, root, _list_place(wanted, lists), say)
        if changed := not_public(name, root):
            raise UserError(f"{changed[0]}: move it away, or choose another root.")
        whole = _whole(name, root, source)
        if whole:
            say("The images are there already.")
        for wanted in () if whole else source.downloads:
            place_of = _matching(wanted, given, len(source.downloads))
            if wanted.unpack:
                _unpack(wanted, root, place_of, say)
            else:
                _put(wanted, root, place_of, say)
    return open_dataset(name, root)


def missing(dataset: DataSet) -> int:
    """How many of its files are not there."""
    splits = [images for images in (dataset.train, dataset.test) if isinstance(images, FileImages)]
    return sum(not path.exists() for images in splits for path in images.files)


def not_public(name: str, root: str | Path) -> list[str]:
    """Which of the files that are used as they are have a public file's name and another content."""
    source = SOURCES.get(name)
    plain = [wanted for wanted in source.downloads if not wanted.unpack] if source else []
    folder = expanded(root)
    named = [(folder / wanted.folder / wanted.name, wanted) for wanted in plain]
    there = [(path if path.exists() else path.with_suffix(""), wanted) for path, wanted in named]
    return [_other_than(path, wanted) for path, wanted in there if path.is_file() and not _is_public(path, wanted)]


def _whole(name: str, root: Path, source: Source) -> bool:
    """Every image of the public data set is there, however it came to be."""
    try:
        dataset = open_dataset(name, root)
    except (UserError, OSError):
        return False
    counts = (len(dataset.class_names), len(dataset.train.labels), len(dataset.test.labels))
    return counts == (source.classes, source.train, source.test) and not missing(dataset)


def _list_place(wanted: Download, lists: str | Path | None) -> str | None:
    if lists is None:
        return None
    path = expanded(lists) / wanted.name
    if not path.is_file():
        raise UserError(f"There is no {path}: --lists is a folder with {wanted.name}.")
    return str(path)


def _refuse_strange(given: Sequence[str], source: Source) -> None:
    """Each source must be used for something."""
    names = [download.name for download in source.downloads]
    for entry in given:
        path = expanded(entry)
        if "://" not in entry and not path.exists():
            raise UserError(f"There is no file or folder {entry}: --source is an archive, a folder of them or a URL.")
        named = entry.rstrip("/").rpartition("/")[2] in names
        fits = any((path / name).is_file() for name in names) if path.is_dir() else named or len(names) == 1
        if not fits:
            raise UserError(
                f"--source {entry} is not, and does not hold, any of {', '.join(names)}: give it that name."
            )


def _matching(wanted: Download, given: Sequence[str], downloads: int) -> str | None:
    """Which of the sources given is this one: by its file's name, in a folder, or because there is only one."""
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


def _put(wanted: Download, root: Path, place_of: str | None, say: Say) -> None:
    """A file that is used as it is."""
    path = root / wanted.folder / wanted.name
    refuse_dangling(path)
    if path.exists():
        _verify(path, wanted, "move it away")
        return
    if place_of is not None and "://" not in place_of:
        local = _local(place_of)
        _verify(local, wanted, "get the right one")
        with open(local, "rb") as file:
            place(file, path)
        return
    _download(place_of or wanted.url, path, wanted, say)


def _unpack(wanted: Download, root: Path, place_of: str | None, say: Say) -> None:
    if place_of is not None and "://" not in place_of:
        archive = _local(place_of)
        _verify(archive, wanted, "get the right one")
    else:
        archive = root / "downloads" / wanted.name
        if archive.exists():
            _verify(archive, wanted, "move it away")
        else:
            _download(place_of or wanted.url, archive, wanted, say)
    say(f"Unpacking {archive}")
    written, present = unpack(archive, root / wanted.folder)
    say(f"{written:,} files written, {present:,} were there already")


def _local(entry: str) -> Path:
    path = expanded(entry)
    if not path.is_file():
        raise UserError(f"There is no file {path}: --source is an archive, a folder of them or a URL.")
    return path


def _verify(path: Path, wanted: Download, remedy: str) -> None:
    if not _is_public(path, wanted):
        raise UserError(f"{_other_than(path, wanted)}: {remedy}.")


def _other_than(path: Path, wanted: Download) -> str:
    kind, _, expected = wanted.checksum.partition(":")
    return f"{path} is not {wanted.name} ({kind.upper()} {expected} expected)"


def _is_public(path: Path, wanted: Download) -> bool:
    with open(path, "rb") as file:
        if _has(file, wanted.checksum):
            return True
    if not wanted.content:
        return False
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as content:
            return _has(content, wanted.content)
    except (EOFError, OSError, zlib.error):
        return False


def _has(file: IO[bytes] | gzip.GzipFile, checksum: str) -> bool:
    kind, _, expected = checksum.partition(":")
    digest = hashlib.new(kind, usedforsecurity=False)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest() == expected


def _download(url: str, path: Path, wanted: Download, say: Say) -> None:
    """Continues what an earlier call began; the file has its name only when its checksum is right."""
    make_folder(path.parent)
    part = path.with_name(path.name + ".part")
    begun = part.stat().st_size if part.exists() else 0
    say(f"Downloading {url}" + (f", from {gigabytes(begun)} on" if begun else ""))
    try:
        expected = _fetch(url, part, begun)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = getattr(error, "reason", error)
        raise UserError(
            f"Could not download {url} ({reason}): try again, or fetch it elsewhere and give its path with "
            f"{'--lists' if wanted.folder == 'lists' else '--source'}."
        ) from None
    if expected is not None and part.stat().st_size < expected:
        raise UserError(f"The download of {url} broke off: give the same command again to continue it.")
    try:
        _verify(part, wanted, "the download is not kept; try again, or another --source")
    except UserError:
        part.unlink()
        raise
    os.replace(part, path)


def _fetch(url: str, part: Path, begun: int) -> int | None:
    """Appends to what is there if the server can, else starts anew; the size that the whole must have, if known."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={begun}-"} if begun else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and begun:  # nothing is left to fetch
            return begun
        raise
    with response:
        continued = getattr(response, "status", 200) == 206
        length = response.headers.get("Content-Length")
        require_space(part.parent, int(length or 0))
        try:
            with open(part, "ab" if continued else "wb") as out:
                shutil.copyfileobj(response, out, 1 << 20)
        except OSError as error:
            raise refusal(error, part) from None
    return None if length is None else int(length) + (begun if continued else 0)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One process at a time; the lock is the folder's own and leaves nothing behind."""
    if fcntl is None:
        yield
        return
    handle = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"Another process is preparing {root}: wait for it.") from None
        yield
    finally:
        os.close(handle)
