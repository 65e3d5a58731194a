"""EvoPrompt: each formula by a plain computation; there is no recording of it."""

import math

import pytest
import torch
from small_run import VIT

from mambacl.backbones import create_model
from mambacl.classifiers.composition import ClassMeans, composed
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.methods.evoprompt import scaled
from mambacl.tuning.prompt_mlp import PromptMLP
from mambacl.tuning.query import frozen_query
from mambacl.tuning.transport import alignment, plan


def tiny(family="vit", **options):
    torch.manual_seed(0)
    sizes = VIT["backbone_options"] if family == "vit" else {"embed_dim": 16, "depth": 2}
    model = create_model(family, num_classes=0, pretrained=False, **{**sizes, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # well above the small values that training starts from
                parameter.normal_(std=0.3)
    return model


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Parts


def test_the_network_by_hand():
    mlp, query = PromptMLP(blocks=2, length=3, width=4, hidden=5, seed=0), torch.randn(6, 4)
    prompts = mlp.prompts(query)
    assert prompts.shape == (2, 6, 3, 4)
    for block in range(2):
        hidden = (mlp.first[block] @ query[1]).clamp(min=0)
        torch.testing.assert_close(prompts[block, 1].flatten(), mlp.second[block] @ hidden)


def test_a_plan_moves_the_weights_and_is_nearly_the_cheapest():
    """On a line, the cheapest plan for squared distances keeps the order: it is known without solving anything."""
    source, target = some(6).abs() + 0.1, some(6, seed=1).abs() + 0.1
    source, target = source / source.sum(), target / target.sum()
    x, y = some(6, seed=2).sort().values, some(6, seed=3).sort().values
    cost = (x[:, None] - y).square()
    found = plan(cost, source, target, entropy=0.01, iterations=5000)
    torch.testing.assert_close(found.sum(0), target)
    torch.testing.assert_close(found.sum(1), source, rtol=0, atol=1e-5)
    left, right, exact = source.tolist(), target.tolist(), 0.0
    i = j = 0
    while i < 6 and j < 6:
        moved = min(left[i], right[j])
        exact += moved * float(cost[i, j])
        left[i] -= moved
        right[j] -= moved
        i, j = (i + 1, j) if left[i] <= right[j] else (i, j + 1)
    gap = float((found * cost).sum()) - exact
    assert -1e-4 < gap < 0.01 * math.log(36)  # at most the entropy's weight times the largest entropy


def test_permuted_rows_are_put_back_in_order():
    rows, order = some(16, 40), torch.randperm(16, generator=torch.Generator().manual_seed(1))
    T = alignment(rows[order], rows)
    torch.testing.assert_close(T.sum(0), torch.ones(16, dtype=torch.float64))
    torch.testing.assert_close(T.T @ rows[order], rows, rtol=1e-4, atol=1e-4)


def test_rows_of_new_classes_by_hand():
    new, earlier, rows = some(2, 6), some(3, 6, seed=1), some(3, 6, seed=2)
    found = composed(new, earlier, rows, size=2, temperature=0.05)
    for n in range(2):
        for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
            likeness = torch.stack([torch.cosine_similarity(new[n, part], e[part], dim=0) for e in earlier])
            weights = torch.softmax(likeness / 0.05, 0)
            torch.testing.assert_close(found[n, part], sum(w * row[part] for w, row in zip(weights, rows, strict=True)))
    means = ClassMeans(3, 2, 6, torch.device("cpu"))
    for part in (slice(0, 2), slice(2, 3)):
        means.add(rows[part], torch.tensor([3, 4, 3])[part])
    torch.testing.assert_close(means.means(), torch.stack(((rows[0] + rows[2]) / 2, rows[1])))


def test_scaled():
    assert scaled(torch.tensor([1.0, 3.0, 2.0])).tolist() == [0.0, 1.0, 0.5]
    assert scaled(torch.ones(3)).tolist() == [0.0] * 3


# The method


def test_prompts_pile_up_in_front():
    """The same sequence, put together by hand with timm's blocks; the class token is behind all prompts."""
    method, images = METHODS.get("evoprompt")(tiny(), Setup()), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        prompts, x = method.mlp.prompts(frozen_query(method.model, images, normed=False)), method.model.embed(images)
        for block, own in zip(method.model.blocks, prompts, strict=True):
            x = block(torch.cat((own, x), 1))
        torch.testing.assert_close(method.features(images), method.model.norm(x[:, 30]))
        x = method.model.embed(images)
        for block in method.model.blocks:
            x = block(x)
        torch.testing.assert_close(prompts, method.mlp.prompts(x[:, 0]))


def trained(tasks=1, **options):
    """Classes of two patterns per task."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(4, 3, 16, 16, generator=generator)
    method = METHODS.get("evoprompt")(tiny(), Setup(options=options))
    for task in range(tasks):
        method.start_task(Task(task, 2, 2 * task, seed=task))
        labels = torch.arange(8) % 2 + 2 * task
        images = patterns[labels] + 0.3 * torch.randn(8, 3, 16, 16, generator=generator)
        method.start_epoch(0, lambda images=images, labels=labels: [(images, labels)])
        optimizer = torch.optim.Adam([p for n in method.named_parameters().values() for _, p in n], lr=0.005)
        for _ in range(15):
            optimizer.zero_grad()
            method.loss(images, labels)[0].backward()
            optimizer.step()
        if task < tasks - 1:
            method.finish_task([(images[:5], labels[:5]), (images[5:], labels[5:])])
    return method, patterns, images, labels


def test_the_end_of_a_task_by_hand():
    method, _, images, labels = trained(tasks=2)
    old = {name: tensor.clone() for name, tensor in method.memory.items()}
    first, second = method.mlp.first.detach().clone(), method.mlp.second.detach().clone()
    with torch.no_grad():
        right = method.predict(images).argmax(1) == labels
        units = method.mlp.units(frozen_query(method.model, images, normed=False)[right])
    assert right.any()
    method.finish_task([(images[:3], labels[:3]), (images[3:], labels[3:])])
    for block in range(6):
        T1 = alignment(first[block], old["first"][block])
        T2 = alignment(second[block] @ T1, old["second"][block])
        for name, T, aligned, use, unit in (
            ("first", T1, T1.T @ first[block], units[0][block].mean(0), "hidden"),
            ("second", T2, T2.T @ second[block] @ T1, units[1][block].clamp(min=0).mean(0), "output"),
        ):
            use = T.T @ use
            share = 0.5 * (1 + scaled(use) - scaled(old[unit][block]))
            expected = old[name][block] + share[:, None] * (aligned - old[name][block])
            torch.testing.assert_close(getattr(method.mlp, name)[block].detach(), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(method.memory[unit][block], torch.maximum(use, old[unit][block]))
    assert method.memory["means"].shape == (4, 16)


def test_with_fusion_0_the_first_task_s_network_stays():
    method, _, images, labels = trained(tasks=2, fusion=0.0)
    before = method.memory["second"].clone()
    assert not torch.equal(method.mlp.second, before)
    method.finish_task([(images, labels)])
    torch.testing.assert_close(method.mlp.second.detach(), before, rtol=0, atol=0)


def test_a_new_head_starts_from_the_earlier_ones():
    method, _, images, labels = trained(tasks=1)
    method.finish_task([(images, labels)])
    method.start_task(Task(1, 2, 2, seed=1))
    before = method.heads.heads[1].weight.detach().clone()
    method.start_epoch(1, lambda: [])
    assert torch.equal(method.heads.heads[1].weight, before)
    method.start_epoch(0, lambda: [(images, labels + 2)])  # the same images: the same means, so nearly the same rows
    rows = method.heads.heads[1].weight.detach()
    assert torch.cosine_similarity(rows, method.heads.heads[0].weight.detach()).min() > 0.8
    assert not torch.equal(rows, before)


def test_two_tasks_are_learned():
    method, patterns, images, labels = trained(tasks=2)
    method.finish_task([(images, labels)])
    labels = torch.arange(40) % 4
    noise = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        scores = method.predict(patterns[labels] + 0.3 * noise).view(40, 2, 2)
    within = scores[torch.arange(40), labels // 2].argmax(1)
    assert (within == labels % 2).float().mean() > 0.8  # chance is 0.5


def test_answers_need_no_memory_and_the_next_task_does():
    method, _, images, labels = trained(tasks=1)
    method.finish_task([(images, labels)])
    other = METHODS.get("evoprompt")(tiny(), Setup())
    state, task_state = method.for_answers(method.state_dict(), method.task_state_dict())
    other.load_state_dict(state)
    assert not task_state and torch.equal(other.predict(images), method.predict(images))
    other.load_task_state_dict(method.task_state_dict())
    assert all(torch.equal(tensor, other.memory[name]) for name, tensor in method.memory.items())


@pytest.mark.parametrize("family", ["vim_nano", "defocus_mamba_nano"])
def test_on_a_mamba_backbone(family):
    model = create_model(family, num_classes=0, pretrained=False, embed_dim=16, depth=2)
    method = METHODS.get("evoprompt")(model, Setup())
    method.start_task(Task(0, 3, 0, seed=0))
    method.loss(torch.randn(3, 3, 32, 32), torch.arange(3))[0].backward()
    assert method.mlp.second.grad.flatten(1).any(1).all()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"length": 12}, r"options\.length times the blocks: 72 prompt tokens are too many for a model of 17 tokens"),
        ({"slice_size": 3}, r"options\.slice_size must divide the model's 16 channels"),
        ({"fusion": 1.5}, "fusion must be from 0 to 1"),
        ({"temperature": 0.0}, "temperature must be positive"),
    ],
)
def test_a_mistake_gets_one_sentence(options, words):
    with pytest.raises(UserError, match=words):
        METHODS.get("evoprompt")(tiny(), Setup(options=options))
