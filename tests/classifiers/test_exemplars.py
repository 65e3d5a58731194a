"""Herding does not depend on the order of the images; the memory keeps the best of each class, within its room."""

import pytest
import torch
from torch import Tensor

from mambacl.classifiers.exemplars import ExemplarMemory, MemoryOptions, herd
from mambacl.errors import UserError


def rows(seed: int, count: int = 30) -> Tensor:
    """With duplicates, and with rows that are equally far from the mean."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(-2, 3, (count, 4), generator=generator).double()
    return torch.cat((found, -found[:5], torch.randn(10, 4, generator=generator, dtype=torch.float64), found[:3]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_herding_does_not_depend_on_the_order(seed: int, dtype: torch.dtype) -> None:
    """The features picked are the same to the bit, one after another. Images with equal features count as the same."""
    features = rows(seed).to(dtype)
    picked = features[herd(features, 20)]
    generator = torch.Generator().manual_seed(100 + seed)
    for _ in range(5):
        shuffled = features[torch.randperm(len(features), generator=generator)]
        assert torch.equal(shuffled[herd(shuffled, 20)], picked)


def test_herding_by_hand() -> None:
    """Each pick brings the mean of those so far closest to the mean of all; no row twice; the first of few are those of
    many."""
    features = rows(1)
    found, mean = herd(features, 12), features.mean(0)
    assert len(set(found)) == 12
    for k in range(1, 13):
        total = features[found[: k - 1]].sum(0)
        far = [((mean - (total + row) / k) ** 2).sum().item() for row in features]
        others = [far[row] for row in range(len(features)) if row not in found[: k - 1]]
        assert far[found[k - 1]] == pytest.approx(min(others), rel=1e-12, abs=1e-24)
    assert herd(features, 5) == found[:5]
    assert sorted(herd(features, 1000)) == list(range(len(features)))


def learned(memory: ExemplarMemory, task: int, stored: Tensor | None = None) -> list[int]:
    """A task of two classes with ten images each, in turns, then the images stored so far."""
    labels = torch.arange(20) % 2 + 2 * task
    features = torch.randn(20, 3, generator=torch.Generator().manual_seed(task))
    old = memory.held.labels
    return memory.update(torch.cat((features, torch.zeros(len(old), 3))), torch.cat((labels, old)), 2 * task,
                         2 * task + 2, task)  # fmt: skip


def test_a_total_is_divided_among_the_classes() -> None:
    memory = ExemplarMemory(MemoryOptions(images=13))
    assert memory.stored() is None
    first = learned(memory, 0)
    held = memory.held
    assert held.labels.tolist() == [0] * 6 + [1] * 6 and held.tasks.tolist() == [0] * 12
    assert held.positions.tolist() == first and all(
        row % 2 == label for row, label in zip(first, held.labels, strict=True)
    )
    second = learned(memory, 1)
    assert memory.held.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert memory.held.positions[:6].tolist() == first[:3] + first[6:9]  # the first that herding picked
    assert second[:6] == [20, 21, 22, 26, 27, 28]  # where these were among the features
    assert memory.held.tasks.tolist() == [0] * 6 + [1] * 6 and memory.stored() is memory.held


def test_a_number_per_class() -> None:
    memory = ExemplarMemory(MemoryOptions(images=3, per_class=4))
    for task in range(3):
        learned(memory, task)
    assert memory.held.labels.bincount().tolist() == [4] * 6


def test_pixels_come_with_their_images_and_survive_a_state() -> None:
    """Images can differ in size."""
    memory = ExemplarMemory(MemoryOptions(images=8, memory="pixels"))

    def image(task: int, position: int) -> Tensor:
        return torch.full((3, 2 + task, 1 + position % 3), 20 * task + position, dtype=torch.uint8)

    for task in range(2):
        learned(memory, task)
        memory.keep(lambda position, task=task: image(task, position))
    held = memory.held
    assert len(held.pixels) == len(held) == 8
    other = ExemplarMemory(MemoryOptions(memory="pixels"))
    other.load_state_dict(memory.state_dict())
    for one in (held, other.held):
        for pixels, task, position in zip(one.pixels, one.tasks.tolist(), one.positions.tolist(), strict=True):
            assert torch.equal(pixels, image(task, position))


def test_indices_hold_no_pixels() -> None:
    memory = ExemplarMemory(MemoryOptions(images=8))
    learned(memory, 0)
    memory.keep(lambda position: pytest.fail("no image is read"))
    assert memory.held.pixels is None and set(memory.state_dict()) == {"labels", "tasks", "positions"}
    other = ExemplarMemory(MemoryOptions())
    other.load_state_dict(memory.state_dict())
    assert torch.equal(other.held.positions, memory.held.positions)


def test_mistakes() -> None:
    with pytest.raises(UserError, match=r"options\.images = 3 is too few for 4 classes.*set options\.images to 4"):
        MemoryOptions(images=3).room(4)
    memory = ExemplarMemory(MemoryOptions(images=8))
    learned(memory, 0)
    features = torch.randn(3, 3)
    for labels, first in ((torch.tensor([0, 0, 0]), 0), (torch.tensor([1] * 3), 2)):
        many = features.repeat(5, 1), labels.repeat(5)
        with pytest.raises(UserError, match=r"stored already cannot come again in a later task"):
            memory.update(*many, first, 4, 1)
