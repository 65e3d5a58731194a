"""Backbones by name, with the parameter names of the public checkpoints."""

from mambacl.backbones import defocus, mambavision, vim, vit, vmamba  # noqa: F401  (register themselves)
from mambacl.backbones.loading import convert, create_model, load_weights
from mambacl.backbones.registry import list_models

__all__ = ["convert", "create_model", "list_models", "load_weights"]
