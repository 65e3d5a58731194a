"""How far the outputs of a backbone's blocks have moved between two models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mambacl.backbones.layers import Backbone
from mambacl.backbones.reading import pooled
from mambacl.deploy.predictor import Predictor
from mambacl.training.api import arithmetic
from mambacl.training.step import autocast


class Drift:
    """Sums over batches of images; `relative` is the result."""

    def __init__(self, old: Predictor, new: Predictor) -> None:
        self.models = (old, new)
        self.names = [str(info["module"]) for info in _backbone(old).feature_info]
        self.same = _equal(_weights(old), _weights(new))
        self.sums = torch.zeros(len(self.names), 2, dtype=torch.float64)  # of squares: change, old output

    @classmethod
    def of(cls, old: Predictor, new: Predictor) -> Drift | None:
        """None if the models have different backbones, or inputs of different sizes."""
        configs = [model.description.config for model in (old, new)]
        same = configs[0].backbone == configs[1].backbone
        same = same and configs[0].backbone_options == configs[1].backbone_options
        same = same and old.transforms.size == new.transforms.size
        shown = all(isinstance(m.method.model, Backbone) and m.method.model.feature_info for m in (old, new))
        return cls(old, new) if same and shown else None

    @torch.no_grad()
    def add(self, images: Tensor) -> None:
        """Adds a batch of inputs of the old model; both get the same."""
        if self.same or not len(images):
            return
        before, after = (_block_outputs(model, images) for model in self.models)
        for row, then, now in zip(self.sums, before, after, strict=True):
            row += torch.stack(((now - then).square().sum(), then.square().sum()))

    def relative(self) -> dict[str, float]:
        """|new - old| / |old| of each block."""
        change, size = self.sums.T
        return dict(zip(self.names, (change / size.where(size > 0, 1)).sqrt().tolist(), strict=True))


def _backbone(model: Predictor) -> Backbone:
    assert isinstance(model.method.model, Backbone)
    return model.method.model


def _block_outputs(model: Predictor, images: Tensor) -> list[Tensor]:
    """The pooled output (n, c) of each block, with the model's precision, as float64 on the CPU."""
    backbone, config = _backbone(model), model.description.config
    images = images.to(model.device, torch.float32)

    def pool(_: int, x: Tensor) -> Tensor:
        return pooled(*backbone.prefix_and_map(x, images)).cpu().double()

    with arithmetic(config), autocast(model.device, config.precision == "bf16"):
        return backbone.run_depths(images, range(len(backbone.feature_info)), pool)[1]


def _weights(model: Predictor) -> dict[str, Tensor]:
    """Of the backbone and what is added to it."""
    return {**model.method.model.state_dict(), **model.method.tuning.state_dict()}


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].shape == b[name].shape and bool((a[name].cpu() == b[name].cpu()).all()) for name in a
    )
