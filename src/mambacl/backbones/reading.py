"""Reads features of several depths from a model, for classifiers that are computed from them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.backbones.layers import Backbone, chosen_indices
from mambacl.errors import UserError
from mambacl.features import POOLS
from mambacl.ops.precision import at_least_float32

Depths = str | int | Sequence[int]


def chosen_depths(depths: Depths, count: int) -> list[int]:
    """Which of a model's `count` depths these are, counted from 0.

    "final": none, "all", a number n of evenly spaced ones with the last included (all if there are fewer), or a list of
    indices (from the end if negative).
    """
    if depths == "final":
        return []
    if depths == "all":
        return list(range(count))
    if isinstance(depths, int) and depths > 0:
        n = min(depths, count)
        return [-(-k * count // n) - 1 for k in range(1, n + 1)]  # rounded up: the deeper one
    if isinstance(depths, str | int):
        raise UserError(f"depths must be final, all, a positive number or a list of indices, got {depths!r}.")
    return chosen_indices(count, depths, "depths")


class FeatureReader:
    """`reader(images)` is (b, num_features) in float32 or better: for each chosen depth what `pool` names, the class
    token only if the model has one; then the final feature, which is `model(images)` of a model without head.

    A depth is a block, or a stage of VMamba and MambaVision, before the last norm. `depths` is described at
    `chosen_depths`. Any module with `num_features` can be read at "final"; at other depths our models and those of
    timm that have `forward_intermediates`.
    """

    def __init__(self, model: nn.Module, depths: Depths = "final", pool: Sequence[str] = ("class", "mean")) -> None:
        """`pool`: some of `POOLS`, described at `pooled`."""
        self.model, final = model, _width(model)
        if not pool or not set(pool) <= set(POOLS):
            raise UserError(f"pool must be a list of {', '.join(POOLS)}, got {list(pool)}.")
        self.pool = tuple(pool)
        info: list[dict[str, Any]] = getattr(model, "feature_info", None) or []
        shows_depths = bool(info) and hasattr(model, "forward_intermediates")
        if depths != "final" and not shows_depths:
            raise UserError(
                f"{type(model).__name__} lacks forward_intermediates or feature_info, which depths = {depths!r} needs: "
                "choose depths = 'final'."
            )
        self.prefix_tokens = int(getattr(model, "num_prefix_tokens", 0))
        self.indices = chosen_depths(depths, len(info))
        vectors = {"class": self.prefix_tokens, "mean": 1, "std": 1, "quadrants": 4}
        per_depth = sum(vectors[name] for name in self.pool)
        self.num_features = sum(per_depth * info[i]["num_chs"] for i in self.indices) + final

    def __call__(self, images: Tensor) -> Tensor:
        model: Any = self.model
        if not self.indices:
            return at_least_float32(self._final(images))
        if isinstance(model, Backbone):  # pools at once, and lets go of the tokens

            def pool(_: int, x: Tensor) -> Tensor:
                return pooled(*model.prefix_and_map(x, images), self.pool)

            last, parts = model.run_depths(images, self.indices, pool)
            last = model.final_norm(last)
        else:
            options = {"return_prefix_tokens": True} if self.prefix_tokens else {}
            last, outputs = model.forward_intermediates(images, indices=self.indices, output_fmt="NCHW", **options)
            pairs = outputs if self.prefix_tokens else [(image, None) for image in outputs]
            parts = [pooled(prefix, image.permute(0, 2, 3, 1), self.pool) for image, prefix in pairs]
        return torch.cat((*parts, at_least_float32(model.forward_head(last, pre_logits=True))), dim=1)

    def _final(self, images: Tensor) -> Tensor:
        model: Any = self.model
        if getattr(model, "num_classes", 0) and hasattr(model, "forward_head"):
            return model.forward_head(model.forward_features(images), pre_logits=True)
        return model(images)


def pooled(prefix: Tensor | None, image: Tensor, pool: Sequence[str] = ("class", "mean")) -> Tensor:
    """One row per image, in float32 or better: "class", the class tokens (b, p, c), if there are any; "mean" and "std"
    over a map (b, h, w, c); "quadrants", its means over the upper left, upper right, lower left and lower right."""
    dtype = torch.promote_types(image.dtype, torch.float32)
    made: dict[str, Callable[[], Tensor]] = {
        "class": lambda: image.new_empty(image.shape[0], 0) if prefix is None else prefix.flatten(1),
        "mean": lambda: image.mean((1, 2), dtype=dtype),
        "std": lambda: image.to(dtype).var((1, 2), correction=0).sqrt(),
        "quadrants": lambda: F.adaptive_avg_pool2d(image.to(dtype).movedim(3, 1), 2).movedim(1, 3).flatten(1),
    }
    return torch.cat([made[name]().to(dtype) for name in pool], dim=1)


def _width(model: Any) -> int:
    """The width of the final feature."""
    for name in ("head_hidden_size", "num_features"):  # timm's layers between pooling and classifier change the width
        width = getattr(model, name, None)
        if isinstance(width, int):
            return width
    raise UserError(f"{type(model).__name__} has no num_features: set it to the width of its output.")
