"""Methods: the contract, and a method that another package brings."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mambacl.classifiers import SeparateHeads
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


def test_heads_grow_and_the_old_ones_are_fixed() -> None:
    heads = SeparateHeads(8)
    heads.add_task(3, seed=1)
    heads.add_task(2, seed=2)
    assert heads.widths == [3, 2]
    assert not heads.heads[0].weight.requires_grad and heads.heads[1].weight.requires_grad
    features = torch.randn(5, 8)
    assert torch.equal(heads(features)[:, 3:], heads.task_logits(features))
    again = SeparateHeads(8)
    again.load_state_dict(heads.state_dict())
    assert torch.equal(again(features), heads(features))


def test_heads_are_drawn_from_their_seed() -> None:
    one, other = SeparateHeads(8), SeparateHeads(8)
    torch.manual_seed(1)
    one.add_task(3, seed=5)
    torch.manual_seed(2)
    other.add_task(3, seed=5)
    assert torch.equal(one.heads[0].weight, other.heads[0].weight)


def test_a_warm_start_needs_equal_widths() -> None:
    heads = SeparateHeads(8)
    heads.add_task(3, seed=1)
    heads.add_task(3, seed=2, warm_start=True)
    heads.add_task(2, seed=3, warm_start=True)
    assert torch.equal(heads.heads[1].weight, heads.heads[0].weight)
    assert heads.heads[2].weight.shape == (2, 8)


def test_a_method_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point is loaded at the first look-up; what it holds registers itself."""
    registry: Registry[type] = Registry("method", "some.group")

    class Theirs(Method):
        name, summary = "theirs", "a method from elsewhere"

    def points(group: str) -> list[SimpleNamespace]:
        assert group == "some.group"
        return [SimpleNamespace(load=lambda: registry.add("theirs", Theirs))]

    monkeypatch.setattr("mambacl.registry.entry_points", points)
    assert registry.names() == ["theirs"] and registry.get("theirs") is Theirs
    with pytest.raises(UserError, match=r"no method 'their'\. Did you mean 'theirs'\?"):
        registry.get("their")


def test_a_method_is_one_file() -> None:
    """No other module of the package names a method of the folder."""
    package = Path(__import__("mambacl").__file__).parent
    for path in package.rglob("*.py"):
        if path.parent.name != "methods":
            assert "methods.mamba_cl" not in path.read_text(), path
