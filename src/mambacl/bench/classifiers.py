"""Part `classifier`: how much time a classifier from statistics adds to the backbone."""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mambacl.backbones.reading import FeatureReader
from mambacl.bench.models import build, each_case, images, products
from mambacl.bench.result import Result, Row
from mambacl.bench.sizes import Case, Sizes
from mambacl.bench.timing import Clock
from mambacl.classifiers import Ridge
from mambacl.training.step import autocast

CLASSES = 100
LIMITS = ("100MB", "1GB")
NOTES = (
    "GPU time, or that of the CPU. backbone: images to the final feature. all depths: also the class token and the "
    f"mean of all depths. ridge: the scores of {CLASSES} classes from these features. Weights are random. The ridge "
    "classifier's products are in TF32 if the precision is bf16.",
)


def measure(clock: Clock, sizes: Sizes) -> Result:
    cases = [Case(case.model, case.batches[-1:], case.pixels, case.options) for case in sizes.inference]
    rows = each_case(cases, sizes.precisions, partial(_rows, clock))
    return Result(f"Classifiers from statistics on {clock.device.type}", rows, list(NOTES))


@torch.no_grad()
def _rows(clock: Clock, case: Case, precision: str) -> list[Row]:
    model = build(case, clock.device)
    (batch,) = case.batches
    given, reader = images(case, model, batch), FeatureReader(model, "all")

    def read(how: str) -> Tensor:
        with autocast(clock.device, precision == "bf16"):
            return reader(given) if how == "all" else model(given)

    with products(precision):
        features = read("all")
        ridges = {limit: _random(reader.num_features, limit, features) for limit in LIMITS}
        calls: dict[str, Callable[[], object]] = {"backbone": partial(read, "final"), "depths": partial(read, "all")}
        calls |= {limit: partial(ridge.scores, features) for limit, ridge in ridges.items()}
        seconds = {name: statistics.median(times) for name, times in clock.in_rounds(calls).items()}
    return [
        {
            "model": case.model, "batch": batch, "precision": precision, "state": limit, "units": ridge.units,
            "backbone_us_per_image": 1e6 * seconds["backbone"] / batch,
            "all_depths_us_per_image": 1e6 * seconds["depths"] / batch,
            "ridge_us_per_image": 1e6 * seconds[limit] / batch,
            "ridge_/_backbone": seconds[limit] / seconds["backbone"],
        }
        for limit, ridge in ridges.items()
    ]  # fmt: skip


def _random(width: int, limit: str, features: Tensor) -> Ridge:
    """A classifier that has learned from random features."""
    made = Ridge(width, state_limit=limit, expected_classes=CLASSES).to(features.device)
    made.add_task(CLASSES)
    made.fit_scale(features)
    made.weights.copy_(torch.randn_like(made.weights))
    made.counts += 1
    return made
