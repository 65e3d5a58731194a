"""Reads untrusted checkpoints without running code from them.

A .pth file is a pickle, and a pickle names functions to call. Here only the names of tensors, ordered dictionaries and
plain containers are resolved, to harmless functions of this module. Every other name becomes an inert placeholder that
ignores everything the file does with it. Tensors stay on disk until they are read.
"""

import io
import pickle
import shlex
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambacl.errors import UserError

STORAGE_DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class Placeholder:
    """Stands for an object of a class that is not resolved: accepts any arguments, state and items, and keeps none."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Placeholder":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> "Placeholder":
        return self

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def add(self, item: Any) -> None: ...


@dataclass(frozen=True)
class _StorageType:
    """What a name such as torch.FloatStorage resolves to."""

    dtype: torch.dtype


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the file that has not been read yet."""

    archive: Path
    record: str
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self) -> Tensor:
        with zipfile.ZipFile(self.archive) as archive:
            data = bytearray(archive.read(self.record))
        if not data:
            return torch.empty(self.size, dtype=self.dtype)
        storage = torch.frombuffer(data, dtype=self.dtype)
        return storage.as_strided(self.size, self.stride, self.offset).clone()


@dataclass(frozen=True)
class _StoredStorage:
    archive: Path
    record: str
    dtype: torch.dtype


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *ignored: Any) -> StoredTensor | Placeholder:
    if not isinstance(storage, _StoredStorage):
        return Placeholder()
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise pickle.UnpicklingError("a tensor has an impossible shape")
    return StoredTensor(storage.archive, storage.record, storage.dtype, offset, tuple(size), tuple(stride))


def _rebuild_parameter(data: Any, *ignored: Any) -> Any:
    return data


_HARMLESS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
}


class InertUnpickler(pickle.Unpickler):
    """Resolves names only to harmless stand-ins; `seen` holds the foreign names that became placeholders."""

    def __init__(self, data: bytes, archive: Path, prefix: str) -> None:
        super().__init__(io.BytesIO(data))
        self.archive, self.prefix = archive, prefix
        self.seen: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _HARMLESS:
            return _HARMLESS[module, name]
        if module in ("torch", "torch.storage") and name in STORAGE_DTYPES:
            return _StorageType(STORAGE_DTYPES[name])
        self.seen.add(f"{module}.{name}")
        return type("Placeholder", (Placeholder,), {"__doc__": f"Stands for {module}.{name}."})

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], _StorageType):
            return _StoredStorage(self.archive, f"{self.prefix}data/{pid[2]}", pid[1].dtype)
        return Placeholder()


def read_checkpoint(path: Path) -> tuple[Any, list[str]]:
    """The objects in a .pth file, with a `StoredTensor` for each tensor, and the foreign names that were made inert."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            pickles = [name for name in names if name.split("/", 1)[-1] == "data.pkl"]
            if len(pickles) != 1:
                raise UserError(
                    f"{path} is a zip file but not a PyTorch checkpoint: it has no data.pkl; download it again."
                )
            prefix = pickles[0].removesuffix("data.pkl")
            if prefix + "byteorder" in names and archive.read(prefix + "byteorder") != b"little":
                raise UserError(f"{path} was written on a big-endian machine; save it again as safetensors there.")
            data = archive.read(pickles[0])
    except zipfile.BadZipFile:
        raise UserError(
            f"{path} is neither safetensors nor a checkpoint of PyTorch 1.6 or newer, or it is damaged: download it "
            "again, or load it with PyTorch where you trust it and save it as safetensors."
        ) from None
    unpickler = InertUnpickler(data, path, prefix)
    try:
        contents = unpickler.load()
    except Exception as error:  # a malformed pickle can fail in any way; none of its code ran
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): download it again.") from None
    return contents, sorted(unpickler.seen)


def is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(v, StoredTensor) for v in value.values())


def find_state_dict(contents: Any, path: Path, key: str | None = None) -> dict[str, StoredTensor]:
    """The weights in a checkpoint: under `key`, or under the first usual name, or the entire contents."""
    places = [key] if key else ["model", "state_dict", "model_ema"]
    found = None
    if isinstance(contents, Mapping):
        for place in places:
            value = contents.get(place)
            if isinstance(value, Mapping) and is_state_dict(value.get("state_dict")):
                value = value["state_dict"]
            if is_state_dict(value):
                found = value
                break
        if found is None and key is None and is_state_dict(contents):
            found = contents
    if found is None:
        held = ", ".join(map(str, contents)) if isinstance(contents, Mapping) else type(contents).__name__
        wanted = " or ".join(f"'{place}'" for place in places)
        raise UserError(
            f"{path} holds no weights under {wanted}; it holds: {held}. "
            f"`mambacl convert {shlex.quote(str(path))} OUT.safetensors --key NAME` reads another entry."
        )
    return {str(name).removeprefix("module."): tensor for name, tensor in found.items()}
