"""The ridge classifier's lifts and rules, and numbers recorded from RanPAC and ACIL."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ridge_help import CLASSES, WIDTH, D, assert_alike, some, taught
from safetensors.torch import load_file
from torch import Tensor

from mambacl.classifiers import Ridge
from mambacl.classifiers.least_squares import CURRENT, current_task_errors
from mambacl.classifiers.lift import draw
from mambacl.classifiers.ridge_options import RULES, RidgeOptions

# Options


def test_without_a_lift() -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    made = taught(features, labels, width=0, activation="none")
    m, s = features.double().mean(0), features.double().std(0, correction=0)
    h, t = (features - m) / s, (test - m) / s
    assert made.units == D
    assert_alike(
        made.scores(test), t @ torch.linalg.solve(h.T @ h + 2 * torch.eye(D), h.T @ F.one_hot(labels).double())
    )


def test_blocks_are_classifiers_whose_scores_are_averaged() -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    made = taught(features, labels, blocks=2)
    m, s = features.double().mean(0), features.double().std(0, correction=0)
    parts = []
    for W in draw(D, WIDTH, 0).double().chunk(2, dim=1):
        h, t = (torch.relu((f - m) / s @ W) for f in (features, test))
        parts.append(t @ torch.linalg.solve(h.T @ h + 2 * torch.eye(20), h.T @ F.one_hot(labels).double()))
    assert_alike(made.scores(test), (parts[0] + parts[1]) / 2)


@pytest.mark.parametrize("width", [WIDTH, WIDTH - 1])
def test_fourier_features_are_cosines_and_sines(width: int) -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    made = taught(features, labels, activation="fourier", bandwidth=0.3, width=width)
    m, s = features.double().mean(0), features.double().std(0, correction=0)
    angles = (0.3 * ((f - m) / s @ draw(D, WIDTH // 2, 0).double()) for f in (features, test))
    h, t = (torch.stack((x.cos(), x.sin()), 2).flatten(1)[:, :width] for x in angles)
    expected = t @ torch.linalg.solve(h.T @ h + 2 * torch.eye(width), h.T @ F.one_hot(labels).double())
    assert_alike(made.scores(test), expected)


def test_balanced_divides_by_the_number_of_images() -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    chosen = (labels > 0) | (torch.arange(120) < 20)  # class 0 has 4 images, the others 24
    plain, balanced = (taught(features[chosen], labels[chosen], balanced=value) for value in (False, True))
    counts = torch.tensor([4.0, 24, 24, 24, 24])
    assert balanced.counts.tolist() == counts.tolist()
    assert_alike(balanced.scores(test), plain.scores(test) * counts.mean() / counts)


def test_rules_are_settings() -> None:
    for rule, values in RULES.items():
        made = Ridge(D, rule=rule, **({} if rule == "ours" else {"width": 50}))
        assert {name: getattr(made.options, name) for name in values if name != "width"} == {
            name: value for name, value in values.items() if name != "width"
        }
    assert (
        Ridge(D).units == 32 * D and Ridge(1000).units == 5000 and Ridge(D, rule="acil", width=8).options.ridge == 0.1
    )


def test_the_page_shows_every_option_and_its_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "classifiers.md").read_text(encoding="utf-8")
    for option in fields(RidgeOptions):
        assert f"| `{option.name}` |" in text
    features, labels = some()
    names: dict[str, Any] = {"features": features, "labels": labels}
    exec(re.findall(r"```python\n(.*?)```", text, re.S)[0], names)
    assert names["classifier"].counts.sum() == 240 and names["classifier"].nbytes <= 2e6
    assert capsys.readouterr().out.endswith(" MB\n")
    exec(re.findall(r"```python\n(.*?)```", text, re.S)[1], names)
    expected = 1.1 * torch.stack([features[labels == label].double().mean(0) for label in range(CLASSES)])
    assert (names["classifier"].statistics.means() - expected).abs().max() < 1e-5 * expected.abs().max()


# Recorded numbers


def recorded_like(goldens: Path, rule: str, features: int, projection: Tensor, **options: Any) -> Ridge:
    made = Ridge(features, rule=rule, width=projection.shape[1], storage="float64", **options)
    made.projection = projection.double()
    return made


def test_the_recorded_ranpac(goldens: Path) -> None:
    recorded = load_file(goldens / "ranpac.safetensors")
    made = recorded_like(goldens, "ranpac", 24, recorded["random_projection"])
    made.add_task(9)  # the recording's targets have a column for every class of all tasks
    for task in range(3):
        tensors = {key: recorded[f"task{task}.{key}"] for key in ("features", "labels", "ridge_losses", "weight")}
        h, y = made.lifted(tensors["features"]), F.one_hot(tensors["labels"], 9)
        errors = current_task_errors(h, y, made.options.held_out)
        torch.testing.assert_close(
            errors, tensors["ridge_losses"], rtol=2e-5, atol=0
        )  # small ridges are ill-conditioned
        made.update(tensors["features"], tensors["labels"])
        made.finish_task()
        assert made.ridge == recorded[f"task{task}.ridge"] and made.ridge in CURRENT
        torch.testing.assert_close(made._gram().block(slice(0, 40), torch.float64), recorded[f"task{task}.gram"])
        torch.testing.assert_close(made.sums.T, recorded[f"task{task}.class_sums"])
        seen = len(tensors["weight"])
        torch.testing.assert_close(made.weights[:seen], tensors["weight"], rtol=1e-7, atol=1e-9)


def test_the_recorded_acil(goldens: Path) -> None:
    """Its recursive least squares are this ridge regression."""
    recorded = load_file(goldens / "acil.safetensors")
    made = recorded_like(goldens, "acil", 6, recorded["random_projection.weight"].T)
    for chunk in range(3):
        features, labels = recorded[f"chunk{chunk}.features"], recorded[f"chunk{chunk}.labels"]
        torch.testing.assert_close(made.lifted(features), recorded[f"chunk{chunk}.expanded_features"])
        made.update(features, labels)
        made.finish_task()
        torch.testing.assert_close(made.weights.T, recorded[f"chunk{chunk}.recursive.weight"], rtol=1e-8, atol=1e-10)
        inverse = torch.linalg.inv(made._gram().block(slice(0, 20), torch.float64) + 0.1 * torch.eye(20))
        torch.testing.assert_close(inverse, recorded[f"chunk{chunk}.recursive.R"], rtol=1e-6, atol=1e-6)  # a recursion
    scores = made.scores(recorded["test.features"])
    torch.testing.assert_close(scores, recorded["test.recursive_scores"], rtol=1e-8, atol=1e-10)


def test_ranpac_answers_before_a_task_ends() -> None:
    features, labels = some()
    made = Ridge(D, rule="ranpac", width=WIDTH)
    made.update(features[:60], labels[:60])
    assert made.scores(features).isfinite().all() and made.ridge > 0
    made.update(features[60:], labels[60:])
    made.finish_task()  # judged by what has arrived since
    assert made.ridge in CURRENT
