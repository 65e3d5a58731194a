"""EFC++ adds its penalty from the second task on. The penalty and the matrix themselves are compared with recorded
numbers in tests/classifiers/test_drift_recordings.py."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers import AlignedHeads
from mambacl.errors import UserError
from mambacl.features import FeatureOptions
from mambacl.methods import METHODS, Setup, Task

IMAGES = torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 4


def first_task(tiny_model: Any, **setup: Any) -> Any:
    """A method that has trained and finished a task of two classes, and begun one of two more."""
    method = METHODS.get("efc")(tiny_model(), Setup(**setup))
    method.start_task(Task(0, 2, 0, seed=0))
    step(method, LABELS < 2)
    method.finish_task([(IMAGES[LABELS < 2], LABELS[LABELS < 2])])
    method.start_task(Task(1, 2, 2, seed=1))
    return method


def step(method: Any, chosen: Tensor) -> None:
    parameters = [p for named in method.named_parameters().values() for _, p in named]
    optimizer = method.wrap(torch.optim.SGD(parameters, lr=0.1))
    optimizer.zero_grad()
    method.loss(IMAGES[chosen], LABELS[chosen])[0].backward()
    optimizer.step()


def test_the_loss_beside_its_plain_twin(tiny_model: Any) -> None:
    """Value and gradient, with a copy of the model before the task and the matrix as a sum over classes."""
    method = first_task(tiny_model)
    old, task = copy.deepcopy(method.model), LABELS >= 2
    with torch.no_grad():
        features, head = old(IMAGES[~task]), method.heads.heads[0]
        matrix = torch.zeros(features.shape[1], features.shape[1])
        for p in torch.softmax(head(features), 1):
            for c in range(2):
                g = head.weight.T @ (F.one_hot(torch.tensor(c), 2) - p)
                matrix += p[c] * torch.outer(g, g) / len(features)
    assert (method.matrix - matrix).abs().max() <= 1e-5 * matrix.abs().max()
    step(method, task)  # now the model differs from the one before
    loss, _ = method.loss(IMAGES[task], LABELS[task])
    now = method.features(IMAGES[task])
    moved = now - old(IMAGES[task]).detach()
    assert moved.norm() > 0
    weight = 10.0 * method.matrix + 0.1 * torch.eye(len(matrix))
    penalty = (moved[:, None] @ weight @ moved[:, :, None]).mean()
    expected = method.task_loss(now, LABELS[task])[0] + penalty
    assert penalty.item() > 0
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    trained = [p for _, p in method.tuning.trained()]
    both = (torch.autograd.grad(one, trained) for one in (loss, expected))
    for ours, theirs in zip(*both, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max() + 1e-7


def test_a_large_weight_keeps_features(tiny_model: Any) -> None:
    drifts = []
    for weight in (0.0, 1000.0):
        method = first_task(tiny_model, options={"weight": 0.0, "damping": weight})
        before = method.features(IMAGES).detach()
        parameters = [p for named in method.named_parameters().values() for _, p in named]
        optimizer = method.wrap(torch.optim.Adam(parameters, lr=1e-3))
        for _ in range(5):
            optimizer.zero_grad()
            method.loss(IMAGES[LABELS >= 2], LABELS[LABELS >= 2])[0].backward()
            optimizer.step()
        drifts.append((method.features(IMAGES).detach() - before).norm().item())
    assert drifts[1] < drifts[0] / 2


def test_its_classifier_follows_the_drift(tiny_model: Any) -> None:
    method = METHODS.get("efc")(tiny_model(), Setup())
    assert isinstance(method.classifier, AlignedHeads) and method.classifier.options.drift == "efc"
    assert "drift_matrix" in method.classifier.state_dict()


def test_answers_need_neither_matrix_nor_old_parameters(tiny_model: Any) -> None:
    method = first_task(tiny_model)
    state = method.task_state_dict()
    assert any(name.startswith("efc/before/") for name in state)
    kept = method.for_answers(method.state_dict(), state)[1]
    assert kept and not any(name.startswith(("efc/", "start/")) for name in kept)


def test_the_drift_efc_needs_the_feature_of_the_heads(tiny_model: Any) -> None:
    setup = Setup(
        classifier="lda", classifier_options={"drift": "efc"}, features=FeatureOptions(depths="all", pool=["mean"])
    )
    with pytest.raises(UserError, match=r"set features\.depths to final, or choose another drift"):
        METHODS.get("sequential")(tiny_model(), setup)
