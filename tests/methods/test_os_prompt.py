"""OS-Prompt++ gives the numbers that were recorded from public code; the paper's penalty by plain arithmetic."""

import math

import pytest
import torch
from prompt_recordings import FIRST, Place, Recording, as_coda, replay
from small_run import VIT

from mambacl.backbones import create_model
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.tuning.query import frozen_query


def test_os_prompt():
    recording = Recording("os_prompt")
    size, length, weight = recording.config["prompt_param"]
    options = {"variant": "public-code", "pool": size, "length": length, "reference": weight}
    method = METHODS.get("os-prompt")(recording.model(), Setup(options=options, tasks=recording.config["tasks"]))
    pool, grow, tasks = method.pool, method.pool.grow, iter(range(3))
    names = {"components": pool.components, "keys": pool.keys}

    def grow_as_recorded(count, seed):
        prefix = f"task{next(tasks)}.draw"
        grow(count, seed, {n: torch.stack([recording[f"{prefix}.block{b}.{n}"] for b in range(5)]) for n in names})

    pool.grow = grow_as_recorded
    places = {
        f"prompt.block{b}.{n}": Place(lambda p=parameter: p, lambda v, b=b: v[b])
        for n, parameter in names.items()
        for b in range(5)
    }

    def started(task):
        for name, place in places.items():
            if f"task{task}.init.{name}" in recording:
                recording.near(f"task{task}.init.{name}", place.view(place.parameter()), 1e-7)
        if task:
            return
        images, _ = recording.batch(0, 1)
        reference = frozen_query(method.model, images)
        recording.near("task0.step1.query", reference, FIRST)
        feature, queries = method.prompted(images)
        recording.near("task0.step1.feature", feature, FIRST)
        for block, query in queries.items():
            name = f"task0.step1.block{block}"
            recording.near(f"{name}.running_class_token", query, FIRST)
            recording.near(f"{name}.weights", pool.weights(block, query), FIRST)
            recording.near(f"{name}.prompt_loss", weight * method.penalty({block: query}, reference), FIRST)

    replay(recording, method, places, schedule=as_coda, started=started)


def tiny(**options):
    torch.manual_seed(0)
    model = create_model("vit", num_classes=0, pretrained=False, **VIT["backbone_options"])
    return METHODS.get("os-prompt")(model, Setup(options={"pool": 6, "length": 2, **options}, tasks=2))


def test_the_penalty_of_the_paper():
    """Image by image and component by component, from the formula."""
    method = tiny()
    method.start_task(Task(0, 2, 0, seed=0))
    images = torch.randn(3, 3, 16, 16)
    _, queries = method.prompted(images)
    reference = frozen_query(method.model, images)

    def shares(query, keys):
        cosines = [float(query @ key / query.norm() / key.norm()) for key in keys]
        total = sum(math.exp(c) for c in cosines)
        return [math.exp(c) / total for c in cosines]

    expected = 0.0
    for block, query in queries.items():
        keys = method.pool.keys[block, :3].detach()
        for own, other in zip(query.detach(), reference, strict=True):
            expected += sum((a - b) ** 2 for a, b in zip(shares(own, keys), shares(other, keys), strict=True)) / 3
    assert float(method.penalty(queries, reference).detach()) == pytest.approx(expected, rel=1e-4)
    assert expected > 0


def test_without_the_penalty_it_is_os_prompt():
    with_penalty, without = tiny(reference=100.0), tiny(reference=0.0)
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 0, 1])
    losses = []
    for method in (with_penalty, without):
        method.start_task(Task(0, 2, 0, seed=0))
        losses.append(method.loss(images, labels)[0])
    plain, _ = without.task_loss(without.features(images), labels)
    assert torch.equal(losses[1], plain) and losses[0] > losses[1]
    with torch.no_grad():
        assert torch.equal(with_penalty.predict(images), without.predict(images))  # answers need no reference


def test_a_pool_too_small():
    with pytest.raises(UserError, match=r"a pool of 1 components is too small for 2 tasks: set options\.pool to 2"):
        tiny(pool=1)
