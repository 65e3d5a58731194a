"""Adapters in the blocks of every family, and the methods that train them: seq-adapter and ease."""

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml
from adapter_methods_help import BLOCKS, FAMILIES, accuracy, learn, new_method, optimizer_of, small, step, task_data
from small_run import CONFIG
from torch import nn

import mambacl
from mambacl.cli import main
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.tuning.adapters import AdapterOptions, AdapterSets, mixers

NAMES = ["seq-adapter", "ease"]
everywhere = pytest.mark.parametrize(  # each family with one method, the smallest with both
    "name, family", [*zip(itertools.cycle(NAMES), FAMILIES, strict=False), ("ease", FAMILIES[0])]
)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_start_as_the_identity_and_leave_the_models_names_alone(family: str) -> None:
    model, images = small(family), torch.randn(2, 3, 32, 32)
    before, names = model(images), list(model.state_dict())
    sets = AdapterSets(model, AdapterOptions())
    sets.add(seed=0)
    sets.current = 0
    assert torch.equal(model(images), before)
    assert list(model.state_dict()) == names
    adapters = list(sets.adapters[0])  # type: ignore[call-overload]
    assert len(adapters) == BLOCKS[family] and all(adapter.down.out_features == 16 for adapter in adapters)
    for adapter in adapters:  # each has its say
        nn.init.normal_(adapter.up.weight)
        after = model(images)
        assert not torch.allclose(after, before)
        nn.init.zeros_(adapter.up.weight)
    nn.init.normal_(adapters[0].up.weight)
    sets.remove()
    assert torch.equal(model(images), before)


def test_what_an_adapter_adds() -> None:
    model = small("defocus_mamba_nano")
    sets = AdapterSets(model, AdapterOptions(bottleneck=3, scale=0.5))
    sets.add(seed=0)
    adapter = sets.adapters[0][0]  # type: ignore[index]
    nn.init.normal_(adapter.up.weight)
    nn.init.normal_(adapter.up.bias)
    nn.init.normal_(adapter.down.bias)
    mixer, tokens = model.blocks[0].mixer, torch.randn(2, 5, 32)  # type: ignore[index, union-attr]
    plain = mixer(tokens)
    with sets.using(0):
        adapted = mixer(tokens)
    narrow = (tokens @ adapter.down.weight.T + adapter.down.bias).clamp(min=0)
    torch.testing.assert_close(adapted, plain + 0.5 * (narrow @ adapter.up.weight.T + adapter.up.bias))
    assert torch.equal(mixer(tokens), plain)


def test_attention_has_an_adapter_and_convolutions_have_none() -> None:
    found = mixers(small("mambavision_nano"))
    assert list(found) == [f"levels.{level}.blocks.{block}.mixer" for level in (2, 3) for block in (0, 1)]
    assert [width for _, width in found.values()] == [64, 64, 128, 128]


def test_adapters_are_drawn_from_their_seed() -> None:
    sets = AdapterSets(small("vim_nano"), AdapterOptions())
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        sets.add(seed)
    one, same, other = ([p for n, p in adapters.named_parameters() if "down.weight" in n] for adapters in sets.adapters)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert [p.requires_grad for p in (one[0], same[0], other[0])] == [False, False, True]


@pytest.mark.slow
@everywhere
def test_two_tasks_are_learned_and_the_backbone_stays(name: str, family: str) -> None:
    method = new_method(name, family)
    before = {key: tensor.clone() for key, tensor in method.model.state_dict().items()}
    losses = learn(method, range(2))
    for key, tensor in method.model.state_dict().items():
        assert torch.equal(tensor, before[key]), key
    assert not any(parameter.requires_grad for parameter in method.model.parameters())
    assert losses[-1] < 0.8 * losses[0]
    least = 0.4 if (name, family) == ("seq-adapter", "vit_nano") else 0.7  # random attention hardly tells classes apart
    assert accuracy(method, [1]) > least and accuracy(method, range(2)) > least  # chance is 0.25: four classes


@everywhere
def test_only_adapters_and_the_current_classifier_train(name: str, family: str) -> None:
    method = new_method(name, family)
    learn(method, range(1), steps=1)
    method.start_task(Task(1, 2, 2, seed=1))
    before = {key: tensor.clone() for key, tensor in method.state_dict().items()}
    roles, batch = method.named_parameters(), task_data(1, 2, seed=1)
    optimizer = optimizer_of(method, lr=1e-2, head_lr=1e-2)
    for _ in range(2):  # W_down moves from the second step on: W_up starts at zero
        step(method, optimizer, batch)
    changed = {key for key, tensor in method.state_dict().items() if not torch.equal(tensor, before[key])}
    assert changed == {key for named in roles.values() for key, _ in named}
    assert len(roles["backbone"]) == 4 * BLOCKS[family]


