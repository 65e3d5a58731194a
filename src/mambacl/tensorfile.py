"""Tensors and a little text in one safetensors file: written whole or not at all, checked when read."""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mambacl.errors import UserError

CHECKSUM, ALIAS = "mambacl.crc32", "mambacl.same."


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces a file atomically, and returns when the bytes are on disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor], text: Mapping[str, str]) -> None:
    """Names that hold the very same tensor are written once; the others are kept as an alias."""
    own: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() > 1 and place in first:
            aliases[ALIAS + name] = first[place]
        else:
            first[place] = name
            own[name] = tensor.detach().cpu().contiguous().clone()  # safetensors takes no views
    metadata = {**text, **aliases, CHECKSUM: str(_checksum(own))}
    write_bytes(path, save(own, metadata=metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and text of a file that `write_tensors` wrote; a damaged one is a `UserError`."""
    try:
        with safe_open(path, framework="pt") as file:
            text = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}).") from None
    checksum = text.pop(CHECKSUM, None)
    if checksum is not None and int(checksum) != _checksum(tensors):
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
