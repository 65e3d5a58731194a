"""The README of a model on the Hugging Face Hub, from the model's description."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from mambacl.deploy.description import NO_WEIGHTS, Description
from mambacl.reports.rendering import markdown_escaped, pipe_table
from mambacl.training.metrics import METRICS

LICENCES = ("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0")
"""that the Hub knows, of those that weights have"""
SHOWN = 200  # classes


def model_card(repo: str, about: Description, file: str) -> str:
    """Markdown with YAML front matter. `file`: the model's name in the repository."""
    front = yaml.safe_dump(front_matter(repo, about), sort_keys=False, allow_unicode=True)
    parts = [
        f"---\n{front}---",
        f"# {repo.partition('/')[2]}",
        _summary(about),
        _use(repo, file),
        _table("Classes", ["label", "class"], [[str(n), name] for n, name in enumerate(about.classes[:SHOWN])]),
        f"And {len(about.classes) - SHOWN} more, in the file." if len(about.classes) > SHOWN else "",
        _table("Results", ["metric", "value", "meaning"], _metrics(about.card), _counted(about.card)),
        _steps(about),
        f"## Licence\n\nOf the weights that the training started from: {_plain(about.licence)}.",
        _made_with(about.card),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def front_matter(repo: str, about: Description) -> dict[str, Any]:
    card = about.card
    accuracy = card.get("metrics", {}).get("final_accuracy_images")
    found: dict[str, Any] = {
        **_licence(about.licence),
        "library_name": "mambacl",
        "pipeline_tag": "image-classification",
        "tags": ["mambacl", "mamba", "continual-learning", "image-classification", about.config.method],
    }
    if accuracy is not None:
        data = str(card.get("data", "unknown"))
        result = {
            "task": {"type": "image-classification"},
            "dataset": {"name": data, "type": data},
            "metrics": [{"type": "accuracy", "name": "final accuracy over images", "value": round(accuracy, 6)}],
        }
        found["model-index"] = [{"name": repo.partition("/")[2], "results": [result]}]
    return found


def _licence(words: str) -> dict[str, str]:
    """What the front matter says: the weights' licence; nothing if the author of the model can choose."""
    if words == NO_WEIGHTS:
        return {}
    first = words.partition(",")[0].lower()
    if first in LICENCES:
        return {"license": first}
    return {"license": "other", "license_name": re.sub(r"[^a-z0-9.-]+", "-", words.lower()).strip("-") or "unknown"}


def _summary(about: Description) -> str:
    card = about.card
    tasks = card.get("tasks")
    learned = f", learned in {tasks} task{'' if tasks == 1 else 's'}" if tasks else ""
    return (
        f"An image classifier with {len(about.classes)} classes{learned}: mambacl's method `{about.config.method}` on "
        f"the backbone `{about.config.backbone}`."
    )


def _use(repo: str, file: str) -> str:
    return f"""## Use it

    pip install 'mambacl[hub]'

```python
import mambacl

predictor = mambacl.load("hf://{repo}")
print(predictor.predict("photo.jpg")[0].name)
```

Or `mambacl pull {repo}`, which writes one file for `mambacl predict`, `serve` and `export`. `{file}` is a safetensors
file: nothing in it is executed."""


def _metrics(card: dict[str, Any]) -> list[list[str]]:
    known = [(METRICS.get(name), value) for name, value in card.get("metrics", {}).items() if name in METRICS.names()]
    return [[metric.title, f"{100 * value:.1f}%", metric.meaning] for metric, value in known]


def _counted(card: dict[str, Any]) -> str:
    words = f"On {card.get('test_images')} test images of {_plain(str(card.get('data')))}"
    return f"{words}, after training on {card.get('training_images')} images."


def _steps(about: Description) -> str:
    lines = [f"{number}. `{json.dumps(step)}`" for number, step in enumerate(about.preprocessing, start=1)]
    return "\n".join(["## Preprocessing", "", "`predict` does this by itself:", "", *lines])


def _made_with(card: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in card.get("versions", {}).items())
    return f"## Made with\n\n{versions}." if versions else ""


def _table(title: str, head: list[str], rows: list[list[str]], before: str = "") -> str:
    if not rows:
        return ""
    table = pipe_table(head, ([_plain(cell) for cell in row] for row in rows))
    return "\n\n".join(part for part in (f"## {title}", before, table.rstrip()) if part)


def _plain(text: str) -> str:
    """A character that UTF-8 lacks becomes an escape."""
    return markdown_escaped(text.encode(errors="backslashreplace").decode())
