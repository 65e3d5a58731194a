"""Compares a model with what it would become, before the run switches to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mambacl.data.stream import open_data
from mambacl.deploy.class_folders import ClassFolder, open_folder
from mambacl.deploy.comparing import Show, TestImage, compare_on
from mambacl.deploy.comparison import Comparison
from mambacl.deploy.loading import from_run
from mambacl.deploy.predictor import Predictor
from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.training.folder import RunFolder

MOST = 1000  # of the run's own test images


def in_folder(test: str | Path, names: list[str], skip_bad: bool) -> list[TestImage]:
    """The images of TEST/CLASS/*, checked before anything is learned. `names`: the classes that the model will have."""
    tests = open_folder(test, "--test", names, skip_bad)
    if others := [name for name in tests.names if name not in names]:
        raise UserError(
            f"{test} has the class '{others[0]}', which neither the model nor the new images have: remove it."
        )
    return _listed(tests, skip_bad)


def _listed(tests: ClassFolder, skip_bad: bool) -> list[TestImage]:
    if not skip_bad:
        tests.images.check()
    labels = tests.images.labels.tolist()
    return [
        TestImage(tests.images.name(index), tests.names[label], tests.images.files[index])
        for index, label in enumerate(labels)
    ]


def own_tests(folder: RunFolder, known: list[str]) -> list[TestImage]:
    """Test images of the run's own data set, at most `MOST`, of classes that the model knows; none if they cannot be
    reached any more."""
    if folder.made_from_checkpoint():
        return []  # its images were learned
    try:
        data = open_data(folder.config().stream)
    except (UserError, OSError):
        return []
    if data.class_names != folder.stream()["class_names"]:
        return []
    chosen = np.flatnonzero([data.class_names[label] in known for label in data.test.labels.tolist()])
    if len(chosen) > MOST:
        logger.info("Comparing on %d of the run's %d test images; --test FOLDER chooses others.", MOST, len(chosen))
        chosen = chosen[np.linspace(0, len(chosen) - 1, MOST).round().astype(np.int64)]
    image: Callable[[int], torch.Tensor] = data.test.image
    return [
        TestImage(data.test.name(i), data.class_names[data.test.labels[i]], partial(image, i)) for i in chosen.tolist()
    ]


def compared(
    folder: RunFolder, new: Predictor, images: list[TestImage], test: str, device: torch.device, show: Show
) -> Comparison | None:
    """The run's model before and after; None if no image has a class that it knew before."""
    old = from_run(folder, device)
    if not {image.truth for image in images} & set(old.classes):
        return None
    return compare_on(images, [old, new], [str(folder.path), f"{folder.path} after it"], test, show=show)
