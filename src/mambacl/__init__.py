"""mambacl teaches a pre-trained Mamba model new classes, task after task, without the old data and without forgetting.

The names below are loaded when first used, so that `import mambacl` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mambacl.backbones import create_model, list_models
    from mambacl.config import RunConfig
    from mambacl.errors import UserError
    from mambacl.nullspace import NullSpace, Setting
    from mambacl.ops import selective_scan
    from mambacl.reports import write_report as report
    from mambacl.training.api import Run, audit, evaluate, resume, train
    from mambacl.training.recorded import recorded

    __version__: str

_HOMES = {
    "NullSpace": "mambacl.nullspace",
    "Run": "mambacl.training.api",
    "RunConfig": "mambacl.config",
    "Setting": "mambacl.nullspace",
    "UserError": "mambacl.errors",
    "audit": "mambacl.training.api",
    "create_model": "mambacl.backbones",
    "evaluate": "mambacl.training.api",
    "list_models": "mambacl.backbones",
    "recorded": "mambacl.training.recorded",
    "report": "mambacl.reports",
    "resume": "mambacl.training.api",
    "selective_scan": "mambacl.ops",
    "train": "mambacl.training.api",
}

__all__ = [
    "NullSpace",
    "Run",
    "RunConfig",
    "Setting",
    "UserError",
    "__version__",
    "audit",
    "create_model",
    "evaluate",
    "list_classifiers",
    "list_datasets",
    "list_methods",
    "list_models",
    "recorded",
    "report",
    "resume",
    "selective_scan",
    "train",
]


def list_methods() -> list[str]:
    """Names for the option `method` of a run."""
    from mambacl.methods import METHODS

    return sorted(METHODS.names())


def list_classifiers() -> list[str]:
    """Names for the option `classifier` of a run."""
    from mambacl.classifiers import CLASSIFIERS

    return sorted(CLASSIFIERS.names())


def list_datasets() -> list[str]:
    """Names for the option `stream.dataset` of a run."""
    from mambacl.datasets import DATASETS

    return sorted(DATASETS.names())


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mambacl")
    if name not in _HOMES:
        raise AttributeError(f"module 'mambacl' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), "write_report" if name == "report" else name)


def __dir__() -> list[str]:
    return __all__
