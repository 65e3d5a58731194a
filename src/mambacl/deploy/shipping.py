"""Writes a model for another runtime, after comparing what it answers there with what it answers here."""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambacl.classifiers.calibration import Calibration
from mambacl.data.sets.folders import images_under
from mambacl.data.stream import open_data
from mambacl.deploy.foreign import FORMATS, MARK, Answer, Format
from mambacl.deploy.graph import Scores, exported, in_float64
from mambacl.deploy.inputs import pixels
from mambacl.deploy.predictor import Predictor
from mambacl.deploy.rows import as_numbers
from mambacl.errors import UserError
from mambacl.files import expanded, writing
from mambacl.training.api import arithmetic
from mambacl.training.folder import RunFolder

COMPARED = 64  # images
AS_THEY_ARE = 16  # of these, compared without our resizing; photos need memory
SIZES = (1, 3)  # of the first batches; the rest is one batch
MARGIN = 8  # for the largest of many rounding errors
ELEMENTARY = 4  # units in the last place that a runtime's exp or cos may be off
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)  # of known images to reject, whose thresholds the metadata hold
WARM_UP, FEWEST, MOST = 2, 3, 50  # calls
SECONDS = 2.0  # per form, after which no further call is timed
AUTO = "auto"  # the fastest form of the scan


