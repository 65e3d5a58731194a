"""A model as one module for exporters: images in, scores of all classes out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mambacl.deploy.plain_classifiers import plain_classifier
from mambacl.deploy.predictor import Predictor
from mambacl.deploy.resizing import resized
from mambacl.errors import UserError
from mambacl.methods import Method
from mambacl.ops.precision import at_least_float32
from mambacl.ops.scan_traced import traced
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.together import Together

MOST = 65536  # images per batch, and pixels along a side


class Scores(nn.Module):
    """Scores (n, classes) of images: normalised (n, 3, size, size), or with `preprocessing` uint8 (n, h, w, 3).

    An image and its mirror image go through the model in one batch.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, predictor: Predictor, preprocessing: bool) -> None:
        super().__init__()
        method = predictor.method
        self.method, self.classes, self.preprocessing = method, len(predictor.classes), preprocessing
        self.transforms = predictor.transforms
        self.model = method.model  # parameters belong to a registered module
        self.tuning = modules_of(method.tuning)
        own = type(method).predict is not Method.predict
        self.classifier = method.classifier if own else plain_classifier(method.classifier)
        self.predict = method.predict if own else self._predict
        self.register_buffer("mean", predictor.transforms.mean.clone())
        self.register_buffer("std", predictor.transforms.std.clone())
        self.eval()

    def _predict(self, images: Tensor) -> Tensor:
        return self.classifier(at_least_float32(self.method.classifier_input(images)))

    def forward(self, images: Tensor) -> Tensor:
        if self.preprocessing:
            images = resized(images.permute(0, 3, 1, 2), self.transforms.resize, self.transforms.config.interpolation)
            images = self._normalised(self.transforms.cropped(images))
        views = self.method.views(images)
        scores = self.predict(torch.cat(views) if len(views) > 1 else images)
        if len(views) > 1:
            scores = scores.unflatten(0, (len(views), -1)).sum(0)
        if scores.shape[1] != self.classes:  # one score per class and domain
            scores = scores.unflatten(1, (-1, self.classes)).amax(1)
        return scores

    def inputs(self, images: Tensor) -> Tensor:
        """Its input, from resized images as uint8 (n, 3, h, w); with `preprocessing`, from images of any size."""
        if self.preprocessing:
            return images.permute(0, 2, 3, 1).contiguous()
        return self._normalised(self.transforms.cropped(images))

    def _normalised(self, images: Tensor) -> Tensor:
        return (images.to(self.mean.dtype) / 255 - self.mean) / self.std

    def terms(self) -> int:
        """How many products the sums of all layers have; for the rounding error of the scores."""
        matrices = (t for t in (*self.parameters(), *self.buffers()) if t.dim() >= 2 and t.shape[0])
        return sum(tensor[0].numel() for tensor in matrices)


def modules_of(tuning: Tuning) -> nn.Module | None:
    """The modules that a method has added to the backbone, or beside it."""
    tuning = tuning.added if isinstance(tuning, Together) else tuning
    found = tuning.modules if isinstance(tuning, AddedModules) else tuning
    return found if isinstance(found, nn.Module) else None


@contextmanager
def in_float64(module: Scores) -> Iterator[None]:
    """Within it, the module computes in float64."""
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    before = [tensor.data for tensor in tensors]
    of_method = {name: t for name, t in vars(module.method).items() if isinstance(t, Tensor) and t.is_floating_point()}
    try:
        for tensor in tensors:
            tensor.data = tensor.data.double()
        for name, tensor in of_method.items():
            setattr(module.method, name, tensor.double())
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data
        for name, tensor in of_method.items():
            setattr(module.method, name, tensor)


def exported(module: Scores, form: str) -> torch.export.ExportedProgram:
    """The module as PyTorch operators, with a dynamic batch; scans in a form of `ops.scan_traced`."""
    size = module.transforms.resize
    sides = (size + 2, size + 3) if module.preprocessing else (size, size)
    example = module.inputs(torch.zeros(3, 3, *sides, dtype=torch.uint8))
    dynamic = ("batch", "height", "width")[: 3 if module.preprocessing else 1]
    sizes = {axis: torch.export.Dim(name, min=1, max=MOST) for axis, name in enumerate(dynamic)}
    try:
        with torch.no_grad(), traced(form):
            return torch.export.export(module, (example,), dynamic_shapes={"images": sizes}, strict=False)
    except Exception as error:  # whatever a part of another package does that cannot be traced
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        method = module.method
        raise UserError(
            f"The method '{method.name}' with the classifier '{method.classifier.name}' cannot be traced by "
            f"torch.export ({reason}): export it with --to safetensors."
        ) from error
