"""The backbones by name, with their sizes, configurations and public weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

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
