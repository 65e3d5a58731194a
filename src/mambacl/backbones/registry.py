"""The backbones by name, with their sizes, configurations and public weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mambacl.registry import Registry


@dataclass(frozen=True)
class PublicWeights:
    """The source of a model's weights: a file in the package or a URL."""

    packaged: str | None = None
    url: str = ""
    sha256: str | None = None
    licence: str = ""
    data: str = "ImageNet-1k"  # whose classes the classifier knows
    top1: float | None = None  # per cent, on the validation images of `data`, as published

    @property
    def file(self) -> str:
        return self.packaged or self.url.rpartition("/")[2]


def packaged(file: str, top1: float) -> PublicWeights:
    """A file in backbones/weights, where a model card says how it was made."""
    return PublicWeights(packaged=file, licence="Apache-2.0", data="Tiny-ImageNet at 32 px", top1=top1)


@dataclass(frozen=True)
class ModelEntry:
    name: str
    build: Callable[[Any], nn.Module]  # takes an instance of config_class
    config_class: type
    config: Mapping[str, Any]  # values that differ from the class's defaults
    weights: Mapping[str, PublicWeights] = field(default_factory=dict)
    """by tag, a word of letters, digits and hyphens; the first is the default"""


MODELS: Registry[ModelEntry] = Registry("model", "mambacl.backbones")


def list_models() -> list[str]:
    """Names for `create_model`; those without a size, such as "defocus_mamba", take a full configuration."""
    return sorted(MODELS.names())
