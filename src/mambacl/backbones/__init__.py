"""Backbones by name, with the parameter names of the public checkpoints."""

from mambacl.backbones import defocus  # noqa: F401  (registers itself)
from mambacl.backbones.loading import convert, load_weights
from mambacl.backbones.registry import create_model, list_models

__all__ = ["convert", "create_model", "list_models", "load_weights"]
