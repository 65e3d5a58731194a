"""Changes of linear layers that add up over tasks, of a ViT and of Mamba blocks."""

import pytest
import torch
from adapter_methods_help import small
from tolerance import assert_near

from mambacl.errors import UserError
from mambacl.tuning.fourier import FourierChange, random_positions
from mambacl.tuning.lora import LowRank
from mambacl.tuning.task_lora import TaskChanges, check_rank, places_of, usual_layers

FAMILIES = {
    "vit_nano": (["k", "v"], 4),
    "defocus_mamba_nano": (["x_proj", "out_proj"], 4),
    "vim_nano": (["x_proj", "x_proj_b", "out_proj"], 6),
    "vmamba_nano": (["out_proj"], 2),
    "mambavision_nano": (["k", "v", "x_proj", "out_proj"], 8),
}


def low_rank(place, task, generator):
    return LowRank(place.inputs, place.outputs, 2, generator)


def fourier(place, task, generator):
    size = place.inputs * place.outputs
    return FourierChange(place.inputs, place.outputs, random_positions(size, 20, seed=task), alpha=300.0)


@torch.no_grad()
def trained(changes, tasks=2):
    """Adds tasks with changes of a usual size."""
    for task in range(tasks):
        changes.add(seed=task)
        for change in changes.tasks[-1]:
            tensor = change.B if isinstance(change, LowRank) else change.coefficients
            tensor.normal_(std=0.1, generator=torch.Generator().manual_seed(task))


@pytest.mark.parametrize("make", [low_rank, fourier])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_same_as_changing_the_weights(family, make):
    """It starts at nothing; the model keeps its weights and names until `merge`, which gives the same output."""
    model, images = small(family).double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    before, state = model(images), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    usual, count = FAMILIES[family]
    assert usual_layers(model, ["k", "v"]) == usual
    changes = TaskChanges(places_of(model, usual), make).double()
    assert len(changes.places) == count and torch.equal(model(images), before)
    changes.add(seed=0)
    assert torch.equal(model(images), before)
    trained(changes)
    found = model(images)
    assert not torch.allclose(found, before, rtol=0, atol=1e-6)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    with changes.times([0.0, 0.0, 0.0]):
        assert_near(model(images), before, terms=2**14)
    found.square().sum().backward()
    for place in range(count):
        gradients = [parameter.grad for parameter in changes.at(place)[-1].parameters()]
        assert all(grad is not None and grad.any() for grad in gradients)
        assert all(parameter.grad is None for change in changes.at(place)[:-1] for parameter in change.parameters())
    changes.merge()
    assert_near(model(images), found, terms=2**14)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])}
    assert moved == {f"{place.layer_name}.weight" for place in changes.places}


@pytest.mark.parametrize("together", [True, False])
def test_parts_of_attention(together):
    """Only the rows of the parts move; a layer has one change for all its parts, or one for each."""
    model = small("vit_nano").double()
    places = places_of(model, ["v", "q"], together)
    names = [f"blocks.{b}.attn.qkv{part}" for b in range(2) for part in ([""] if together else [".q", ".v"])]
    assert [place.name for place in places] == names and {place.inputs for place in places} == {32}
    assert {place.outputs for place in places} == {64 if together else 32}
    layer = model.blocks[1].attn.qkv
    before = layer.weight.detach().clone()
    changes = TaskChanges(places, low_rank).double()
    trained(changes)
    weights = [changes.weight(place) for place in range(len(places)) if places[place].layer is layer]
    changes.merge()
    expected = torch.cat(weights)  # of q and v
    moved = layer.weight.detach() - before
    assert_near(torch.cat((moved[:32], moved[64:])), expected.detach(), terms=64, size=before.abs().max().item())
    assert not moved[32:64].any()


def test_factors_and_ranks():
    """A sum with factors, of changes with different ranks."""
    generator = torch.Generator().manual_seed(0)
    changes = [LowRank(5, 4, rank, generator).double() for rank in (1, 3)]
    for change in changes:
        torch.nn.init.normal_(change.B, generator=generator)
    factors = torch.tensor([0.5, -2.0], dtype=torch.float64)
    down, up = LowRank.matrices(changes, factors)
    expected = 0.5 * changes[0].B @ changes[0].A - 2 * changes[1].B @ changes[1].A
    torch.testing.assert_close(up @ down, expected)


def test_the_fourier_change_by_hand():
    """The sum of cosines, each with the wave numbers of its position."""
    positions, u = torch.tensor([7, 1, 18]), torch.randn(2, 5, dtype=torch.float64)  # of 4 x 5
    change = FourierChange(5, 4, positions, alpha=3.0).double()
    with torch.no_grad():
        change.coefficients.copy_(torch.tensor([1.0, -2.0, 0.5]))
    rows, columns = torch.arange(4.0, dtype=torch.float64)[:, None], torch.arange(5.0, dtype=torch.float64)
    expected = torch.zeros(4, 5, dtype=torch.float64)
    for position, value in zip([7, 1, 18], [1.0, -2.0, 0.5], strict=True):
        row, column = divmod(position, 5)
        expected += 3 / 20 * value * torch.cos(2 * torch.pi * (row * rows / 4 + column * columns / 5))
    torch.testing.assert_close(change.matrices([change])[0], expected)
    torch.testing.assert_close(change(u), u @ expected.T)
    assert len(set(random_positions(20, 20, seed=1).tolist())) == 20


def test_a_state_makes_room_for_its_tasks():
    model = small("vit_nano")
    changes, other = (TaskChanges(places_of(model, ["k"]), low_rank) for _ in range(2))
    trained(changes, tasks=3)
    other.load_state_dict(changes.state_dict())
    assert len(other.tasks) == 3 and torch.equal(other.weight(1), changes.weight(1))


def test_mistakes():
    model = small("vit_nano")
    with pytest.raises(UserError, match=r"names the same layer twice \(k, k\): name each once"):
        places_of(model, ["k", "k"])
    with pytest.raises(UserError, match="ViT has no linear layers named in_proj"):
        places_of(model, ["k", "in_proj"])
    with pytest.raises(UserError, match=r"rank 33 is too large for .*\.fc1 with 32 inputs .* set it to 32 or less"):
        check_rank(places_of(model, ["fc1"]), 33, "rank")
