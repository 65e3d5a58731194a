"""Use a trained model: load a run or a model file, predict, add classes, write one file to deploy."""

from typing import TYPE_CHECKING

from mambacl.lazy import attributes

if TYPE_CHECKING:
    from mambacl.deploy.learning import Learning, learn, rollback
    from mambacl.deploy.loading import load
    from mambacl.deploy.predictor import Prediction, Predictor

__all__ = ["Learning", "Prediction", "Predictor", "learn", "load", "rollback"]

__getattr__ = attributes(
    __name__,
    {
        "load": "loading",
        **dict.fromkeys(("Prediction", "Predictor"), "predictor"),
        **dict.fromkeys(("Learning", "learn", "rollback"), "learning"),
    },
)
