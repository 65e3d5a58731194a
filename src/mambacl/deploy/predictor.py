"""A model that predicts: images in, class names and probabilities out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mambacl.classifiers.calibration import FEWEST, Calibration, Rates
from mambacl.data.images import in_threads
from mambacl.data.transforms import Transforms
from mambacl.deploy.description import Description
from mambacl.deploy.inputs import Source, listed, pixels
from mambacl.deploy.model_file import write_model
from mambacl.deploy.probabilities import as_probabilities
from mambacl.errors import UserError
from mambacl.methods import Method
from mambacl.training.api import arithmetic
from mambacl.training.recorded import Recorded
from mambacl.training.step import autocast

BATCH = 64


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, the best first."""

    classes: tuple[str, ...]
    probabilities: tuple[float, ...]
    unknown: bool = False
    """whether the best probability is below the threshold that the caller chose"""

    @property
    def name(self) -> str:
        """The best class."""
        return self.classes[0]

    @property
    def probability(self) -> float:
        return self.probabilities[0]


class Predictor:
    """A run or an exported model at the end of its latest task; `mambacl.load` makes it.

        predictor = mambacl.load("runs/photos-analytic-0")
        predictor.predict("cat.jpg")[0].name

    It predicts what `mambacl evaluate` counts: same transform, views and precision. The result for an image depends on
    the other images of its batch only by rounding errors.
    """

    def __init__(self, method: Method, transforms: Transforms, description: Description, device: torch.device) -> None:
        self.method, self.transforms, self.description, self.device = method, transforms, description, device
        self._answer = self._plain
        if description.config.fast and device.type == "cuda" and method.recordable:
            self._answer = Recorded(self._plain, tuple)  # nothing moves: the method is only read

    @property
    def classes(self) -> list[str]:
        """The names of the classes, by label."""
        return self.description.classes

    def transform(self, image: Source) -> Tensor:
        """The model's input (3, size, size) for an image: the transform of the run's evaluation."""
        return self._normalized([self._prepared(image)])[0]

    def _prepared(self, image: Source) -> Tensor:
        return self.transforms.evaluate(pixels(image))

    def _normalized(self, prepared: list[Tensor]) -> Tensor:
        return self.transforms.normalize(torch.stack(prepared))

    def _plain(self, images: Tensor) -> Tensor:
        with autocast(self.device, self.description.config.precision == "bf16"):
            return self.method.answer(images)

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """Scores (n, classes) of model inputs (n, 3, size, size), which `transform` makes; the highest one is the
        prediction. If the run learned domains, a class has its best score over them."""
        size = self.transforms.size
        if images.shape[1:] != (3, size, size) or images.dim() != 4 or not images.is_floating_point():
            raise UserError(
                f"scores needs normalised images (n, 3, {size}, {size}), got {images.dtype} {tuple(images.shape)}: "
                "make them with `transform`, or call `predict`."
            )
        with torch.inference_mode(), arithmetic(self.description.config):  # less work per operator than no_grad
            found = self._answer(images.to(self.device, torch.float32))
        return found.unflatten(1, (-1, len(self.classes))).amax(1)  # outside of it, so that it can be used anywhere

    def probabilities(self, images: Tensor) -> Tensor:
        """Probabilities (n, classes) of the same inputs, calibrated if the model has a `calibration`."""
        return self._probabilities(self.scores(images))

    def _probabilities(self, scores: Tensor) -> Tensor:
        scores = scores / len(self.method.views(torch.empty(0, 0, 0, 0)))  # they are sums over views
        if self.calibration is not None:
            return self.calibration.probabilities(scores)
        return as_probabilities(scores, self.method.classifier.estimates_probabilities)

    @property
    def calibration(self) -> Calibration | None:
        """What makes the probabilities calibrated; None if they are not: see `not_calibrated`."""
        return self.method.calibration

    @property
    def not_calibrated(self) -> str:
        """Why the probabilities are not calibrated, in a sentence with the remedy; empty if they are."""
        if self.calibration is not None:
            return ""
        if self.description.config.stream.by_domain:
            why = "its tasks are domains; choose thresholds on your own images"
        else:
            why = self.method.why_not_calibrated() or (
                f"it has learned fewer than {FEWEST} images, or was made by an earlier version: train it again, with "
                "more images"
            )
        return f"The probabilities of this model are not calibrated, because {why}."

    def rejecting(self, share: float) -> Rates:
        """The highest threshold that calls at most this share of images of known classes unknown, with its error
        rates."""
        if not 0 <= share < 1:
            raise UserError(f"The share of known images to reject must be at least 0 and below 1, got {share:g}.")
        if self.calibration is None:
            raise UserError(f"{self.not_calibrated} Until then, choose a threshold yourself: --unknown-below.")
        return self.calibration.rejecting(share)

    def predict(
        self,
        images: Source | Iterable[Source],
        top: int = 5,
        batch_size: int = BATCH,
        unknown_below: float = 0.0,
        unknown: float | None = None,
    ) -> list[Prediction]:
        """The `top` most probable classes of each image: a path, a Pillow image, a tensor (3, h, w), a list of these,
        or a batch (n, 3, h, w). Tensors are uint8, or floats from 0 to 1. An image is unknown if its best probability
        is below `unknown_below`, or below the threshold that rejects the share `unknown` of images of known classes:
        see `rejecting`."""
        if unknown is not None:
            unknown_below = self.rejecting(unknown).threshold
        found = []
        for answer in self.predict_each(listed(images), top, batch_size, unknown_below):
            if isinstance(answer, UserError):
                raise answer
            found.append(answer)
        return found

    def predict_each(
        self, images: Iterable[Source], top: int = 5, batch_size: int = BATCH, unknown_below: float = 0.0
    ) -> Iterator[Prediction | UserError]:
        """The same for any number of images, in order, as they are read; for an image that cannot be read, the
        error."""
        if top < 1 or batch_size < 1:
            raise UserError(f"top and batch_size must be at least 1, got {top} and {batch_size}.")
        waiting: list[Tensor | UserError] = []
        count = 0
        for made in in_threads(self._try_prepare, images, ahead=2 * batch_size):
            waiting.append(made)
            count += isinstance(made, Tensor)
            if count == batch_size:
                yield from self._answered(waiting, top, unknown_below)
                waiting, count = [], 0
        yield from self._answered(waiting, top, unknown_below)

    def _try_prepare(self, image: Source) -> Tensor | UserError:
        try:
            return self._prepared(image)
        except UserError as error:
            return error

    def _answered(self, waiting: list[Tensor | UserError], top: int, below: float) -> Iterator[Prediction | UserError]:
        good = [made for made in waiting if isinstance(made, Tensor)]
        found = iter(self.answers(self._normalized(good), top, below) if good else ())
        for made in waiting:
            yield made if isinstance(made, UserError) else next(found)

    def answers(self, inputs: Tensor, top: int = 5, unknown_below: float = 0.0) -> list[Prediction]:
        """What `predict` says, for inputs (n, 3, size, size) that `transform` made."""
        scores = self.scores(inputs)
        best = scores.topk(min(top, len(self.classes)), dim=1).indices  # probabilities of 0 have no order
        found = self._probabilities(scores).gather(1, best)
        return [
            Prediction(tuple(self.classes[label] for label in labels), tuple(values), values[0] < unknown_below)
            for values, labels in zip(found.tolist(), best.tolist(), strict=True)
        ]

    def save(self, path: str | Path) -> None:
        """Writes the model to one safetensors file, which `mambacl.load` reads."""
        write_model(self.method, self.description, Path(path))

    def __repr__(self) -> str:
        about = self.description.config
        return f"Predictor({about.method} on {about.backbone}, {len(self.classes)} classes, {self.device})"
