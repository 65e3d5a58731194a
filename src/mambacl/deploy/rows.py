"""Predictions as data for JSON: the same from `mambacl predict --json` and from `mambacl serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mambacl.errors import UserError

if TYPE_CHECKING:
    from mambacl.classifiers.calibration import Rates
    from mambacl.deploy.predictor import Prediction


def as_row(file: str, answer: Prediction | UserError, calibrated: bool, rates: Rates | None = None) -> dict[str, Any]:
    """What a model says about a file, or why the file cannot be read. `rates` are those of the threshold for unknown
    images, if the model knows them."""
    if isinstance(answer, UserError):
        return {"file": file, "error": str(answer)}
    pairs = zip(answer.classes, answer.probabilities, strict=True)
    best = [{"class": name, "probability": round(value, 6)} for name, value in pairs]
    row = {"file": file, "predictions": best, "unknown": answer.unknown, "calibrated": calibrated}
    return row if rates is None else {**row, "unknown_below": as_numbers(rates)}


def as_numbers(rates: Rates) -> dict[str, float]:
    """A threshold and its estimated error rates."""
    return {
        "threshold": round(rates.threshold, 6),
        "false_rejections": round(rates.false_rejections, 6),
        "false_acceptances": round(rates.false_acceptances, 6),
    }


def as_sentence(rates: Rates) -> str:
    """The same for readers."""
    return (
        f"unknown: below {rates.threshold:.1%}. About {rates.false_rejections:.1%} of images of known classes and "
        f"{1 - rates.false_acceptances:.1%} of others are below it, estimated from {rates.images} images."
    )
