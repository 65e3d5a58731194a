"""C-LN: norms per task, keys that select them, phases; and that it learns."""

import pytest
import torch
from small_run import CONFIG, VIT
from tiny_stream_help import accuracy, images_of, learn, task_labels, tiny_vit
from torch import nn
from training_help import assert_same_run, interrupted_after

import mambacl
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.tuning.query import frozen_query

STAGES = ("two", "single")


def new(stages, tasks=2, double=True):
    """A method whose tasks have different norms and keys."""
    method = METHODS.get("c-ln")(tiny_vit(double), Setup(options={"stages": stages}))
    for task in range(tasks):
        method.start_task(Task(task, 2, 2 * task, seed=task))
        if double:
            method.heads.double()
        own, generator = method.norms.sets[task], torch.Generator().manual_seed(task)
        with torch.no_grad():
            for parameter in own.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return method


def by_replacing(model, own, images):
    """The feature of the model with a set's scales and shifts as its parameters."""
    places = [norm for block in model.blocks for norm in (block.norm1, block.norm2)] + [model.norm]
    before = [(norm.weight.clone(), norm.bias.clone()) for norm in places]
    with torch.no_grad():
        for place, norm in enumerate(places):
            norm.weight.copy_(own.weight[place])
            norm.bias.copy_(own.bias[place])
        found = model(images)
        for norm, (weight, bias) in zip(places, before, strict=True):
            norm.weight.copy_(weight)
            norm.bias.copy_(bias)
    return found


@pytest.mark.parametrize("stages", STAGES)
def test_a_new_set_starts_as_the_one_before(stages):
    method, images = METHODS.get("c-ln")(tiny_vit(), Setup(options={"stages": stages})), images_of(0, 3)[0]
    method.start_task(Task(0, 2, 0, seed=0))
    torch.testing.assert_close(method.features(images), method.model(images))
    with torch.no_grad():
        method.norms.sets[0].weight += 0.1
    method.start_task(Task(1, 2, 2, seed=1))
    first, second = method.norms.sets.tasks
    assert torch.equal(first.weight, second.weight) and not first.weight.requires_grad
    names = {name.rpartition(".")[2] for name, _ in method.tuning.trained()}
    assert all(".tasks.1." in name for name, _ in method.tuning.trained())
    if stages == "single":
        assert torch.equal(first.keys, second.keys) and torch.equal(first.gates, second.gates)
        assert first.keys.shape == first.gates.shape == (13, 16) and names == {"weight", "bias", "keys", "gates"}
    else:
        assert abs((first.keys @ second.keys.T).item()) < 1e-6 and names == {"weight", "bias", "keys"}


@pytest.mark.parametrize("stages", STAGES)
def test_the_norms_of_a_task_are_those_of_the_model(stages):
    method, images = new(stages), images_of(0, 3)[0].double()
    for task in range(2):
        expected = by_replacing(method.model, method.norms.sets[task], images)
        torch.testing.assert_close(method.run(images, task)[0], expected, rtol=1e-9, atol=1e-9)


def test_two_stages_select_by_the_fixed_feature():
    method, images = new("two"), images_of(0, 2)[0].double()
    query = frozen_query(method.model, images)
    with torch.no_grad():
        for task in range(2):  # the first image selects the second task
            method.norms.sets[task].keys.copy_(query[1 - task][None])
    expected = torch.stack([by_replacing(method.model, method.norms.sets[1 - i], images)[i] for i in range(2)])
    torch.testing.assert_close(method.features(images), expected, rtol=1e-9, atol=1e-9)


