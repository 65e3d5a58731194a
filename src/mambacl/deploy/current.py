"""The model that a server answers with, and a thread that replaces it when the run has a newer task."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from mambacl.deploy.loading import load
from mambacl.deploy.model_file import tensors_of
from mambacl.deploy.predictor import Predictor
from mambacl.errors import UserError
from mambacl.files import expanded
from mambacl.log import logger
from mambacl.training.folder import LEARNED, TASK_END

RETRY = 10  # times the usual wait, after a model that could not be loaded

Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True)
class Served:
    """A model and its name for clients."""

    predictor: Predictor
    version: str
    loaded: float
    """Unix time"""


def version_of(predictor: Predictor) -> str:
    """Twelve digits from the model's tensors and classes: a rollback gives the earlier version again, and an exported
    file has that of its run."""
    digest = hashlib.blake2b(repr(predictor.classes).encode(errors="backslashreplace"), digest_size=6)
    for name, tensor in sorted(tensors_of(predictor.method).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stamp(place: Path) -> Stamp:
    """Changes whenever the model does: with a finished task, `mambacl learn`, a rollback, or a replaced file."""
    files = [place / LEARNED, place / "checkpoints" / TASK_END] if place.is_dir() else [place]
    found: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            about = file.stat()
            found.append((about.st_mtime_ns, about.st_size, about.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)


class CurrentModel:
    """`served` is the model for new requests. The old one goes when the last request that uses it is answered."""

    def __init__(self, path: str, device: str, poll: float, unknown: float | None = None) -> None:
        """`unknown`: refuses models that cannot reject this share of known images."""
        self.place, self.device, self.poll, self.unknown = expanded(path), device, poll, unknown
        self.error: str | None = None
        """why the newest model could not be loaded"""
        self._stamp = stamp(self.place)
        self.served = self._load()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _load(self) -> Served:
        predictor = load(self.place, self.device)
        if self.unknown is not None:
            predictor.rejecting(self.unknown)
        size = predictor.transforms.size
        predictor.predict(torch.zeros(3, size, size, dtype=torch.uint8))  # the first one takes longer
        return Served(predictor, version_of(predictor), time.time())

    def start(self) -> None:
        """Looks for a newer model from now on."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="reload", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        wait = self.poll
        while not self._stop.wait(wait):
            wait = self.poll if self.refresh() else RETRY * self.poll

    def refresh(self) -> bool:
        """Loads the model again if its files changed. Whether the newest model is the one that answers."""
        now = stamp(self.place)
        if now == self._stamp and self.error is None:
            return True
        try:
            served = self._load()
        except Exception as error:  # a server goes on whatever is wrong with a file
            words = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            if words != self.error:
                logger.warning("The newer model cannot be loaded, the old one goes on: %s", words)
            self.error = words
            return False
        self._stamp, self.error = now, None  # if it changed meanwhile, the next look finds that
        if served.version != self.served.version:
            logger.info("Now answers with model %s, %d classes.", served.version, len(served.predictor.classes))
            self.served = served
        return True
