"""A model that predicts: images in, class names and probabilities out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

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
    """whether the best probability is below the threshold that the caller gave"""

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
        with arithmetic(self.description.config):
            found = self._answer(images.to(self.device, torch.float32))
        return found.unflatten(1, (-1, len(self.classes))).amax(1)

    def probabilities(self, images: Tensor) -> Tensor:
        """Probabilities (n, classes) of the same inputs, as the classifier estimates them. They are not calibrated."""
        views = len(self.method.views(images[:1]))  # scores are sums over views
        return as_probabilities(self.scores(images) / views, self.method.classifier.estimates_probabilities)

    def predict(
        self,
        images: Source | Iterable[Source],
        top: int = 5,
        batch_size: int = BATCH,
        unknown_below: float = 0.0,
    ) -> list[Prediction]:
        """The `top` most probable classes of each image: a path, a Pillow image, a tensor (3, h, w), a list of these,
        or a batch (n, 3, h, w). Tensors are uint8, or floats from 0 to 1. An image is unknown if its best probability
        is below `unknown_below`."""
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
        best = self.probabilities(inputs).topk(min(top, len(self.classes)), dim=1)
        return [
            Prediction(tuple(self.classes[label] for label in labels), tuple(values), values[0] < unknown_below)
            for values, labels in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    def save(self, path: str | Path) -> None:
        """Writes the model to one safetensors file, which `mambacl.load` reads."""
        write_model(self.method, self.description, Path(path))

    def __repr__(self) -> str:
        about = self.description.config
        return f"Predictor({about.method} on {about.backbone}, {len(self.classes)} classes, {self.device})"
