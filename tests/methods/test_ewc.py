"""EWC gives the numbers that were recorded from mammoth, PyCIL and Avalanche; and what its options say."""

import pytest
import torch
from adapter_methods_help import FAMILIES, new_method, optimizer_of, step, task_data
from tiny_stream_help import accuracy, images_of, learn, task_labels, tiny_vit
from toolbox_recordings import TOLERANCE, Network, Recording, copy
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.methods import METHODS, Method, Setup, Task
from mambacl.tuning.importance import Importance

# The toolboxes' lambda has no factor 1/2 in mammoth and Avalanche, so ours is twice theirs.
ONLINE = {"terms": "online", "old": 0.7, "clip": None, "over": "all"}
VARIANTS = {
    "online_per_sample": {"strength": 2 * 5.0, "gradients": "weighted-image", **ONLINE},
    "class_weighted_batch": {"strength": 20.0, "clip": 0.02},
    "batch_separate": {"strength": 2 * 5.0, "terms": "separate", "clip": None, "over": "all"},
    "batch_online": {"strength": 2 * 5.0, **ONLINE},
}


def started(recording: Recording, options: dict, task: int, method: Method | None) -> Method:
    """A task with the recorded start: the head's rows are those of its classes."""
    if method is None:
        model = Network(hidden=nn.Linear(6, 8), act=nn.Tanh())
        copy(model.hidden, {name: recording[f"initial.hidden.{name}"] for name in ("weight", "bias")})
        method = METHODS.get("ewc")(model, Setup(options={"train": "all", **options}, classes=9))
    method.start_task(Task(task, 3, 3 * task, seed=task))
    method.heads.double()
    with torch.no_grad():
        for name in ("weight", "bias"):
            rows = recording[f"initial.head.{name}"]
            if task == 0 and method.ahead is not None:
                getattr(method.ahead, name).copy_(rows[3:])
            if task == 0 or method.ahead is None:
                getattr(method.heads.heads[task], name).copy_(rows[3 * task : 3 * task + 3])
    return method


