"""Files: atomic writes, locks, checksums, downloads, and tensors on disk.

PyTorch and the network modules are imported only on use, so that options can be checked without them.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import platform
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.status import counted, status

if TYPE_CHECKING:
    from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows, where locks have no effect
    fcntl = None  # type: ignore[assignment]

BLOCK = 1 << 20  # bytes that are read at once
PART = ".mambacl-part"  # the name of a file while it is written
CHECKSUM, ALIAS = "mambacl.checksum", "mambacl.same."
NO_CHECKSUM = "crc32-of-all not-known-"
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def expanded(path: str | Path) -> Path:
    """The path with ~ or ~NAME replaced by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path} begins with an unknown home folder: write the full path.") from None


def is_word(name: str) -> bool:
    """Whether this names something, such as weights or a preset, and is not a path: a path has a dot or a slash."""
    return re.fullmatch(r"[\w-]+", name) is not None


# Writing


@contextmanager
def replacing(path: Path, temporary: Path | None = None, sync: bool = True) -> Iterator[Path]:
    """A temporary file next to `path` to write to. At the end it replaces `path`. If `sync` is set, the file is flushed
    to disk before that, and the folder after it. After an error it is removed, and `path` stays unchanged; an `OSError`
    then names `path`."""
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        if sync:
            sync_file(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    if sync:
        sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Flushes a file to disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to disk: new files, new folders, and what was renamed."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def keep_as(path: Path, other: Path, sync: bool = True) -> None:
    """Keeps a file's contents under another name, too: by a hard link, or by a copy if the file system has no links.
    `other` is complete at any moment: it is the old file or the new one."""
    if other.exists() and path.samefile(other):
        return
    with replacing(other, sync=sync) as temporary:
        temporary.unlink(missing_ok=True)  # left by a killed process with the same number
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Removes what killed processes left of files that they were writing. No other process may be writing them now."""
    for path in folder.glob(f".{name}.*.part"):
        path.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces a file atomically. Returns when the bytes are on disk."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(data)


def write_json(path: Path, content: object) -> None:
    write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())


def write_stream(path: Path, source: IO[bytes]) -> None:
    """Writes a stream to a file, atomically. Does not flush, because data sets have hundreds of thousands of files. A
    killed process leaves at most one unfinished file per folder, which the next process replaces."""
    make_folder(path.parent)
    with (
        writing(path),
        replacing(path, path.parent / PART, sync=False) as temporary,
        open(temporary, "wb") as out,
    ):
        shutil.copyfileobj(source, out, BLOCK)


def make_folder(folder: Path) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def require_space(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        raise UserError(f"{folder} has {gigabytes(free)} free, but {gigabytes(need)} are needed: free some space.")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within it, errors of the disk become sentences about `path`."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path) from None


def full_disk(error: OSError, path: str | Path | None = None) -> UserError | None:
    """An error that names the remedy, if the disk is full or a file may not be as large."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = "" if path is None else f" at {path}"
        return UserError(f"The disk is full{where}: free some space and repeat the command; finished files stay.")
    if error.errno == errno.EFBIG:
        what = "A file" if path is None else str(path)
        return UserError(
            f"{what} is larger than a file may be here: raise the limit (`ulimit -f`), or write elsewhere."
        )
    return None


def disk_error(error: OSError, path: Path) -> Exception:
    """A `UserError` for a full or read-only disk; other errors stay unchanged."""
    if (full := full_disk(error, path)) is not None:
        return full
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return UserError(f"{path} cannot be written ({error.strerror}): choose a folder that you can write to.")
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return UserError(f"{path} is a file, but must be a folder: move it away, or choose another folder.")
    return error


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


# Locks

_held: set[int] = set()  # descriptors of this process that hold locks


@contextmanager
def locked(lock: Path, busy: str | None = None) -> Iterator[None]:
    """Holds a lock file, which one process at a time can hold, and removes it at the end. The file says which process
    that is. If it is another one, raises an error, or waits without `busy`, the words of the error after that process:
    "is training DIR: wait for it.". The lock ends with the process, even if that is killed and its workers live on.

    On a network file system it counts between machines only if the file system passes `flock` on to its server, as NFS
    does unless it is mounted with `local_lock` or `nolock`. Elsewhere it counts between the processes of one machine.
    """
    held = _lock(lock, busy) if fcntl is not None else None
    if held is not None:
        _held.add(held)
    try:
        yield
    finally:
        if held in _held:  # not so in a process that was forked meanwhile: the lock is its parent's
            with suppress(OSError):
                lock.unlink()  # before releasing the lock, so that nobody locks a file that is about to be removed
            _held.discard(held)
            os.close(held)


def _lock(lock: Path, busy: str | None) -> int | None:
    """A descriptor that holds the lock. None if locking is impossible: the folder is read-only and needs no lock, or
    the file system has no locks."""
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except (BlockingIOError, PermissionError):
            holder = _holder(descriptor)
            os.close(descriptor)
            raise UserError(f"{holder} {busy}" if busy else f"{lock} cannot be locked.") from None
        except OSError:
            os.close(descriptor)
            return None
        if os.fstat(descriptor).st_nlink:
            _name_holder(descriptor)
            return descriptor
        os.close(descriptor)  # its last owner has removed the file


def _name_holder(descriptor: int) -> None:
    """Writes into a lock file who holds it. A full disk is no reason not to lock."""
    text = f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _holder(descriptor: int) -> str:
    """The process that holds a lock, in words."""
    with suppress(OSError, ValueError):
        text = os.pread(descriptor, 500, 0).decode().strip()
        if text.isprintable() and text.startswith("process "):
            return f"Another process ({text.removeprefix('process ')})"
    return "Another process"


def _give_up_locks() -> None:
    """In a process that was forked: its parent alone holds the locks, so that they end with the parent."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_up_locks)


# Checksums and downloads


def has_checksum(path: Path, checksum: str, content: str = "") -> bool:
    """Whether a file has a checksum such as 'sha256:...', or its content, unpacked if the name ends in .gz, has the
    checksum `content`."""
    with status(f"checking {path.name}"), open(path, "rb") as file:
        if _digest(file, checksum) == checksum:
            return True
    if not content:
        return False
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as unpacked:
            return _digest(unpacked, content) == content
    except (EOFError, OSError, zlib.error):
        return False


def _digest(file: IO[bytes] | gzip.GzipFile, like: str) -> str:
    kind = like.partition(":")[0]
    digest = hashlib.new(kind, usedforsecurity=False)
    while block := file.read(BLOCK):
        digest.update(block)
    return f"{kind}:{digest.hexdigest()}"


def download(
    url: str,
    path: Path,
    checksum: str | None,
    otherwise: str,
    content: str = "",
    say: Callable[[str], None] = logger.info,
) -> None:
    """Downloads a file. If the checksum is known, continues an interrupted download. The file gets its name only when
    it is complete and correct. `otherwise` tells the user what to do without a network."""
    from http.client import HTTPException
    from urllib.error import URLError

    make_folder(path.parent)
    with locked(path.with_name(f".{path.name}.lock")):
        if path.exists():  # another process has downloaded it
            return
        part = path.with_name(path.name + ".part")
        begun = part.stat().st_size if checksum and part.exists() else 0
        say(f"Downloading {url} to {path}" + (f", from {gigabytes(begun)} on" if begun else ""))
        try:
            expected = _fetch(url, part, begun)
        except UserError:
            raise
        except (URLError, HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UserError(f"Could not download {url} ({reason}): try again, or {otherwise}.") from None
        size = part.stat().st_size
        if expected is not None and size < expected:
            raise UserError(
                f"The download of {url} stopped after {size} of {expected} bytes: try again to continue it."
            )
        if checksum is not None and not has_checksum(part, checksum, content):
            part.unlink()
            raise UserError(
                f"The file at {url} is not the expected one ({checksum}) and was deleted: try again, or {otherwise}."
            )
        sync_file(part)
        os.replace(part, path)


def _fetch(url: str, part: Path, begun: int) -> int | None:
    """Continues the partial file if the server supports it, else starts over. Returns the complete size, if known."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, headers={"Range": f"bytes={begun}-"} if begun else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and begun:  # already complete
            return begun
        raise
    with response:
        continued = getattr(response, "status", 200) == 206
        length = response.headers.get("Content-Length")
        require_space(part.parent, int(length or 0))
        with writing(part), open(part, "ab" if continued else "wb") as out:
            blocks = iter(lambda: response.read(BLOCK), b"")
            for block in counted(blocks, -(-int(length or 0) // BLOCK), "MiB"):
                out.write(block)
    return None if length is None else int(length) + (begun if continued else 0)


# Tensors


def write_tensors(path: Path, tensors: Mapping[str, Tensor], text: Mapping[str, str]) -> None:
    """Writes tensors and some text to a safetensors file, atomically and with a checksum.

    A tensor with several names is written once; the other names become aliases. Needs memory for one more tensor.
    """
    own: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() > 1 and place in first:
            aliases[ALIAS + name] = first[place]
        else:
            first[place] = name
            own[name] = tensor.detach()
    order = sorted(own, key=lambda name: (-own[name].element_size(), name))  # keeps every tensor aligned
    header: dict[str, object] = {"__metadata__": {**text, **aliases, CHECKSUM: NO_CHECKSUM}}
    end = 0
    for name in order:
        begin, end = end, end + own[name].numel() * own[name].element_size()
        dtype = DTYPES[str(own[name].dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(own[name].shape), "data_offsets": [begin, end]}
    head = json.dumps(header, ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    sums: dict[str, int] = {}
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            data = _bytes(own[name])
            sums[name] = zlib.crc32(data)
            file.write(data)
        file.seek(8)  # the checksum is as long as its placeholder
        file.write(head.replace(NO_CHECKSUM.encode(), _checksum(sums).encode(), 1))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads tensors and text from a file that `write_tensors` wrote. Raises a `UserError` if it is damaged."""
    with opened(path) as file:
        text = dict(file.metadata() or {})
        # copies, so that the file can be replaced
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    _check(path, text.pop(CHECKSUM, None), {n: zlib.crc32(_bytes(t)) for n, t in tensors.items()})
    for alias in [key for key in text if key.startswith(ALIAS)]:
        tensors[alias.removeprefix(ALIAS)] = tensors[text.pop(alias)]
    return tensors, text


def check_tensors(path: Path) -> None:
    """Raises a `UserError` if a file that `write_tensors` wrote is damaged. Reads one tensor after another."""
    with opened(path) as file:
        sums = {name: zlib.crc32(_bytes(file.get_tensor(name))) for name in file.keys()}  # noqa: SIM118
        _check(path, (file.metadata() or {}).get(CHECKSUM), sums)


def read_text(path: Path) -> dict[str, str]:
    """Only the text of a file that `write_tensors` wrote. Does not look for damage in the tensors."""
    with opened(path) as file:
        return dict(file.metadata() or {})


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, to read some of it. Raises a `UserError` if it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"The file {path} does not exist.") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}).") from None


def _check(path: Path, checksum: str | None, sums: Mapping[str, int]) -> None:
    if checksum is not None and checksum != _checksum(sums):
        raise UserError(f"{path} is damaged: its contents do not match their checksum.")


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _checksum(sums: Mapping[str, int]) -> str:
    """One checksum of all names and their tensors' checksums."""
    value = 0
    for name in sorted(sums):
        value = zlib.crc32(f"{name} {sums[name]} ".encode(), value)
    return f"crc32-of-all {value:010d}"
