"""Where covariances are kept between tasks: on the device, in the machine's memory, or memory-mapped on disk."""

import itertools
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor


class Shelf:
    """`put` gives back a tensor with the same values that lives where the shelf keeps things."""

    def __init__(self, place: str, device: torch.device, folder: Path | None) -> None:
        self.place = place
        self.device = device if place == "device" else torch.device("cpu")
        self._numbers = itertools.count()
        self._folder: Path | None = None
        if place == "disk":
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            self._temporary = tempfile.TemporaryDirectory(prefix="covariances-", dir=folder, ignore_cleanup_errors=True)
            self._folder = Path(self._temporary.name)

    def put(self, tensor: Tensor) -> Tensor:
        if self._folder is None:
            return tensor.to(self.device)
        path = self._folder / f"{next(self._numbers)}.bin"
        kept = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        kept.copy_(tensor)
        weakref.finalize(kept, path.unlink, missing_ok=True)
        return kept
