"""Use a trained model: load a run or a model file, predict, add classes, compare two, write one file to deploy."""

from typing import TYPE_CHECKING

from mambacl.lazy import attributes

if TYPE_CHECKING:
    from mambacl.deploy.comparing import compare
    from mambacl.deploy.comparison import Comparison, Limits
    from mambacl.deploy.learning import Learning, learn, rollback
    from mambacl.deploy.loading import load
    from mambacl.deploy.predictor import Prediction, Predictor

__all__ = ["Comparison", "Learning", "Limits", "Prediction", "Predictor", "compare", "learn", "load", "rollback"]

__getattr__ = attributes(
    __name__,
    {
        "load": "loading",
        "compare": "comparing",
        **dict.fromkeys(("Comparison", "Limits"), "comparison"),
        **dict.fromkeys(("Prediction", "Predictor"), "predictor"),
        **dict.fromkeys(("Learning", "learn", "rollback"), "learning"),
    },
)
