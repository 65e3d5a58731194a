"""Embeddings of class names for methods that compare features with text. Works with any backbone."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.errors import UserError
from mambacl.files import expanded, read_tensors


def sentence(names: Sequence[str]) -> str:
    """What a text encoder reads for one class or for all classes of a task."""
    return f"A photo of {' or '.join(names)}."


class StoredTexts:
    """Embeddings from a safetensors file: one tensor (c,) per class, named by the class or by its sentence; if it also
    has one named by the sentence of a task, that is the task's, otherwise the mean over the task's classes is."""

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.width = expanded(path), width
        self.tensors: Mapping[str, Tensor] = read_tensors(self.path)[0]

    def of_class(self, name: str) -> Tensor:
        found = self.tensors.get(sentence([name]), self.tensors.get(name))
        if found is None:
            raise UserError(f"{self.path} has no text embedding named '{name}': add one for each class of the stream.")
        return self._checked(name, found)

    def of_task(self, names: Sequence[str]) -> Tensor:
        found = self.tensors.get(sentence(names))
        if found is not None:
            return self._checked(sentence(names), found)
        return torch.stack([F.normalize(self.of_class(name), dim=0) for name in names]).mean(0)

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.shape != (self.width,) or not torch.isfinite(tensor).all():
            raise UserError(
                f"The text embedding of '{name}' in {self.path} must be {self.width} finite values, as many as the "
                f"backbone's feature has, not {tuple(tensor.shape)}: use a text encoder of that width (CLIP ViT-L/14 "
                "for vit_base)."
            )
        return tensor.double()


def random_direction(label: int, width: int, seed: int) -> Tensor:
    """A stand-in without any text: a fixed unit vector (c,) for each label."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + label)
    return F.normalize(torch.randn(width, generator=generator), dim=0)
