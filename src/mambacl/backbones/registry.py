"""`create_model` and `list_models`: backbones by name, with their sizes, configurations and public weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from mambacl.log import logger
from mambacl.options import build_config, merge
from mambacl.registry import Registry


@dataclass(frozen=True)
class PublicWeights:
    """The source of a model's weights: a file in the package or a URL."""

    packaged: str | None = None
    url: str | None = None
    sha256: str | None = None
    licence: str = ""
    top1: float | None = None  # per cent, as published, on ImageNet-1k; the packaged one: Tiny-ImageNet at 32 px


@dataclass(frozen=True)
class ModelEntry:
    name: str
    build: Callable[[Any], nn.Module]  # takes an instance of config_class
    config_class: type
    config: Mapping[str, Any]  # values that differ from the class's defaults
    weights: PublicWeights | None = None


MODELS: Registry[ModelEntry] = Registry("model", "mambacl.backbones")


def list_models() -> list[str]:
    """Names for `create_model`; those without a size, such as "defocus_mamba", take a full configuration."""
    return sorted(MODELS.names())


def create_model(
    name: str, pretrained: bool | str | Path = False, *, num_classes: int | None = None, **config: Any
) -> nn.Module:
    """Creates a backbone by name.

    `pretrained`: True for the public weights of this model, or the path of a checkpoint (.safetensors or a public
    .pth). `num_classes`: 0 for no classifier (the output is the pooled feature). `config`: overrides by name, nested
    ones as a mapping.
    """
    entry = MODELS.get(name)
    if num_classes is not None:
        config["num_classes"] = num_classes
    model = entry.build(build_config(entry.config_class, merge(entry.config, config), name))
    load_pretrained(model, name, pretrained)
    return model


def load_pretrained(model: nn.Module, name: str, pretrained: bool | str | Path) -> None:
    """Loads the public weights of this model (True), those of a file (a path), or none (False)."""
    from mambacl.backbones.loading import load_weights, weights_file

    if pretrained is not False:
        path = weights_file(MODELS.get(name)) if pretrained is True else Path(pretrained)
        logger.info("%s", load_weights(model, path))
