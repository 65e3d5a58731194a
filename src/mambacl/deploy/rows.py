"""Predictions as data for JSON: the same from `mambacl predict --json` and from `mambacl serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mambacl.errors import UserError

if TYPE_CHECKING:
    from mambacl.deploy.predictor import Prediction


def as_row(file: str, answer: Prediction | UserError) -> dict[str, Any]:
    """What a model says about a file, or why the file cannot be read."""
    if isinstance(answer, UserError):
        return {"file": file, "error": str(answer)}
    pairs = zip(answer.classes, answer.probabilities, strict=True)
    best = [{"class": name, "probability": round(value, 6)} for name, value in pairs]
    return {"file": file, "predictions": best, "unknown": answer.unknown}
