"""What a model needs beside its tensors, as text: classes, options, preprocessing, card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mambacl.config import RunConfig, from_dict
from mambacl.errors import UserError

SCHEMA = 1
MARK = "mambacl.model"  # the entry that only exported models have
NO_WEIGHTS = "no pre-trained weights"  # instead of their licence
OPTIONS = (
    "method", "backbone", "backbone_options", "nullspace", "options", "classifier", "classifier_options", "features",
    "seed", "precision", "fast",
)  # fmt: skip
"""the options of a run that its predictions depend on; the others can name folders of the machine"""


@dataclass(frozen=True)
class Description:
    classes: list[str]
    """names by label"""
    config: RunConfig
    """of the run; from a file, with defaults for what does not affect predictions"""
    preprocessing: list[dict[str, Any]]
    """the steps of the evaluation transform, for readers"""
    licence: str = ""
    """of the backbone's weights"""
    card: dict[str, Any] = field(default_factory=dict)
    """where the model comes from"""

    def as_text(self) -> dict[str, str]:
        """For the metadata of a file."""
        own = self.config.as_dict()
        model = {name: own[name] for name in OPTIONS}
        model["stream"] = {"scenario": self.config.stream.scenario, "transforms": own["stream"]["transforms"]}
        content = {
            MARK: {"schema": SCHEMA, "options": model},
            "classes": self.classes,
            "preprocessing": self.preprocessing,
            "card": self.card,
        }
        text = {name: json.dumps(part) for name, part in content.items()}
        return {"format": "pt", "licence": self.licence, **text}

    @classmethod
    def from_text(cls, text: Mapping[str, str], where: str) -> Description:
        if MARK not in text:
            raise UserError(
                f"{where} is not a model that mambacl exported: give a run folder, or a file from `mambacl export RUN`."
            )
        try:
            model = json.loads(text[MARK])
            if model["schema"] != SCHEMA:
                raise UserError(
                    f"{where} has the schema {model['schema']!r}, but this version of mambacl reads schema {SCHEMA}: "
                    "export it again with this version, or use the version that wrote it."
                )
            return cls(
                classes=json.loads(text["classes"]),
                config=from_dict({"pretrained": False, **model["options"]}),
                preprocessing=json.loads(text["preprocessing"]),
                licence=text["licence"],
                card=json.loads(text["card"]),
            )
        except (KeyError, TypeError, json.JSONDecodeError):
            raise UserError(f"The description in {where} is damaged: export the model again.") from None
