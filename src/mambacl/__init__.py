"""mambacl teaches a pre-trained Mamba model new classes, task after task, without the old data and without forgetting.

The names below are loaded when first used, so that `import mambacl` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mambacl.timm_models import join_timm

if TYPE_CHECKING:
    from mambacl.backbones import create_model, list_models
    from mambacl.errors import UserError
    from mambacl.nullspace import NullSpace
    from mambacl.ops import selective_scan
    from mambacl.reports import write_report as report
    from mambacl.training.recorded import recorded
    from mambacl.training.run import Run, audit, evaluate, resume, train

_HOMES = {
    "create_model": "mambacl.backbones",
    "list_models": "mambacl.backbones",
    "NullSpace": "mambacl.nullspace",
    "selective_scan": "mambacl.ops",
    "Run": "mambacl.training.run",
    "UserError": "mambacl.errors",
    "audit": "mambacl.training.run",
    "evaluate": "mambacl.training.run",
    "recorded": "mambacl.training.recorded",
    "report": "mambacl.reports",
    "resume": "mambacl.training.run",
    "train": "mambacl.training.run",
}

__all__ = [
    "NullSpace",
    "Run",
    "UserError",
    "audit",
    "create_model",
    "evaluate",
    "list_models",
    "recorded",
    "report",
    "resume",
    "selective_scan",
    "train",
]


join_timm()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mambacl' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), "write_report" if name == "report" else name)


def __dir__() -> list[str]:
    return __all__
