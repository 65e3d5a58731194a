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
    saved_as: str = ""  # if the end of the URL does not tell files apart
    full_name: str = ""  # in timm's words, "vit_base_patch16_224.augreg_in21k"; also accepted in place of the tag
    classes: int | None = None  # of the file's classifier, which tells kinds of weights apart; 0: the file has none

    @property
    def file(self) -> str:
        return self.packaged or self.saved_as or self.url.rpartition("/")[2]


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
    """by tag, a word of letters, digits, hyphens and underscores; the first is the default"""


MODELS: Registry[ModelEntry] = Registry("model", "mambacl.backbones")


def list_models() -> list[str]:
    """Names for `create_model`; those without a size, such as "defocus_mamba", take a full configuration."""
    return sorted(MODELS.names())
