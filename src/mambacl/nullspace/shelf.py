"""Where covariances are kept between tasks: on the device, in the machine's memory, or memory-mapped on disk."""

import itertools
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

PREFIX = "covariances-"


class Shelf:
    """`put` gives back a tensor with the same values that lives where the shelf keeps things."""

    def __init__(self, place: str, device: torch.device, folder: Path | None) -> None:
        self.on_disk = place == "disk"
        self.device = device if place == "device" else torch.device("cpu")
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = itertools.count()

    def put(self, tensor: Tensor) -> Tensor:
        if not self.on_disk:
            return tensor.to(self.device)
        if self._temporary is None:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._temporary = tempfile.TemporaryDirectory(prefix=PREFIX, dir=self._folder, ignore_cleanup_errors=True)
        path = Path(self._temporary.name) / f"{next(self._numbers)}.bin"
        kept = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        kept.copy_(tensor)
        weakref.finalize(kept, path.unlink, missing_ok=True)
        return kept
