"""Tensors and a little text in one safetensors file: written whole or not at all, checked when read."""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mambacl.errors import UserError

CHECKSUM, ALIAS = "mambacl.checksum", "mambacl.same."
NO_CHECKSUM = "crc32-of-all not-known-"
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


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
    """Names that hold the very same tensor are written once; the others are kept as an alias. One tensor at a time is
    in memory besides what is given."""
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
    order = sorted(own, key=lambda name: (-own[name].element_size(), name))  # so that every tensor begins where it may
    header: dict[str, object] = {"__metadata__": {**text, **aliases, CHECKSUM: NO_CHECKSUM}}
    end = 0
    for name in order:
        begin, end = end, end + own[name].numel() * own[name].element_size()
        shape = list(own[name].shape)
        header[name] = {"dtype": DTYPES[own[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header, ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    sums: dict[str, int] = {}
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            data = _bytes(own[name])
            sums[name] = zlib.crc32(data)
            file.write(data)
        file.seek(8)  # the checksum is as long as what stands in its place
        file.write(head.replace(NO_CHECKSUM.encode(), _checksum(sums).encode(), 1))


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
    if checksum is not None and checksum != _checksum({n: zlib.crc32(_bytes(t)) for n, t in tensors.items()}):
        raise UserError(f"{path} is damaged: its contents do not match their checksum.")
    for alias in [key for key in text if key.startswith(ALIAS)]:
        tensors[alias.removeprefix(ALIAS)] = tensors[text.pop(alias)]
    return tensors, text


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _checksum(sums: Mapping[str, int]) -> str:
    """Of the names and of each tensor's own checksum."""
    value = 0
    for name in sorted(sums):
        value = zlib.crc32(f"{name} {sums[name]} ".encode(), value)
    return f"crc32-of-all {value:010d}"
