"""A run that learns, for tests of accuracy: the packaged nano model on a few of the packaged images, at 16 pixels.

It is the demo with a fifth of its images. Features are useful from the start, two new classes per task interfere with
the old ones, and a run takes seconds on one core. `small_run` is quicker, and for tests that do not look at accuracy.
"""

import dataclasses
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import mambacl
from mambacl.data import DATASETS, DataSet

NAME = "fashion-mnist-few"
TEST_IMAGES = 30  # per class
SEEDS = (0, 1, 2)
CONFIG: dict[str, Any] = {
    "extends": "demo",
    "name": "learning",
    "stream": {"dataset": NAME, "train_per_class": 40, "transforms": {"image_size": 16}},
}


def few_images(root: Path | None) -> DataSet:
    return with_few_test_images(DATASETS.get("fashion-mnist-small")(root), TEST_IMAGES)


def with_few_test_images(data: DataSet, count: int) -> DataSet:
    """The same data set with the first `count` test images of each class."""
    kept = [np.flatnonzero(data.test.labels == label)[:count] for label in range(len(data.class_names))]
    return dataclasses.replace(data, test=data.test.subset(np.concatenate(kept)))


DATASETS.add(NAME, few_images)


@cache
def metrics(method: str, classifier: str = "auto", seed: int = 0, **overrides: Any) -> dict[str, float]:
    """The metrics of a run; each is trained once per process."""
    with TemporaryDirectory() as folder:
        out = str(Path(folder) / "run")
        return mambacl.train(CONFIG, method=method, classifier=classifier, seed=seed, out=out, **overrides).metrics


def over_seeds(metric: str, method: str, classifier: str = "auto", **overrides: Any) -> np.ndarray:
    """One metric of a run with each seed."""
    return np.array([metrics(method, classifier, seed, **overrides)[metric] for seed in SEEDS])