@dataclass(frozen=True)
class Shipped:
    """What was written, how far its answers are from ours, and how fast it is."""

    files: tuple[str, ...]
    format: str
    runtime: str
    bytes: int
    classes: int
    preprocessing: bool
    images: int
    """compared"""
    source: str
    """of these images"""
    difference: float
    """the largest one between its scores and ours in float64"""
    allowed: float
    resized_difference: float | None
    """the same on images that the file resizes, from our scores; None without preprocessing"""
    resized_allowed: float | None
    same_answers: int
    """images whose best class is the same"""
    form: str
    """of the scan: see `ops.scan_traced`"""
    batch: int
    images_per_second: float
    images_per_second_by_form: dict[str, float]
    """of all forms that were tried"""
    our_images_per_second: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ship(
    predictor: Predictor,
    path: Path,
    to: str,
    images: Iterable[Tensor],
    source: str,
    *,
    preprocessing: bool = False,
    form: str = AUTO,
    batch: int = 1,
) -> Shipped:
    """Writes the model to `path`, unless its scores of `images`, uint8 (3, h, w), differ from ours by more than
    rounding. The files get their names only after that. The scan has the given form, or the one that is fastest with
    `batch` images per call."""
    kind = checked(to, path, form)
    module = Scores(predictor, preprocessing)
    raw: list[Tensor] = []
    resized: list[Tensor] = []
    for image in images:
        resized.append(predictor.transforms.resized(image))
        if preprocessing and len(raw) < AS_THEY_ARE:
            raw.append(image)
    given = torch.stack(resized)
    text = described(predictor, preprocessing)
    many = given.repeat(-(-batch // len(given)), 1, 1, 1)[:batch]
    theirs, ours = module.inputs(many), predictor.transforms.normalize(predictor.transforms.cropped(many))
    our_speed = per_second({"": partial(predictor.scores, ours)}, batch)[""]  # before other threads wait for work
    with writing(path), tempfile.TemporaryDirectory(prefix=".mambacl-export-", dir=path.parent) as folder:
        tried: dict[str, Path] = {}
        for one in kind.forms if form == AUTO else (form,):
            tried[one] = Path(folder) / one / path.name
            tried[one].parent.mkdir()
            _write(kind, exported(module, one), tried[one], text)
        answers = {one: kind.open(file, 0) for one, file in tried.items()}
        speeds = per_second({one: partial(answer, theirs) for one, answer in answers.items()}, batch)
        best = max(speeds, key=speeds.__getitem__)
        written, answer = tried[best], answers[best]
        difference, allowed, same = compared(predictor, module, answer, given)
        _check(kind, difference, allowed, f"the scores of {len(given)} images", "rounding explains")
        by_file: float | None = None
        by_levels: float | None = None
        if preprocessing:
            by_file, by_levels = compared_resized(predictor, module, answer, raw)
            _check(kind, by_file, by_levels, "the scores of images that it resizes", "one grey level explains")
        size = sum(file.stat().st_size for file in kind.files(written))
        for file, target in zip(kind.files(written), kind.files(path), strict=True):
            _flush(file)
            os.replace(file, target)
    return Shipped(
        tuple(map(str, kind.files(path))), to, kind.runtime, size, len(predictor.classes), preprocessing, len(given),
        source, difference, allowed, by_file, by_levels, same, best, batch, speeds[best], speeds, our_speed,
    )  # fmt: skip


def checked(to: str, path: Path, form: str = AUTO) -> Format:
    """The format, after all that can be refused before any work."""
    kind = FORMATS[to]
    kind.check_installed()
    if form == "loop" and form not in kind.forms:
        raise UserError(f"A file for {to} has no loops: choose --form chunked, or leave it out.")
    if path.suffix != kind.suffix:
        raise UserError(f"A file for {to} must end in {kind.suffix}, got {path}.")
    if not path.parent.is_dir():
        raise UserError(f"The folder {path.parent} for {path.name} does not exist: create it, or choose another.")
    if path.is_dir() or (path.is_file() and MARK.encode() not in path.read_bytes()):
        raise UserError(f"{path} exists and is not an exported model: choose another name.")
    return kind


def _check(kind: Format, difference: float, allowed: float, what: str, explained: str) -> None:
    if not difference <= allowed:  # also NaN
        raise UserError(
            f"In {kind.runtime}, {what} differ from ours by {difference:.3g}, more than {explained} ({allowed:.3g}): "
            "nothing was written. Please report this."
        )


def _write(kind: Format, program: Any, path: Path, text: dict[str, str]) -> None:
    try:
        kind.write(program, path, text)
    except RuntimeError as error:  # what PyTorch and OpenVINO raise if a disk is full
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"The model could not be written as {kind.name} ({reason}): check the free space.") from error


def _flush(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def described(predictor: Predictor, preprocessing: bool) -> dict[str, str]:
    """The metadata of the file. Each value is JSON, except `licence`."""
    size, classifier = predictor.transforms.size, predictor.method.classifier
    raw, normalised = "uint8 (n, height, width, 3), RGB", f"float32 (n, 3, {size}, {size}), normalised"
    about = {
        "input": raw if preprocessing else normalised,
        "output": "scores (n, classes); the highest is the answer",
        "scores": "estimates of the probabilities" if classifier.estimates_probabilities else "logits",
        "views": len(predictor.method.views(torch.empty(1, 3, 1, 1))),
        "preprocessing_inside": preprocessing,
        "calibration": None if (found := predictor.calibration) is None else calibration_text(found),
    }
    text = predictor.description.as_text()
    kept = {name: text[name] for name in ("classes", "preprocessing", "card", "licence")}
    return {**kept, MARK: json.dumps(about)}


def calibration_text(found: Calibration) -> dict[str, Any]:
    """Probabilities are softmax(k / temperature asinh(scores / views / k)) with the knee k, or softmax(scores / views /
    temperature) without one; thresholds for unknown images, with their rates."""
    knee = None if math.isinf(found.knee) else found.knee
    unknown = [as_numbers(found.rejecting(share)) for share in SHARES]
    return {"temperature": found.temperature, "knee": knee, "unknown": unknown}


# Comparison


def run_images(run: Path) -> Iterator[Tensor]:
    """Test images of a run, spread evenly over its data."""
    stream = RunFolder.existing(run).config().stream
    try:
        if stream.root is not None and not Path(stream.root).exists():
            raise UserError(f"{stream.root} does not exist.")
        data = open_data(stream).test
        for index in _spread(len(data.labels)):
            yield data.image(index)
    except UserError as error:
        reason = str(error).rstrip(".")
        raise UserError(
            f"The images of {run}, on which the export is checked, cannot be read ({reason}): give some others with "
            "--images FOLDER."
        ) from None


def folder_images(folder: Path) -> Iterator[Tensor]:
    """Images of a folder and those below it, spread evenly."""
    place = expanded(folder)
    files = images_under(place) if place.is_dir() else []
    if not files:
        raise UserError(f"{folder} is no folder with images: --images takes a folder with some of the model's kind.")
    return (pixels(files[index]) for index in _spread(len(files)))


def _spread(count: int) -> list[int]:
    """Some of `count` places, evenly. So are the first few of them."""
    places = torch.linspace(0, count - 1, min(COMPARED, count)).long().tolist()
    parts = COMPARED // AS_THEY_ARE
    return [place for part in range(parts) for place in places[part::parts]]


@torch.no_grad()
def compared(predictor: Predictor, module: Scores, answer: Answer, images: Tensor) -> tuple[float, float, int]:
    """The largest difference of an answer from ours in float64, the largest that rounding explains, and the number of
    images with the same best class.

    Rounding explains as much as our own float32 scores are off, with a margin, or the rounding error of a sum with the
    terms of all layers.
    """
    with in_float64(module):
        exact = module(module.inputs(images))
    own = _own_scores(predictor, predictor.transforms.cropped(images))
    sizes = [size for size in SIZES if size < len(images)]
    parts = images.split([*sizes, len(images) - sum(sizes)]) if sum(sizes) < len(images) else images.split(1)
    theirs = torch.cat([answer(module.inputs(part)) for part in parts])
    finite = exact.isfinite()
    if theirs.shape != exact.shape or not torch.equal(theirs.isfinite(), finite) or not finite.any():
        return float("nan"), 0.0, 0
    error, own_error = ((scores.double() - exact)[finite].abs().max().item() for scores in (theirs, own))
    unit = torch.finfo(torch.float32).eps / 2
    by_terms = MARGIN * unit * module.terms() ** 0.5 * exact[finite].abs().max().item()
    allowed = max(MARGIN * ELEMENTARY * own_error, by_terms)
    return error, allowed, int((theirs.argmax(1) == own.argmax(1)).sum())


def _own_scores(predictor: Predictor, prepared: Tensor) -> Tensor:
    """In float32, also if the run used bf16."""
    with arithmetic(predictor.description.config):
        found = predictor.method.answer(predictor.transforms.normalize(prepared))
    return found.unflatten(1, (-1, len(predictor.classes))).amax(1)


@torch.no_grad()
def compared_resized(predictor: Predictor, module: Scores, answer: Answer, images: list[Tensor]) -> tuple[float, float]:
    """The largest difference of an answer from ours on images that each of us resizes, and what one grey level more or
    less in every pixel changes in ours."""
    prepared = torch.stack([predictor.transforms.evaluate(image) for image in images])
    draw = torch.Generator().manual_seed(0)
    levels = 2 * torch.randint(0, 2, prepared.shape, generator=draw) - 1
    own, moved = (_own_scores(predictor, some) for some in (prepared, prepared + levels))
    theirs = torch.cat([answer(module.inputs(image[None])) for image in images])
    finite = own.isfinite()
    if theirs.shape != own.shape or not torch.equal(theirs.isfinite(), finite):
        return float("nan"), 0.0
    found, allowed = ((scores - own)[finite].abs().max().item() for scores in (theirs, moved))
    return found, allowed


def per_second(calls: Mapping[str, Callable[[], object]], batch: int) -> dict[str, float]:
    """Images per second of each call, from the median of some. They take turns, so that a busy moment affects all."""
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    for turn in range(MOST):
        if turn >= FEWEST and time.perf_counter() - started > SECONDS * len(calls):
            break
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begun)
    return {name: batch / statistics.median(found) for name, found in times.items()}
