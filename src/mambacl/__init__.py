"""mambacl teaches a pre-trained Mamba model new classes, task after task, without keeping the old images.

The names below are imported on first use, so that `import mambacl` is fast.
"""

from typing import TYPE_CHECKING, Any

from mambacl.lazy import attributes, own_version

if TYPE_CHECKING:
    from mambacl.backbones import create_model, list_models
    from mambacl.config import RunConfig
    from mambacl.data import list_datasets
    from mambacl.deploy import Comparison, Predictor, compare, learn, load, rollback
    from mambacl.errors import UserError
    from mambacl.heap import keep_freed_memory
    from mambacl.nullspace import NullSpace, Setting
    from mambacl.ops import selective_scan
    from mambacl.reports import write_report as report
    from mambacl.sweeps.api import sweep
    from mambacl.sweeps.tune import tune
    from mambacl.training.api import Run, audit, evaluate, resume, train
    from mambacl.training.recorded import recorded

    __version__: str

_attribute = attributes(
    __name__,
    {
        **dict.fromkeys(("NullSpace", "Setting"), "nullspace"),
        **dict.fromkeys(("Run", "audit", "evaluate", "resume", "train"), "training.api"),
        **dict.fromkeys(("Comparison", "Predictor", "compare", "learn", "load", "rollback"), "deploy"),
        "RunConfig": "config",
        "UserError": "errors",
        **dict.fromkeys(("create_model", "list_models"), "backbones"),
        "keep_freed_memory": "heap",
        "list_datasets": "data",
        "recorded": "training.recorded",
        "selective_scan": "ops",
        "sweep": "sweeps.api",
        "tune": "sweeps.tune",
    },
)

__all__ = [
    "Comparison",
    "NullSpace",
    "Predictor",
    "Run",
    "RunConfig",
    "Setting",
    "UserError",
    "__version__",
    "audit",
    "compare",
    "create_model",
    "evaluate",
    "keep_freed_memory",
    "learn",
    "list_classifiers",
    "list_datasets",
    "list_methods",
    "list_models",
    "load",
    "recorded",
    "report",
    "resume",
    "rollback",
    "selective_scan",
    "sweep",
    "train",
    "tune",
]


def list_methods() -> list[str]:
    """Names for the option `method` of a run."""
    from mambacl.methods import METHODS

    return sorted(METHODS.names())


def list_classifiers() -> list[str]:
    """Names for the option `classifier` of a run."""
    from mambacl.classifiers import CLASSIFIERS

    return sorted(CLASSIFIERS.names())


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return own_version()
    if name == "report":
        from mambacl.reports import write_report

        return write_report
    return _attribute(name)


def __dir__() -> list[str]:
    return __all__
