"""Growing subspaces against plain singular value decompositions of the inputs, and against recorded memories of GPM."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mambacl.nullspace.subspaces import Subspace, dual_grown, grown, nothing, squared

LAYERS = ("conv1", "conv2", "conv3", "fc1", "fc2")


def rows(count, seed, scales=(5.0, 3.0, 2.0, 1.0, 0.5, 0.1)):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    return torch.randn(count, 6, generator=generator, dtype=torch.float64) * torch.tensor(scales) @ mix


def protected(space):
    return space.inside(torch.eye(len(space.basis), dtype=torch.float64))


def plainly(basis, x, threshold):
    """As GPM writes it: singular vectors of what is left of X, until both parts hold the share of its norm."""
    left = x - x @ basis @ basis.T
    _, values, vectors = torch.linalg.svd(left, full_matrices=False)
    total, count = x.square().sum(), 0
    held = total - left.square().sum()
    while held < threshold * total:
        held, count = held + values[count] ** 2, count + 1
    return torch.cat((basis, vectors[:count].T), 1)


def dual_plainly(basis, retain, x, threshold):
    """As DualGPM writes it, by singular value decompositions of the inputs."""
    columns = basis.shape[1]
    if not retain:
        basis = plainly(basis, x, threshold)
    else:
        kept = x @ basis @ basis.T
        _, values, vectors = torch.linalg.svd(kept, full_matrices=False)
        total, dropped = x.square().sum(), 0
        left = kept.square().sum()
        while left > (1 - threshold) * total:
            left, dropped = left - values[dropped] ** 2, dropped + 1
        U = vectors[:dropped].T
        basis = torch.linalg.svd(basis - U @ U.T @ basis)[0][:, : columns - dropped]
    if not retain and basis.shape[1] > len(basis) / 2:
        return torch.linalg.svd(basis)[0][:, basis.shape[1] :], True
    return basis, retain


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.97])
def test_a_subspace_grows_as_in_gpm(threshold):
    ours, theirs = nothing(6, torch.zeros(1)), torch.zeros(6, 0, dtype=torch.float64)
    for task in range(3):
        x = rows(40, task)
        ours, theirs = grown(ours, x.T @ x, threshold), plainly(theirs, x, threshold)
        assert ours.basis.shape == theirs.shape
        torch.testing.assert_close(protected(ours), theirs @ theirs.T)  # signs of vectors do not matter
        torch.testing.assert_close(ours.basis.T @ ours.basis, torch.eye(ours.protected, dtype=torch.float64))
        assert ours.inside(x).square().sum() >= threshold * x.square().sum() * (1 - 1e-9)


@pytest.mark.parametrize("threshold", [0.8, 0.9, 0.97])
def test_dual_gpm_protects_what_gpm_does_with_fewer_columns(threshold):
    """Each rule of its paper, remove, retain and the switch, gives the same directions as GPM."""
    plain = dual = nothing(6, torch.zeros(1))
    basis, retain, switched = torch.zeros(6, 0, dtype=torch.float64), False, False
    for task in range(4):
        x = rows(40, task, (5.0, 3.0, 1.0, 0.5, 0.2, 0.1))
        basis, retain = dual_plainly(basis, retain, x, threshold)
        plain, dual = grown(plain, x.T @ x, threshold), dual_grown(dual, x.T @ x, threshold)
        assert dual.retain == retain and dual.basis.shape == basis.shape and dual.basis.shape[1] <= 3
        assert dual.protected == plain.protected
        torch.testing.assert_close(dual.basis @ dual.basis.T, basis @ basis.T)
        torch.testing.assert_close(protected(dual), protected(plain))
        torch.testing.assert_close(protected(dual.plain()), protected(plain))
        switched |= retain
    assert switched


def test_a_share_of_one_holds_everything_and_zero_nothing():
    x, empty = rows(40, 0), nothing(6, torch.zeros(1))
    assert grown(empty, x.T @ x, 0.0).protected == 0
    assert grown(empty, x[:2].T @ x[:2], 1.0).protected == 2
    full = grown(grown(empty, x.T @ x, 1.0), rows(40, 1).T @ rows(40, 1), 1.0)
    assert full.protected == 6 and full.smaller().basis.shape == (6, 0)
    assert grown(full.smaller(), x.T @ x, 1.0).protected == 6


def test_the_first_basis_can_stay_below_the_share():
    moment = torch.diag(torch.tensor([6.0, 3.0, 1.0], dtype=torch.float64))
    empty = nothing(3, moment)
    assert grown(empty, moment, 0.7).protected == 2
    below = grown(empty, moment, 0.7, below_at_first=True)
    assert below.protected == 1
    assert grown(below, moment, 0.7, below_at_first=True).protected == 2  # later bases reach it
    assert grown(empty, moment, 0.5, below_at_first=True).protected == 0
    assert grown(empty, moment, 0.5, below_at_first=True, at_least=1).protected == 1


def test_squared_eigenvalues_count_if_a_covariance_is_taken_for_the_inputs():
    moment = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    assert grown(nothing(2, moment), moment, 0.8).protected == 2  # 3/4 is not enough
    assert grown(nothing(2, moment), squared(moment), 0.8).protected == 1  # 9/10 is


def test_a_subspace_splits_rows():
    space = Subspace(torch.eye(4, dtype=torch.float64)[:, :1])
    x = torch.arange(4.0, dtype=torch.float64)[None]
    assert space.inside(x).tolist() == [[0, 0, 0, 0]] and space.outside(x).tolist() == [[0, 1, 2, 3]]
    other = Subspace(space.basis, retain=True)
    assert other.protected == 3 and other.inside(x).tolist() == [[0, 1, 2, 3]]
    half = Subspace(torch.eye(4, dtype=torch.float64)[:, :2])
    assert half.smaller() is half and not Subspace(half.basis, retain=True).smaller().retain


@pytest.mark.parametrize("growth", [grown, dual_grown])
@pytest.mark.parametrize("layer", LAYERS)
def test_recorded_memories_of_gpm(growth, layer, goldens: Path):
    recorded = load_file(goldens / "gpm.safetensors")
    space = nothing(len(recorded[f"task0.{layer}.activation_gram"]), torch.zeros(1))
    for task in range(3):
        moment = recorded[f"task{task}.{layer}.activation_gram"]
        share = float(recorded[f"task{task}.thresholds"][LAYERS.index(layer)])
        space = growth(space, moment, share, below_at_first=True)
        assert space.protected == int(recorded[f"task{task}.{layer}.rank"])
        torch.testing.assert_close(protected(space), recorded[f"task{task}.{layer}.projector"], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("block", range(3))
def test_recorded_memories_of_inflora(block, goldens: Path):
    """DualGPM with energies of squared eigenvalues; each memory switches from remove to retain."""
    recorded = load_file(goldens / "inflora_memory.safetensors")
    space = nothing(32, torch.zeros(1))
    for task in range(3):
        own = f"task{task}.block{block}."
        moment = squared(recorded[own + "input_covariance_after_training"])
        share = float(recorded[f"task{task}.energy_threshold"])
        space = dual_grown(space, moment, share, below_at_first=True, at_least=1)
        assert space.retain == bool(recorded[own + "memory_is_retain"])
        memory = space.basis @ space.basis.T
        torch.testing.assert_close(memory, recorded[own + "memory_projector"], rtol=1e-7, atol=1e-9)
    assert space.retain
