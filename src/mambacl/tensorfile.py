"""Tensors and a little text in one safetensors file: written whole or not at all, checked when read."""

import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mambacl.errors import UserError

CHECKSUM, ALIAS = "mambacl.crc32", "mambacl.same."


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` to write to; at the end it is flushed to disk and takes the place of `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces a file atomically, and returns when the bytes are on disk."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], text: Mapping[str, str]) -> None:
    """Names that hold the very same tensor are written once; the others are kept as an alias."""
    own: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() > 1 and place in first:
            aliases[ALIAS + name] = first[place]
            continue
        first[place] = name
        own[name] = tensor.detach().cpu().contiguous()
        storage = own[name].untyped_storage()
        if storage.nbytes() != own[name].nbytes or storage.data_ptr() in storages:
            own[name] = own[name].clone()  # safetensors takes no views
        storages.add(storage.data_ptr())
    metadata = {**text, **aliases, CHECKSUM: str(_checksum(own))}
    with replacing(path) as temporary:
        save_file(own, temporary, metadata=metadata)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and text of a file that `write_tensors` wrote; a damaged one is a `UserError`."""
    try:
        with safe_open(path, framework="pt") as file:
            text = dict(file.metadata() or {})
            names = file.keys()
            tensors = {
                name: file.get_tensor(name).clone() for name in names
            }  # copies, so that the file can be replaced
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}).") from None
    checksum = text.pop(CHECKSUM, None)
    if checksum is not None and checksum != str(_checksum(tensors)):
        raise UserError(f"{path} is damaged: its contents do not match their checksum.")
    for alias in [key for key in text if key.startswith(ALIAS)]:
        tensors[alias.removeprefix(ALIAS)] = tensors[text.pop(alias)]
    return tensors, text


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(tensors[name].flatten().view(torch.uint8).numpy().data, value)
    return value
