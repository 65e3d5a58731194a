"""What is checked of all runs before the first starts, and needs PyTorch: the options of methods, classifiers and
models, the data, and the trackers."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from mambacl.backbones.registry import MODELS
from mambacl.backbones.vit import timm_module
from mambacl.classifiers import CLASSIFIERS
from mambacl.config import RunConfig
from mambacl.data.stream import open_data
from mambacl.errors import UserError
from mambacl.methods import METHODS
from mambacl.options import build_config, merge
from mambacl.sweeps.plan import PlannedRun
from mambacl.training.build import pick_device
from mambacl.training.tracking import check_trackers


def check(runs: Iterable[PlannedRun], here: bool = True) -> None:
    """Raises an error that names the run. What several runs share is checked once. `here`: whether this machine trains
    them, and so needs their devices."""
    seen: set[str] = set()
    for run in runs:
        for name, (look, what) in _parts(run.config).items():
            key = name + json.dumps(what, sort_keys=True, default=str)
            if key in seen or (name == "device" and not here):
                continue
            seen.add(key)
            try:
                look()
            except UserError as error:
                raise UserError(f"{run.key}: {error}") from None


def _parts(config: RunConfig) -> dict[str, tuple[Callable[[], object], Any]]:
    """The checks of a run by name, and what each depends on."""
    return {
        "method": (lambda: _method(config), (config.method, config.options)),
        "classifier": (lambda: _classifier(config), (config.method, config.classifier, config.classifier_options)),
        "backbone": (lambda: _backbone(config), (config.backbone, config.backbone_options)),
        "data": (lambda: open_data(config.stream), config.as_dict()["stream"]),
        "device": (lambda: pick_device(config.device), config.device),
        "track": (lambda: check_trackers(config.track), config.track),
    }


def _method(config: RunConfig) -> None:
    build_config(METHODS.get(config.method).options_class, config.options, config.method)


def _classifier(config: RunConfig) -> None:
    name = METHODS.get(config.method).own_classifier if config.classifier == "auto" else config.classifier
    build_config(CLASSIFIERS.get(name).options_class, config.classifier_options, name)


def _backbone(config: RunConfig) -> None:
    if config.backbone.startswith("vit"):
        timm_module()  # says how to install it
    entry = MODELS.get(config.backbone)
    build_config(entry.config_class, merge(entry.config, config.backbone_options), config.backbone)