def joined(values: dict[str, Tensor], name: str) -> Tensor:
    """By the recording's names; the head has the rows of all tasks and of those ahead."""
    if name.startswith("hidden."):
        return values[name]
    kind = name.removeprefix("head.")
    rows = [values[key] for key in (f"heads.{task}.{kind}" for task in range(3)) if key in values]
    ahead = f"prompts.ahead.{kind}"
    return torch.cat((*rows, *([values[ahead]] if ahead in values else [])))


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_tasks_as_recorded(variant: str) -> None:
    recording, method = Recording("ewc"), None
    pycil = variant == "class_weighted_batch"
    names = [f"{layer}.{kind}" for layer in ("hidden", "head") for kind in ("weight", "bias")]
    for task in range(3):
        method, at = started(recording, VARIANTS[variant], task, method), f"{variant}.task{task}"
        inputs, labels = recording[f"task{task}.inputs"], recording[f"task{task}.labels"]
        trained = list(method.penalised().values())
        more = {"momentum": 0.9, "weight_decay": 5e-4} if pycil else {}
        optimizer = torch.optim.SGD(trained, lr=0.1, **more)
        losses, penalties = [], []
        for x, y in zip(inputs.split(4), labels.split(4), strict=True):
            penalties.append(torch.as_tensor(method.penalty(), dtype=torch.float64).detach())
            loss, _ = method.loss(x, y)
            losses.append(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total, penalty = torch.stack(losses), torch.stack(penalties)
        stored = {name.removeprefix(f"{at}.") for name in recording.tensors if name.startswith(f"{at}.")}
        found = {
            "total_losses": total,
            "losses_without_penalty": total - penalty,
            "penalty_before_each_step": penalty / 20.0 if pycil else penalty,  # PyCIL's without lambda
        }
        for name in found.keys() & stored:
            recording.near(f"{at}.{name}", found[name], TOLERANCE)
        before = [dict(term[0]) for term in method.importance.terms]
        method.finish_task(zip(inputs.split(4), labels.split(4), strict=True))
        check(recording, method, at, stored, names, before)
    recording.check_all(f"{variant}.")


def check(recording: Recording, method: Method, at: str, stored: set[str], names: list[str], before: list) -> None:
    """Parameters and importances at the end of a task."""
    importance = method.importance.terms[-1][0]
    parameters = {name: parameter.detach() for name, parameter in method.penalised().items()}
    for name in names:
        recording.near(f"{at}.parameters_after.{name}", joined(parameters, name), TOLERANCE)
        for kind in ("importance", "importance_merged"):
            if f"{kind}.{name}" in stored:
                recording.near(f"{at}.{kind}.{name}", joined(importance, name), TOLERANCE)
        if f"importance_of_this_task.{name}" in stored:  # undoes the merging
            merged = joined(importance, name).clone()
            if before:
                known = method.known / method.heads.classes
                old = joined(before[0], name)
                rows = slice(len(old)) if name.startswith("head.") else slice(None)
                merged[rows] = (merged[rows] - known * old) / (1 - known)
            recording.near(f"{at}.importance_of_this_task.{name}", merged, TOLERANCE)
    if "penalty_if_all_parameters_move_by_0.01" in stored:
        with torch.no_grad():
            for parameter in method.penalised().values():
                parameter += 0.01
        penalty = method.penalty()
        recording.near(f"{at}.penalty_if_all_parameters_move_by_0.01", penalty, TOLERANCE)
        gradients = torch.autograd.grad(penalty, list(method.penalised().values()))
        by_name = dict(zip(method.penalised(), gradients, strict=True))
        for name in names:
            recording.near(f"{at}.penalty_gradient_if_moved.{name}", joined(by_name, name), TOLERANCE)
        with torch.no_grad():
            for parameter in method.penalised().values():
                parameter -= 0.01


def test_merging_by_hand() -> None:
    """Terms of two tasks, with the parameters that both have and one that is new."""
    one, two = {"a": torch.tensor([2.0, 4.0])}, {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([3.0])}
    start, end = {"a": torch.zeros(2)}, {"a": torch.ones(2), "b": torch.zeros(1)}
    here = {"a": torch.full((2,), 3.0), "b": torch.ones(1)}
    expected = {  # half of F (w - w*)^2
        "separate": 0.5 * (2 * 9 + 4 * 9 + (1 + 1) * 4 + 3),
        "online": 0.5 * ((0.5 * 2 + 1 + 0.5 * 4 + 1) * 4 + 3),
        "mean": 0.5 * ((0.5 * 2 + 0.5 + 0.5 * 4 + 0.5) * 4 + 3),
    }
    for terms, penalty in expected.items():
        importance = Importance()
        assert importance.penalty(here) == 0
        importance.add(one, start, terms, 0.5)
        importance.add(two, end, terms, 0.5)
        assert float(importance.penalty(here)) == pytest.approx(penalty)
        other = Importance()
        other.load_state_dict(dict(reversed(importance.state_dict().items())), torch.device("cpu"))
        assert float(other.penalty(here)) == float(importance.penalty(here))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_backbone(family: str) -> None:
    """All parameters on any model, the setting's where there is a selective SSM; and what matters holds still."""
    moved = {}
    for strength in (0.0, 1e6):
        method = new_method("ewc", family, train="all", strength=strength, clip=None)
        for task in range(2):
            method.start_task(Task(task, 2, 2 * task, seed=task))
            optimizer = optimizer_of(method, 1e-3, 1e-3)
            if task:
                start = {name: p.detach().clone() for name, p in method.tuning.trained()}
            for _ in range(2):
                step(method, optimizer, task_data(task, 2, seed=task))
            if not task:
                method.finish_task([task_data(task, 2, seed=task)])
        weights = method.importance.terms[0][0]
        pairs = [(weights[name], p.detach() - start[name]) for name, p in method.tuning.trained()]
        moved[strength] = sum(float((weight * change.square()).sum()) for weight, change in pairs)
    assert len(start) == len(list(method.model.parameters())) and moved[1e6] < moved[0.0]


@pytest.mark.parametrize(
    "options", [{}, {"terms": "separate", "gradients": "image", "labels": "predicted"}, {"over": "all"}]
)
def test_it_learns(options: dict) -> None:
    method, losses = learn("ewc", {"train": "all", **options}, epochs=25, classes=4)
    for task in range(2):
        assert losses[task][-1][1] < losses[task][0][1] / 2
    assert accuracy(method, 1, task_labels(1)) >= 0.9


def test_rows_ahead_come_and_go() -> None:
    """A state of the middle of the second task, without and with what only training needs."""
    setup = Setup(options={"train": "all", "over": "all"}, classes=6)
    method, other, answering = (METHODS.get("ewc")(tiny_vit(), setup) for _ in range(3))
    method.start_task(Task(0, 2, 0, seed=0))
    assert len(method.ahead.weight) == 4
    method.finish_task([images_of(0)])
    state = {name: tensor.clone() for name, tensor in method.task_state_dict().items()}
    drawn = method.ahead.weight[:2].clone()
    method.start_task(Task(1, 2, 2, seed=1))
    assert len(method.ahead.weight) == 2 and torch.equal(method.heads.heads[1].weight, drawn)
    assert method.penalty() == 0
    for one in (method, other):
        if one is other:
            one.load_state_dict(method.state_dict())
            one.load_task_state_dict(state)
        for batch in (images_of(1), images_of(1)):
            loss, _ = one.loss(*batch)
        loss.backward()
    assert torch.equal(method.ahead.weight.grad, other.ahead.weight.grad)
    with torch.no_grad():
        for parameter in (method.heads.heads[1].weight, other.heads.heads[1].weight):
            parameter += 0.5
    assert method.penalty() == other.penalty() and method.penalty() > 0
    kept, rest = method.for_answers(method.state_dict(), method.task_state_dict())
    assert not rest and len(kept["prompts.ahead.weight"]) == 0
    answering.load_state_dict(kept)
    images = images_of(1)[0]
    assert torch.equal(answering.predict(images), method.predict(images))


@pytest.mark.parametrize(
    "setup, words",
    [
        ({"options": {"strength": -1.0}}, "strength must be finite and at least 0"),
        ({"options": {"clip": 0.0}}, "clip must be positive"),
        ({"options": {"old": 1.5}}, "old must be at least 0 and at most 1"),
        (
            {"options": {"over": "all", "train": "all"}, "classifier": "cosine"},
            "over = all does not go with .*'cosine'",
        ),
    ],
)
def test_a_mistake_gets_one_sentence(setup: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        METHODS.get("ewc")(tiny_vit(), Setup(**setup))
