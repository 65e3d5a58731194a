"""Classifiers as plain modules for an exported graph: no state, no cache, no number that depends on the batch.

Each has the scores of its classifier, up to rounding. A classifier that is not listed is traced unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers import LDA, Classifier, Gaussian, NearestMean, Ridge
from mambacl.classifiers.lift import ACTIVATIONS


class Traced(nn.Module):
    """A classifier that can be traced unchanged, such as heads."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, features: Tensor) -> Tensor:
        return self.classifier.scores(features)


class PlainRidge(nn.Module):
    center: Tensor
    scale: Tensor
    projection: Tensor | None
    weights: Tensor
    shift: Tensor

    def __init__(self, classifier: Ridge) -> None:
        super().__init__()
        classifier.scores(torch.zeros(1, classifier.num_features))  # solves, and draws the projection
        self.activation = str(classifier.options.activation)
        weights, projection = classifier.weights, classifier.projection
        if projection is not None and self.activation == "fourier":  # all cosines, then all sines
            weights = F.pad(weights, (0, 2 * projection.shape[1] - weights.shape[1]))
            weights = torch.cat((weights[:, 0::2], weights[:, 1::2]), dim=1)
        self.register_buffer("center", classifier.center.clone())
        self.register_buffer("scale", classifier.scale.clone())
        self.register_buffer("projection", projection)
        self.register_buffer("weights", weights.T.contiguous())
        self.register_buffer("shift", _shift(classifier.counts))

    def forward(self, features: Tensor) -> Tensor:
        x = (features.to(self.center.dtype) - self.center) / self.scale
        if self.projection is not None:
            x = x @ self.projection
            waves = self.activation == "fourier"
            x = torch.cat((x.cos(), x.sin()), dim=1) if waves else ACTIVATIONS[self.activation](x)
        return (x @ self.weights).to(features.dtype) + self.shift


class PlainNearestMean(nn.Module):
    means: Tensor
    shift: Tensor

    def __init__(self, classifier: NearestMean) -> None:
        super().__init__()
        self.by_angle, means = classifier.options.by == "angle", classifier.means()
        self.register_buffer("means", (F.normalize(means, dim=1) if self.by_angle else means).float())
        self.register_buffer("shift", _shift(classifier.counts))

    def forward(self, features: Tensor) -> Tensor:
        if self.by_angle:
            return self.shift + F.linear(F.normalize(features, dim=1), self.means)
        differences = features.unsqueeze(1) - self.means  # (b, classes, d); a product would swamp small distances
        return self.shift - differences.square().sum(2).sqrt()


class PlainLDA(nn.Module):
    centre: Tensor
    weights: Tensor
    biases: Tensor

    def __init__(self, classifier: LDA) -> None:
        super().__init__()
        for name, tensor in zip(("centre", "weights", "biases"), classifier.solution(torch.float64), strict=True):
            self.register_buffer(name, tensor.clone())

    def forward(self, features: Tensor) -> Tensor:
        return ((features.double() - self.centre) @ self.weights.T + self.biases).to(features.dtype)


class PlainGaussian(nn.Module):
    centre: Tensor
    whiteners: Tensor
    whitened: Tensor
    biases: Tensor

    def __init__(self, classifier: Gaussian) -> None:
        super().__init__()
        self.options = classifier.options
        centre, whiteners, whitened, biases = classifier.solution(torch.float32)
        self.register_buffer("centre", centre.clone())
        self.register_buffer("whiteners", whiteners.flatten(0, 1).T.contiguous())  # (d, classes d)
        self.register_buffer("whitened", whitened.clone())
        self.register_buffer("biases", biases.clone())

    def forward(self, features: Tensor) -> Tensor:
        if self.options.unit == "features":
            features = F.normalize(features, dim=1)
        if self.options.tukey != 1:
            features = features.sign() * features.abs().pow(self.options.tukey)
        if self.options.unit == "distance":
            features = F.normalize(features, dim=1)
        places = ((features - self.centre) @ self.whiteners).unflatten(1, self.whitened.shape)  # (b, classes, d)
        return self.biases - (places - self.whitened).square().sum(2) / 2


def _shift(counts: Tensor) -> Tensor:
    """Minus infinity for a class without images, otherwise 0."""
    return torch.zeros(len(counts)).masked_fill(counts == 0, -torch.inf)


PLAIN: dict[type[Classifier], Any] = {
    Ridge: PlainRidge,
    NearestMean: PlainNearestMean,
    LDA: PlainLDA,
    Gaussian: PlainGaussian,
}


def plain_classifier(classifier: Classifier) -> nn.Module:
    return PLAIN.get(type(classifier), Traced)(classifier)
