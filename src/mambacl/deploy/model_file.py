"""One safetensors file with all that a model needs to predict.

Names of tensors begin with `backbone.`, `method.` (heads and adapters; trained parameters of the backbone share its
tensors) or `task.` (a classifier that is computed from features, prototypes). `description` makes the metadata.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from mambacl.deploy.description import MARK, Description
from mambacl.errors import UserError
from mambacl.files import make_folder, read_tensors, write_tensors, writing
from mambacl.methods.base import CLASSIFIER, Method

PARTS = ("backbone", "method", "task")


def write_model(method: Method, description: Description, path: Path) -> None:
    check_target(path)
    make_folder(path.parent)
    with writing(path):
        write_tensors(path, tensors_of(method), description.as_text())


def check_target(path: Path) -> None:
    """Refuses a name that is not for a model, or that something else has."""
    if path.suffix != ".safetensors":
        raise UserError(f"The model's file must end in .safetensors, got {path}.")
    if path.exists():
        read_description(path, f"{path} exists and is not an exported model: choose another name.")


def tensors_of(method: Method) -> dict[str, Tensor]:
    """What a method needs to predict, by the names in a file."""
    classifier = method.classifier
    state, task_state = method.for_answers(method.state_dict(), method.task_state_dict())
    if classifier.updates:
        needed = classifier.for_scores(classifier.state_dict())
        task_state = {name: needed.get(name.removeprefix(CLASSIFIER), t) for name, t in task_state.items()}
    parts = {"backbone": method.model.state_dict(), "method": state, "task": task_state}
    return {f"{part}.{name}": tensor for part, found in parts.items() for name, tensor in found.items()}


def read_model(path: Path) -> tuple[dict[str, dict[str, Tensor]], Description]:
    """The tensors by part, and the description."""
    description = read_description(path)
    tensors, _ = read_tensors(path)
    parts = {
        part: {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}
        for part in PARTS
    }
    return parts, description


def is_exported(path: Path) -> bool:
    """Whether `mambacl export` wrote this file."""
    return MARK in _text(path)


def read_description(path: Path, otherwise: str | None = None) -> Description:
    """The description alone, without reading the tensors. `otherwise`: the error for a file of another kind."""
    text = _text(path)
    if otherwise is not None and MARK not in text:
        raise UserError(otherwise)
    return Description.from_text(text, str(path))


def _text(path: Path) -> dict[str, str]:
    """The metadata; empty if it is no safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError):
        return {}
