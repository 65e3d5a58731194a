"""A run that learns, for tests of accuracy: the packaged nano model on a few of the packaged images, at 16 pixels.

Features are useful from the start, the two new classes of a task interfere with the old ones at this learning rate, and
a run takes seconds on one core. `small_run` is quicker, for tests that do not look at accuracy.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from data_help import fewer_test_images

import mambacl

TEST_IMAGES = 30  # per class
SEEDS = (0, 1, 2)
CONFIG: dict[str, Any] = {
    "name": "learning",
    "backbone": "defocus_mamba_nano",
    "pretrained": "tin32-39ep",
    "stream": {
        "dataset": "fashion-mnist-small",
        "tasks": 5,
        "train_per_class": 40,
        "transforms": {"image_size": 16},
    },
    "setting": "paper",
    "nullspace": {  # a rule that protects, and only what the projection preserves
        "rank": "energy:0.77",
        "eta": 1.0,
        "blocks": [6, 7, 8, 9, 10, 11],
        "A": {"trains": False},
        "W_delta": {"trains": False},
        "products": "float32",
    },
    "recipe": "paper",
    "training": {"passes": 3, "batch_size": 25, "lr": 6e-3, "head_lr": 3e-4, "schedule": "constant"},
}


@cache
def metrics(method: str, classifier: str = "auto", seed: int = 0, **overrides: Any) -> dict[str, float]:
    """The metrics of a run; each is trained once per process. Overrides are named as in `mambacl.train`, with dots."""
    with TemporaryDirectory() as folder, fewer_test_images(TEST_IMAGES):
        out = str(Path(folder) / "run")
        return mambacl.train(CONFIG, method=method, classifier=classifier, seed=seed, out=out, **overrides).metrics


def over_seeds(metric: str, method: str, **overrides: Any) -> np.ndarray:
    """One metric of a run with each seed."""
    return np.array([metrics(method, seed=seed, **overrides)[metric] for seed in SEEDS])
