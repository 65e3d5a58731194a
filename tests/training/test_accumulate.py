"""A batch in pieces: the same gradient and the same sums as in one piece, for every method whose images stand alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_run import CONFIG, OPTIONS
from tolerance import rounding
from torch import nn

import mambacl
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.training.step import TrainingStep

TRAINING = [name for name in METHODS.names() if METHODS.get(name).trains]
BATCH_EFFECTS = {"cl-lora", "lgcl", "lora-drs", "mamba-fscil", "ovor", "owm", "sema"}
TERMS = 10**5  # of all sums on the way through a tiny model and back


@pytest.fixture
def doubles() -> object:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def one_step(name: str, model: nn.Module, accumulate: int, tasks: int) -> tuple[dict[str, torch.Tensor], tuple]:
    """Gradients and sums of a step on five images of the last task."""
    method = METHODS.get(name)(model, Setup(options=OPTIONS.get(name, {}), tasks=tasks))
    torch.manual_seed(0)
    for task in range(tasks):
        images, labels = torch.randn(5, 3, 16, 16), torch.tensor([0, 1, 1, 0, 1]) + 2 * task
        method.start_task(Task(task, 2, first_label=2 * task, seed=task))
        named = [pair for role in method.named_parameters().values() for pair in role]
        rate = 1e-3 if task + 1 < tasks else 0.0
        optimizer = torch.optim.SGD([{"params": [p for _, p in named], "lr": rate, "base_lr": rate}])
        step = TrainingStep(method, optimizer, torch.device("cpu"), False, False, accumulate=accumulate)
        if task + 1 < tasks:
            step.accumulate = 1
            step(images, labels, 1.0)
            method.finish_task([(images, labels)])
            if method.classifier.updates:
                method.fit_classifier([(images, labels)])
    method.start_epoch(0, lambda: [(images, labels)])
    step(images, labels, 1.0)
    return {name: p.grad for name, p in named if p.grad is not None}, step.take_sums()


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("name", TRAINING)
def test_pieces_have_the_gradient_of_the_whole(name: str, tiny_model_for: Callable[[str], nn.Module]) -> None:
    """Five images in three pieces, so that their sizes differ."""
    tasks = 1 if METHODS.get(name).first_task_only else 2
    assert METHODS.get(name)(tiny_model_for(name), Setup(options=OPTIONS.get(name, {}))).splits == (
        name not in BATCH_EFFECTS
    )
    if name in BATCH_EFFECTS:
        return
    (whole, sums), (pieces, others) = (one_step(name, tiny_model_for(name).double(), n, tasks) for n in (1, 3))
    assert whole.keys() == pieces.keys() and sums[1:] == others[1:]
    assert sums[0] == pytest.approx(others[0], rel=rounding(TERMS, torch.float64))
    largest = max(gradient.abs().max().item() for gradient in whole.values())
    assert largest > 0
    for parameter, gradient in whole.items():
        apart = (gradient - pieces[parameter]).abs().max().item()
        assert apart <= rounding(TERMS, torch.float64) * largest, parameter


def test_more_pieces_than_images(tiny_model_for: Callable[[str], nn.Module]) -> None:
    """Float32, one image at a time: within rounding of the whole."""
    (whole, sums), (pieces, others) = (one_step("sequential", tiny_model_for("sequential"), n, 1) for n in (1, 9))
    assert sums[1:] == others[1:]
    largest = max(gradient.abs().max().item() for gradient in whole.values())
    for name, gradient in whole.items():
        assert (gradient - pieces[name]).abs().max().item() <= rounding(TERMS) * largest, name


def test_a_run_refuses_it_for_a_loss_of_whole_batches(tmp_path: Path) -> None:
    options = {**CONFIG, "method": "mamba-fscil", "options": OPTIONS["mamba-fscil"], "out": str(tmp_path / "run")}
    with pytest.raises(UserError, match=r"affect each other in the loss of 'mamba-fscil'.*training\.accumulate to 1"):
        mambacl.train({**options, "training": {**CONFIG["training"], "accumulate": 2}})
    assert not (tmp_path / "run").exists()
