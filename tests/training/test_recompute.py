"""Gradient checkpointing in training: the same steps bit for bit, for every method and backbone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from backbones_help import DEPTHS, model_of_depths
from processes import on_ranks
from small_run import CONFIG, OPTIONS, backbone_for
from torch import nn

import mambacl
from mambacl import processes
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.nullspace import recursive
from mambacl.nullspace.settings import Setting
from mambacl.training.optimizers import make_optimizer
from mambacl.training.recipe import Recipe
from mambacl.training.step import TrainingStep
from mambacl.tuning import recompute

TRAINING = [name for name in METHODS.names() if METHODS.get(name).trains and name != "inf-ssm"]
CPU = torch.device("cpu")


def trained(name: str, model: nn.Module, again: bool, tasks: int, setting: Setting | None = None) -> dict:
    """The state after a few steps in each task, whose batches go through the model in two pieces if they may."""
    if again:
        recompute(model)
    setup = Setup(setting or Setting(rank="energy:0.9"), options=OPTIONS.get(name, {}), tasks=tasks)
    method = METHODS.get(name)(model, setup)
    torch.manual_seed(0)
    for task in range(tasks):
        images, labels = torch.randn(5, 3, 16, 16), torch.tensor([0, 1, 1, 0, 1]) + 2 * task
        method.start_task(Task(task, 2, first_label=2 * task, seed=task, steps=2))
        method.start_epoch(0, lambda given=(images, labels): [given])
        named = [pair for role in method.named_parameters().values() for pair in role]
        groups = [{"params": [p for _, p in named], "lr": 1e-2, "base_lr": 1e-2}]
        optimizer = method.wrap(torch.optim.Adam(groups))
        step = TrainingStep(method, optimizer, CPU, False, False, accumulate=2 if method.splits else 1)
        for _ in range(2):
            step(images, labels, 1.0)
        gradients = {f"gradient of {name}": p.grad for name, p in named if p.grad is not None}
        assert any(gradient.any() for gradient in gradients.values())
        method.finish_task([(images, labels)])
        if task + 1 < tasks and method.classifier.updates:
            method.fit_classifier([(images, labels)])
    return {**method.state_dict(), **method.task_state_dict(), **gradients}


@pytest.mark.parametrize("name", TRAINING)
def test_every_method_takes_the_same_steps(name: str, tiny_model_for: Callable[[str], nn.Module]) -> None:
    tasks = 1 if METHODS.get(name).first_task_only else 2
    kept, again = (trained(name, tiny_model_for(name), on, tasks) for on in (False, True))
    assert kept.keys() == again.keys()
    assert all(torch.equal(tensor, again[key]) for key, tensor in kept.items())


@pytest.mark.parametrize("name", ["sequential", "mamba-cl"])
@pytest.mark.parametrize("family", DEPTHS)
def test_every_backbone_takes_the_same_steps(family: str, name: str) -> None:
    """VMamba's blocks shrink images four times, so that 16 pixels are enough."""
    setting = Setting(rank="energy:0.9", layers="all" if family == "vit_nano" else "ssm")
    kept, again = (trained(name, model_of_depths(family), on, 2, setting) for on in (False, True))
    assert all(torch.equal(tensor, again[key]) for key, tensor in kept.items())


