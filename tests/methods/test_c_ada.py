"""C-ADA: adapters that grow, the overlap in the loss; and that it learns."""

import pytest
import torch
from tiny_stream_help import accuracy, images_of, learn, task_labels, tiny_vit
from torch import nn

from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task


def new(tasks=2, **options):
    given = {"channels": 2, "blocks": [1, 3], **options}
    method = METHODS.get("c-ada")(tiny_vit(double=True), Setup(options=given))
    for task in range(tasks):
        method.start_task(Task(task, 2, 2 * task, seed=task))
        method.heads.double()
    return method


def randomize(method):
    with torch.no_grad():
        for i, parameter in enumerate(method.added.modules.parameters()):
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))


def test_the_feature_by_hand():
    """Sums of the tasks' adapters beside attention and MLP, after the norm; other blocks as they are."""
    method, images = new(), images_of(0, 3)[0].double()
    randomize(method)
    bridge, shares = method.bridge, method.adapters.shares.tasks

    def adapted(u, place):
        u = u * bridge.scale[place] + bridge.shift[place]
        return 0.1 * sum((u @ s.down[place].T).clamp(min=0) @ s.up[place] for s in shares)

    with torch.no_grad():
        x = method.model.embed(images)
        for index, block in enumerate(method.model.blocks):
            place = {1: 0, 3: 2}.get(index)
            h = block.norm1(x)
            x = x + block.attn(h) + (0 if place is None else adapted(h, place))
            h = block.norm2(x)
            x = x + block.mlp(h) + (0 if place is None else adapted(h, place + 1))
        expected = method.model.norm(x)[:, 0]
        torch.testing.assert_close(method.features(images), expected, rtol=1e-9, atol=1e-9)


def test_the_loss_by_hand():
    method, (images, labels) = new(orthogonality=0.5), images_of(1, 4)
    images = images.double()
    plain = nn.functional.cross_entropy(method.heads.heads[1](method.features(images)), labels - 2).item()
    assert method.loss(images, labels)[0].item() == pytest.approx(plain, rel=1e-9)  # new rows start without overlap
    randomize(method)
    first, second = method.adapters.shares.tasks
    overlap = sum(
        float(a @ b) ** 2
        for name in ("down", "up")
        for place in range(4)
        for a in getattr(first, name)[place].detach()
        for b in getattr(second, name)[place].detach()
    )
    plain = nn.functional.cross_entropy(method.heads.heads[1](method.features(images)), labels - 2).item()
    loss, _ = method.loss(images, labels)
    assert loss.item() == pytest.approx(plain + 0.5 * overlap, rel=1e-9)
    loss.backward()
    assert first.down.grad is None and second.down.grad.any() and second.up.grad.any()


def test_what_trains():
    method = new(tasks=1)
    kinds = {name.split(".")[1] for name, _ in method.named_parameters()["backbone"]}
    assert kinds == {"adapters", "bridge"}
    method.start_task(Task(1, 2, 2, seed=1))
    names = [name for name, _ in method.named_parameters()["backbone"]]
    assert sorted(names) == [f"prompts.adapters.shares.tasks.1.{name}" for name in ("down", "up")]
    assert not any(p.requires_grad for p in method.bridge.parameters())


def test_known_classes_keep_the_features_of_the_backbone():
    method = METHODS.get("c-ada")(tiny_vit(), Setup(known_classifier=nn.Linear(16, 2)))
    method.start_task(Task(0, 2, 0, seed=0))
    images = images_of(0, 3)[0]
    with torch.no_grad():
        torch.testing.assert_close(method.features(images), method.model(images))
        method.start_task(Task(1, 2, 2, seed=1))
        assert not torch.allclose(method.features(images), method.model(images))


def test_it_learns():
    method, losses = learn("c-ada", {"channels": 4}, epochs=25, lr=0.02)
    for task in range(2):
        assert losses[task][-1][1] < losses[task][0][1] / 2
        assert accuracy(method, task, task_labels(task)) >= 0.9


@pytest.mark.parametrize(
    "options, words",
    [
        ({"blocks": [0, 9]}, r"c-ada: options\.blocks = \[0, 9\] must list some of the model's blocks, 0 to 5"),
        ({"channels": 0}, "channels must be at least 1"),
        ({"scale": 0.0}, "scale must be positive and finite"),
    ],
)
def test_a_mistake_gets_one_sentence(options, words):
    with pytest.raises(UserError, match=words):
        METHODS.get("c-ada")(tiny_vit(), Setup(options=options))
