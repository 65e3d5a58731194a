"""A pre-training small enough for tests: a tiny backbone on images whose class is the colour of one half."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mambacl.data import DATASETS, ArrayImages, DataSet

NAME = "halves-for-tests"
COLOURS = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200], [200, 200, 40]])
MODEL: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 2,
    "use_aux_loss": False,
    "mamba": {"intermediate_size": 64, "state_size": 4, "time_step_rank": 2, "group_norm_size": 16},
}
OPTIONS: dict[str, Any] = {
    "backbone": "defocus_mamba",
    "backbone_options": MODEL,
    "stream": {"dataset": NAME},
    "epochs": 4,
    "batch_size": 16,
    "evaluate_every": 2,
    "drop_path": 0.1,
    "device": "cpu",
}


def halves(count: int, seed: int) -> ArrayImages:
    """Images with noise: the class is the colour of the upper half, the lower half has any."""
    rng = np.random.default_rng(seed)
    labels, others = np.arange(count) % len(COLOURS), rng.integers(0, len(COLOURS), count)
    pixels = np.empty((count, 16, 16, 3))
    pixels[:, :8], pixels[:, 8:] = COLOURS[labels][:, None, None], COLOURS[others][:, None, None]
    pixels += rng.normal(0, 30, pixels.shape)
    return ArrayImages(pixels.clip(0, 255).astype(np.uint8), labels)


def open_halves(root: Path | None) -> DataSet:
    return DataSet(NAME, ["red", "green", "blue", "yellow"], halves(72, 0), halves(40, 1))


DATASETS.add(NAME, open_halves)


class Clock:
    """Advances by `tick` seconds with each reading."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def stop_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int) -> None:
    """Makes a method raise KeyboardInterrupt after this many calls."""
    original: Callable[..., Any] = getattr(owner, name)
    done = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal done
        if done == calls:
            raise KeyboardInterrupt
        done += 1
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)
