"""A model as one module for exporters: images in, scores of all classes out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mambacl.deploy.plain_classifiers import plain_classifier
from mambacl.deploy.predictor import Predictor
from mambacl.methods import Method


class Scores(nn.Module):
    """Scores (n, classes) in float32 of images (n, 3, size, size): normalised, or with `preprocessing` uint8.

    The views of an image go through the model as one batch.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, predictor: Predictor, preprocessing: bool) -> None:
        super().__init__()
        method = predictor.method
        self.method, self.classes, self.preprocessing = method, len(predictor.classes), preprocessing
        self.model = method.model
        self.tuning = method.tuning if isinstance(method.tuning, nn.Module) else None
        own = type(method).predict is not Method.predict
        self.classifier = method.classifier if own else plain_classifier(method.classifier)
        self.predict = method.predict if own else self._predict
        self.register_buffer("mean", predictor.transforms.mean.clone())
        self.register_buffer("std", predictor.transforms.std.clone())

    def _predict(self, images: Tensor) -> Tensor:
        return self.classifier(self.method.classifier_input(images).float())

    def forward(self, images: Tensor) -> Tensor:
        if self.preprocessing:
            images = (images.float() / 255 - self.mean) / self.std
        views = self.method.views(images)
        scores = self.predict(torch.cat(views) if len(views) > 1 else images)
        if len(views) > 1:
            scores = scores.unflatten(0, (len(views), -1)).sum(0)
        if scores.shape[1] != self.classes:  # of several domains
            scores = scores.unflatten(1, (-1, self.classes)).amax(1)
        return scores


def exported(module: Scores, size: int, form: str) -> torch.export.ExportedProgram:
    """The module as PyTorch operators, with a dynamic batch; scans in a form of `ops.scan_traced`."""
    from mambacl.ops.scan_traced import traced

    kind = torch.uint8 if module.preprocessing else torch.float32
    example = torch.zeros(3, 3, size, size, dtype=kind)
    batch = torch.export.Dim("batch", min=1, max=65536)
    with torch.no_grad(), traced(form):
        return torch.export.export(module.eval(), (example,), dynamic_shapes={"images": {0: batch}}, strict=False)