def part_of_a_step(name: str, again: bool) -> dict[str, torch.Tensor]:
    """Gradients of this process's part of seven images, in two pieces, summed over the processes."""
    method = METHODS.get(name)(model_of_depths("vim_nano"), Setup())
    if again:
        recompute(method.model)
    method.start_task(Task(0, 2, first_label=0, seed=0))
    named = [pair for role in method.named_parameters().values() for pair in role]
    optimizer = torch.optim.SGD([{"params": [p for _, p in named], "lr": 0.0, "base_lr": 0.0}])
    images, labels = torch.randn(7, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 2
    own = processes.part(7)
    TrainingStep(method, optimizer, CPU, False, False, accumulate=2)(images[own], labels[own], 1.0, 7)
    return {name: p.grad for name, p in named}


def sharded_run(folder: Path, again: bool) -> list[list[int]]:
    torch.set_num_threads(1)
    training = {**CONFIG["training"], "passes": 1, "recompute": again, "accumulate": 2}
    nullspace = {**CONFIG["nullspace"], "projectors": "cpu" if again else "device"}
    options = {**CONFIG, "training": training, "nullspace": nullspace, "shard": True}
    mambacl.train(options, out=str(folder), device="cpu")
    return json.loads((folder / "results.json").read_text())["correct"]


@pytest.mark.long
@pytest.mark.usefixtures("few_test_images")
def test_a_run_with_cut_weights_is_the_same(tmp_path: Path) -> None:
    usual, again = (on_ranks(2, sharded_run, tmp_path / str(on), on) for on in (False, True))
    assert usual == again and usual[0]
    losses = [_losses(tmp_path / str(on)) for on in (False, True)]
    assert losses[0] == losses[1] and len(losses[0]) == 3


def _losses(run: Path) -> list[float]:
    return [entry["loss"] for line in (run / "metrics.jsonl").open() if "loss" in (entry := json.loads(line))]


@pytest.mark.slow
def test_several_processes_have_the_same_gradients() -> None:
    usual, again = (on_ranks(2, part_of_a_step, "mamba-cl", on) for on in (False, True))
    for one, other in zip(usual, again, strict=True):
        assert all(torch.equal(other[name], gradient) for name, gradient in one.items())
        assert any(gradient.any() for gradient in one.values())


def test_names_stay_and_it_can_be_switched_off(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    names = [*model.state_dict()], [name for name, _ in model.named_modules()]
    recompute(model)
    assert model.grad_checkpointing and names == ([*model.state_dict()], [name for name, _ in model.named_modules()])
    recompute(model, False)
    assert not model.grad_checkpointing


def test_recursive_projectors_absorb_a_batch_once(tiny_model: Callable[..., nn.Module], monkeypatch) -> None:
    """Hooks inside the blocks run again in the backward pass, with other rows if the model has changed since."""
    calls = []
    monkeypatch.setattr("mambacl.nullspace.space.mean_rows", lambda rows: calls.append(1) or recursive.mean_rows(rows))
    counts = []
    for again in (False, True):
        calls.clear()
        trained("owm", tiny_model(), again, 1)
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0
    assert not recursive.in_backward()


def test_inf_ssm_refuses_it(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    recompute(model)
    with pytest.raises(UserError, match=r"set training\.recompute to false"):
        METHODS.get("inf-ssm")(model, Setup())


@pytest.mark.usefixtures("few_test_images")
def test_a_run_is_the_same(tmp_path: Path) -> None:
    made = {}
    for again in (False, True):
        out, training = tmp_path / str(again), {**CONFIG["training"], "passes": 1, "recompute": again, "accumulate": 2}
        mambacl.train({**CONFIG, **backbone_for("mamba-cl"), "training": training}, out=str(out))
        made[again] = json.loads((out / "results.json").read_text())["correct"], _losses(out)
    assert made[False] == made[True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("bf16", [False, True])
def test_a_recorded_step_computes_blocks_again(bf16: bool) -> None:
    """Six steps, the last of them replayed, with the values of steps that are not recorded."""
    cuda, found = torch.device("cuda"), {}
    for graphs in (False, True):
        method = METHODS.get("sequential")(model_of_depths("vim_nano").to(cuda), Setup())
        recompute(method.model)
        method.start_task(Task(0, 2, first_label=0, seed=0))
        named = [pair for role in method.named_parameters().values() for pair in role]
        groups = [{"params": [p for _, p in named], "lr": 1e-2, "base_lr": 1e-2}]
        step = TrainingStep(method, make_optimizer(Recipe(), groups, cuda), cuda, bf16, graphs)
        generator = torch.Generator().manual_seed(0)
        for _ in range(6):
            step(torch.randn(4, 3, 16, 16, generator=generator), torch.arange(4) % 2, 1.0)
        assert (step._recorded is not None) == graphs
        found[graphs] = {name: p.detach().clone() for name, p in named}
    for name, value in found[False].items():
        torch.testing.assert_close(found[True][name], value, rtol=1e-3, atol=1e-5)