@everywhere
def test_predictions_of_two_tasks_do_not_depend_on_the_batch(name: str, family: str) -> None:
    method = new_method(name, family)
    learn(method, range(2), steps=5)
    images = torch.cat([task_data(t, 2, seed=7, each=2)[0] for t in range(2)])
    with torch.no_grad():
        together = method.predict(images)
        alone = torch.cat([method.predict(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_taken_up_in_the_middle_of_a_task_goes_on_the_same(name: str) -> None:
    def second_task(method: object, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        for _ in range(3):
            step(method, optimizer, task_data(1, 2, seed=1))  # type: ignore[arg-type]
        method.finish_task([task_data(1, 2, seed=1)])  # type: ignore[attr-defined]
        return {**method.state_dict(), **method.task_state_dict()}  # type: ignore[attr-defined]

    one = new_method(name)
    learn(one, range(1), steps=3)
    one.start_task(Task(1, 2, 2, seed=1))
    optimizer = optimizer_of(one)
    step(one, optimizer, task_data(1, 2, seed=1))
    states = [{key: t.clone() for key, t in kept.items()} for kept in (one.state_dict(), one.task_state_dict())]
    other = new_method(name)
    other.load_state_dict(states[0])
    if states[1]:
        other.load_task_state_dict(states[1])
    again = optimizer_of(other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected, found = second_task(one, optimizer), second_task(other, again)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name", NAMES)
def test_computing_blocks_again_in_the_backward_changes_nothing(name: str) -> None:
    gradients = []
    for again in (False, True):
        method = new_method(name)
        method.model.set_grad_checkpointing(again)  # type: ignore[operator]
        learn(method, range(1), steps=2)
        method.start_task(Task(1, 2, 2, seed=1))
        images, labels = task_data(1, 2, seed=1)
        loss, _ = method.loss(images, labels)
        with torch.no_grad():
            method.predict(images)  # in between, with other adapters
        loss.backward()
        gradients.append([p.grad for _, p in method.named_parameters()["backbone"]])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("few_test_images")
def test_a_run_from_the_command_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run = tmp_path / "small.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump({**CONFIG, "audit_images": 2}))
    options = ["--training.passes", "1", "--options.bottleneck", "4", "--out", str(run)]
    assert main(["train", str(config), "--method", name, *options]) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["options"] == {"bottleneck": 4}
    audit = json.loads((run / "audit.json").read_text())
    assert mambacl.audit(run) == audit  # what comes back from the checkpoint is what was there
    again = mambacl.evaluate(run)
    assert again.counted == again.recorded
    results = json.loads((run / "results.json").read_text())
    assert ("prototypes" in results["seconds"]) == (name == "ease")
    assert main(["methods"]) == 0
    assert METHODS.get(name).summary in capsys.readouterr().out


def test_a_checkpoint_of_another_method_is_noticed() -> None:
    other = METHODS.get("frozen")(small("defocus_mamba_nano"), Setup())
    other.start_task(Task(0, 2, 0, seed=0))
    for name in NAMES:
        with pytest.raises((KeyError, RuntimeError)):  # the run answers both with a sentence
            new_method(name).load_state_dict(other.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_options_of_adapters(name: str) -> None:
    assert new_method(name).options.bottleneck == 16 and new_method(name).options.scale == 0.1
    method = new_method(name, bottleneck=4)
    method.start_task(Task(0, 2, 0, seed=0))
    shapes = {tuple(p.shape) for key, p in method.named_parameters()["backbone"] if key.endswith("weight")}
    assert shapes == {(4, 32), (32, 4)}
    for wrong in ({"bottleneck": 0}, {"scale": 0.0}, {"scale": -1.0}):
        with pytest.raises(UserError, match=f"{name}: {next(iter(wrong))} must"):
            new_method(name, **wrong)
    with pytest.raises(UserError, match="Did you mean 'bottleneck'"):
        new_method(name, bottlenek=4)


def test_a_model_without_selective_ssm_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.num_features = 4  # type: ignore[assignment]
    with pytest.raises(UserError, match="no selective SSM"):
        METHODS.get("seq-adapter")(model, Setup())
