"""Methods: the contract, and a method that another package brings."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mambacl.classifiers import CLASSIFIERS
from mambacl.errors import UserError
from mambacl.methods import METHODS, Method, Setup, Task
from mambacl.nullspace import SETTINGS
from mambacl.registry import Registry


@pytest.mark.parametrize("name", METHODS.names())
def test_the_contract(name: str, tiny_model: Callable[..., nn.Module]) -> None:
    method = METHODS.get(name)(tiny_model(), Setup())
    assert method.name == name and method.summary
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([2, 3, 4, 2])
    method.start_task(Task(0, classes=2, first_label=0, seed=0))
    method.start_task(Task(1, classes=3, first_label=2, seed=1))
    roles = method.named_parameters()
    assert set(roles) == {"backbone", "classifier"} and len(roles["classifier"]) == 2
    loss, correct = method.loss(images, labels)
    loss.backward()
    assert 0 <= int(correct) <= 4
    assert all(parameter.grad is not None for named in roles.values() for _, parameter in named)
    assert method.predict(images).shape == (4, 5)

    state = {key: value.clone() for key, value in method.state_dict().items()}
    other = METHODS.get(name)(tiny_model(), Setup())
    other.load_state_dict(state)
    torch.testing.assert_close(other.predict(images), method.predict(images), rtol=0, atol=0)


@pytest.mark.parametrize("name", METHODS.names())
def test_predictions_do_not_depend_on_the_batch(name: str, tiny_model: Callable[..., nn.Module]) -> None:
    method = METHODS.get(name)(tiny_model(), Setup())
    method.start_task(Task(0, classes=5, first_label=0, seed=0))
    images = torch.randn(6, 3, 16, 16)
    with torch.no_grad():
        together = method.predict(images)
        alone = torch.cat([method.predict(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    assert torch.equal(together.argmax(1), alone.argmax(1))


def test_logits_are_in_full_precision_under_autocast(tiny_model: Callable[..., nn.Module]) -> None:
    method = METHODS.get("frozen")(tiny_model(), Setup())
    method.start_task(Task(0, classes=5, first_label=0, seed=0))
    with torch.autocast("cpu", torch.bfloat16):
        assert method.predict(torch.randn(2, 3, 16, 16)).dtype == torch.float32


def test_only_what_the_setting_names_is_trained(tiny_model: Callable[..., nn.Module]) -> None:
    setting = SETTINGS["paper"].override(A={"trains": False}, blocks=[1])
    method = METHODS.get("mamba-cl")(tiny_model(), Setup(setting))
    trained = [name for name, parameter in method.model.named_parameters() if parameter.requires_grad]
    assert trained == ["blocks.1.mixer.x_proj.weight", "blocks.1.mixer.out_proj.weight"]


def combinations() -> list[tuple[str, str]]:
    """Methods with classifiers; EASE answers with its own prototypes."""
    return [(method, name) for method in METHODS.names() if method != "ease" for name in CLASSIFIERS.names()]


@pytest.mark.parametrize("name, classifier", combinations())
def test_every_method_with_every_classifier(name: str, classifier: str, tiny_model: Callable[..., nn.Module]) -> None:
    """Two tasks; the answers are the classifier's, and a state taken up in the middle of a task gives the same."""
    images, labels = torch.randn(10, 3, 16, 16), torch.arange(10) % 5
    setup = Setup(classifier=classifier)
    method, other = (METHODS.get(name)(tiny_model(), setup) for _ in range(2))
    for task, classes in enumerate((2, 3)):
        method.start_task(Task(task, classes, first_label=2 * task, seed=task))
        roles = method.named_parameters()
        optimizer = method.wrap(torch.optim.Adam([p for named in roles.values() for _, p in named], lr=1e-3))
        chosen = labels < 2 if task == 0 else labels >= 2
        loss, _ = method.loss(images[chosen], labels[chosen])
        loss.backward()
        optimizer.step()
        if task == 1:  # in the middle of a task
            assert method.predict(images).shape == (10, 5)
            other.load_state_dict(method.state_dict())
            if state := method.task_state_dict():
                other.load_task_state_dict(state)
            assert torch.equal(other.predict(images), method.predict(images))
        for one in (method, other) if task == 1 else (method,):
            one.finish_task([(images[chosen], labels[chosen])])
    assert method.classifier.name == classifier and method.heads.trains
    assert torch.equal(other.predict(images), method.predict(images))
    if classifier == "nearest-mean":
        nearest = torch.cdist(method.model(images), method.classifier.means().float()).argmin(1)
        assert torch.equal(method.predict(images).argmax(1), nearest)


def test_a_method_with_an_answer_of_its_own_takes_no_classifier(tiny_model: Callable[..., nn.Module]) -> None:
    with pytest.raises(UserError, match="'ease' predicts by its prototypes"):
        METHODS.get("ease")(tiny_model(), Setup(classifier="separate"))


def test_options_of_a_classifier(tiny_model: Callable[..., nn.Module]) -> None:
    method = METHODS.get("frozen")(tiny_model(), Setup(classifier="cosine", classifier_options={"scale": 8.0}))
    method.start_task(Task(0, classes=2, first_label=0, seed=0))
    assert method.heads.heads[0].scale.item() == 8.0
    for options, message in (
        ({"scael": 8.0}, "Did you mean 'scale'"),
        ({"scale": -1.0}, "positive"),
    ):
        with pytest.raises(UserError, match=message):
            METHODS.get("frozen")(tiny_model(), Setup(classifier="cosine", classifier_options=options))


def test_a_method_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point is loaded at the first look-up; what it holds registers itself."""
    registry: Registry[type] = Registry("method", "some.group")

    class Theirs(Method):
        name, summary = "theirs", "a method from elsewhere"

    def points(group: str) -> list[SimpleNamespace]:
        assert group == "some.group"
        return [SimpleNamespace(load=lambda: registry.add("theirs", Theirs))]

    monkeypatch.setattr("importlib.metadata.entry_points", points)
    assert registry.names() == ["theirs"] and registry.get("theirs") is Theirs
    with pytest.raises(UserError, match=r"no method 'their'\. Did you mean 'theirs'\?"):
        registry.get("their")


def test_a_method_is_one_file() -> None:
    """No other module of the package names a method of the folder."""
    package = Path(__import__("mambacl").__file__).parent
    for path in package.rglob("*.py"):
        if path.parent.name != "methods":
            assert "methods.mamba_cl" not in path.read_text(), path