def test_a_single_stage_selects_at_every_norm():
    """Block by block, written out for one image at a time."""
    method, images = new("single"), images_of(0, 4)[0].double()
    model, sets, chosen = method.model, method.norms.sets.tasks, set()

    def normed(x, place):
        def similarity(own):
            return nn.functional.cosine_similarity(x[0, 0] * own.gates[place], own.keys[place], dim=0).item()

        best = max(range(2), key=lambda task: similarity(sets[task]))
        chosen.add(best)
        own = sets[best]
        deviation = (x.var(-1, unbiased=False, keepdim=True) + model.norm.eps).sqrt()
        return (x - x.mean(-1, keepdim=True)) / deviation * own.weight[place] + own.bias[place]

    with torch.no_grad():
        found = method.features(images)
        for image, feature in zip(images, found, strict=True):
            x = model.embed(image[None])
            for index, block in enumerate(model.blocks):
                x = x + block.attn(normed(x, 2 * index))
                x = x + block.mlp(normed(x, 2 * index + 1))
            torch.testing.assert_close(normed(x, 12)[0, 0], feature, rtol=1e-8, atol=1e-8)
    assert chosen == {0, 1}


@pytest.mark.parametrize("stages", STAGES)
def test_the_loss_of_each_phase(stages):
    method, (images, labels) = new(stages), images_of(1, 4)
    images, own = images.double(), labels - 2
    losses = {}
    for phase in {method.phase(epoch, 6) for epoch in range(6)}:
        method.enter(phase)
        loss, _ = method.loss(images, labels)
        losses[phase.name] = loss.item()
        trained = [p for named in method.named_parameters().values() for _, p in named]
        for parameter in trained:
            parameter.grad = None
        loss.backward()
        moved = {name for named in method.named_parameters().values() for name, p in named if p.grad is not None}
        kinds = {name.rpartition(".")[2] if "norms" in name else name.split(".")[0] for name in moved}
        routed = {"keys", "gates"} if stages == "single" else set()
        expected = {"keys": {"keys"}, "norms": {"weight", "bias", "auxiliary", *routed}, "head": {"heads"}}
        assert kinds == expected[phase.name]
    entropy = nn.functional.cross_entropy
    with torch.no_grad():
        head = entropy(method.heads.heads[1](method.features(images)), own).item()
        feature, cosines = method.run(images, 1)
        norms = entropy(method.auxiliary(feature), own).item()
        if stages == "two":
            key, query = method.norms.sets[1].keys, frozen_query(method.model, images)
            near = nn.functional.cosine_similarity(query, key).mean().item()
            assert losses == pytest.approx({"keys": -near, "norms": norms, "head": head}, rel=1e-9)
        else:
            near = torch.stack([found[:, 1] for found in cosines]).mean().item()
            assert len(cosines) == 13 and losses == pytest.approx({"norms": norms - near, "head": head}, rel=1e-9)


def test_phases_have_equal_shares():
    for stages, names in (("two", ["keys", "norms", "head"]), ("single", ["norms", "head"])):
        method = new(stages, tasks=1)
        assert [method.phase(e, 5 * len(names)).name for e in range(5 * len(names))] == [
            n for n in names for _ in range(5)
        ]
        assert method.phase(0, 1).name == "" and method.phase(0, 1).roles is None


@pytest.mark.parametrize("stages", STAGES)
def test_it_learns(stages):
    method, losses = learn("c-ln", {"stages": stages}, epochs=30, lr=0.02)
    for task, own in enumerate(losses):
        for name in {name for name, _ in own}:
            of_phase = [loss for phase, loss in own if phase == name]
            assert of_phase[-1] < of_phase[0] - 0.05, name
        assert accuracy(method, task, task_labels(task)) >= 0.9


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_a_run_in_a_single_stage_resumes(tmp_path):
    """The tests over all methods have the two stages."""
    config = {**CONFIG, **VIT, "method": "c-ln", "options": {"stages": "single"}}
    mambacl.train(config, out=str(tmp_path / "whole"))
    for checkpoints in (5, 7):  # within the second task, in each phase
        with interrupted_after(checkpoints):
            mambacl.train(config, out=str(tmp_path / f"broken{checkpoints}"))
        mambacl.resume(tmp_path / f"broken{checkpoints}")
        assert_same_run(tmp_path / "whole", tmp_path / f"broken{checkpoints}")


def test_a_mistake_gets_one_sentence():
    with pytest.raises(UserError, match="two"):
        METHODS.get("c-ln")(tiny_vit(), Setup(options={"stages": "three"}))
