"""SimpleCIL (Zhou et al., *Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and
Adaptivity are All You Need*, IJCV 2024): nothing trains; a class is the mean of its features, compared by angle."""

from typing import Any, ClassVar

from mambacl.methods.analytic import Analytic
from mambacl.methods.registry import METHODS


class SimpleCIL(Analytic):
    name = "simplecil"
    summary = "no training: class means of the fixed backbone's final feature, by angle (SimpleCIL)"
    own_classifier: ClassVar[str] = "nearest-mean"
    own_depths: ClassVar[str | int] = "final"

    def classifier_defaults(self) -> dict[str, Any]:
        return {"by": "angle"}


METHODS.add(SimpleCIL.name, SimpleCIL)
