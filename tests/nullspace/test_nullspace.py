"""Covariances, projectors and consolidation against their textbook twins."""

import logging

import pytest
import torch
from nullspace_help import X_PROJ, hooks, images, observed, relative

from mambacl.errors import UserError
from mambacl.nullspace import NullSpace, dense_projector
from mambacl.nullspace.projectors import decompose


def random_covariance(size=12, seed=0):
    rows = torch.randn(3 * size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = rows * torch.logspace(0, -3, size, dtype=torch.float64)
    return rows.T @ rows


@pytest.mark.parametrize("scaling", ["none", "frobenius"])
@pytest.mark.parametrize("eta", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("rank", [0, 1, 5, 6, 7, 11, 12])
def test_low_rank_projector_is_the_textbook_one(rank, eta, scaling):
    covariance = random_covariance()
    [decomposition] = decompose([covariance], f"fraction:{(rank + 0.5) / 12 if rank < 12 else 1.0}")
    assert decomposition.rank == rank
    assert decomposition.basis.shape == (12, min(rank, 12 - rank))  # the smaller of the two spaces
    projector, dense = decomposition.projector(eta, scaling), dense_projector(covariance, rank, eta, scaling)
    torch.testing.assert_close(projector.dense(), dense)
    update = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(projector.apply(update, "left"), dense @ update)
    torch.testing.assert_close(projector.apply(update.T, "right"), update.T @ dense)


def test_the_null_directions_are_those_of_the_smallest_eigenvalues():
    covariance = torch.diag(torch.tensor([1.0, 100.0, 0.01, 50.0, 0.02]))
    projector = decompose([covariance], "fraction:0.4")[0].projector(1.0, "none")
    torch.testing.assert_close(projector.dense(), torch.diag(torch.tensor([0, 0, 1, 0, 1], dtype=torch.float64)))


def test_scaling_divides_by_the_frobenius_norm_alone():
    covariance = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    dense = decompose([covariance], "fraction:0.75")[0].projector(0.9, "frobenius").dense()
    expected = torch.full((4,), 0.9 / 3**0.5 + 0.1, dtype=torch.float64)
    expected[0] = 0.1
    torch.testing.assert_close(dense, torch.diag(expected))


FEATURES = {
    "x": lambda x, delta, out: x.flatten(0, 1),
    "delta": lambda x, delta, out: delta.flatten(0, 1),
    "out": lambda x, delta, out: out.flatten(0, 1),
    "delta-x": lambda x, delta, out: (delta[..., :, None] * x[..., None, :]).flatten(0, 2),
    "delta-x-per-image": lambda x, delta, out: torch.einsum("blc,bld->bcd", delta, x).flatten(0, 1),
}
SPLITS = {"one batch": [7], "uneven": [3, 3, 1], "one by one": [1] * 7}


def seen_features(model, batch, index):
    seen = observed(model, batch, index)
    return seen["x"].double(), seen["delta"].double(), seen["out"].double()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("feature", FEATURES)
def test_streamed_sum_is_the_plain_covariance_of_all_features(tiny_model, feature, split):
    model = tiny_model()
    space = NullSpace(model, W_C={"feature": feature}, rank="fraction:0.5")
    space.consolidate(images(7).split(SPLITS[split]))
    for index in range(2):
        rows = FEATURES[feature](*seen_features(model, images(7), index))
        name = f"blocks.{index}.{X_PROJ}[12:20]"
        assert relative(space.covariances()[name], rows.T @ rows) < 1e-6


@pytest.mark.parametrize("feature", FEATURES)
def test_batch_mean_is_the_sum_of_every_batchs_mean(tiny_model, feature):
    model = tiny_model()
    space = NullSpace(model, W_C={"feature": feature}, rank="fraction:0.5", accumulate="batch-mean")
    space.consolidate(images(7).split([3, 3, 1]))
    expected = 0.0
    for batch in images(7).split([3, 3, 1]):
        rows = FEATURES[feature](*seen_features(model, batch, 1))
        expected = expected + rows.T @ rows / len(rows)
    assert relative(space.covariances()[f"blocks.1.{X_PROJ}[12:20]"], expected) < 1e-6


def test_tasks_add_up(tiny_model):
    model = tiny_model()
    apart, together = NullSpace(model), NullSpace(model)
    apart.consolidate([images(2, seed=1)])
    apart.consolidate([images(3, seed=2)])
    together.consolidate([images(2, seed=1), images(3, seed=2)])
    assert apart.tasks == 2 and together.tasks == 1
    for name, covariance in together.covariances().items():
        assert covariance.dtype == torch.float64
        torch.testing.assert_close(apart.covariances()[name], covariance)


def test_products_in_float32_are_summed_in_float64(tiny_model):
    model = tiny_model()
    exact, fast = NullSpace(model), NullSpace(model, products="float32")
    for space in (exact, fast):
        space.consolidate([images()])
    for name, covariance in exact.covariances().items():
        assert fast.covariances()[name].dtype == torch.float64
        assert 0 < relative(fast.covariances()[name], covariance) < 1e-5


def test_batches_may_be_tuples_with_labels_and_forward_may_be_chosen(tiny_model):
    model = tiny_model(num_classes=3)
    plain, labelled = NullSpace(model), NullSpace(model)
    report = plain.consolidate([images(3), images(2, seed=1)])
    assert report.images == 5 and report.covariance_seconds > 0 and report.decomposition_seconds > 0
    loader = [(images(3), torch.zeros(3)), [images(2, seed=1), torch.zeros(2)]]
    assert labelled.consolidate(loader, forward=model.forward_features).images == 5
    for name, covariance in plain.covariances().items():
        assert torch.equal(covariance, labelled.covariances()[name])


def test_modes_come_back_and_observers_go(tiny_model):
    model = tiny_model().train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    NullSpace(model).consolidate([images()])
    assert [module.training for module in model.modules()] == modes
    assert hooks(model) == 0


def test_features_are_those_of_evaluation_mode(tiny_model):
    model = tiny_model(depth=3, drop_path_rate=0.9)
    evaluated, trained = NullSpace(model), NullSpace(model)
    evaluated.consolidate([images()])
    model.train()
    trained.consolidate([images()])
    for name, covariance in evaluated.covariances().items():
        assert torch.equal(covariance, trained.covariances()[name])


def broken_loader():
    yield images(2, seed=5)
    raise OSError("the disk is gone")


def not_finite():
    yield images(2, seed=5)
    yield images(2) * float("nan")


@pytest.mark.parametrize(
    "loader, error",
    [(broken_loader, OSError), (not_finite, UserError), (list, UserError)],
    ids=["disk", "NaN", "empty"],
)
@pytest.mark.parametrize("first", [True, False], ids=["first task", "second task"])
def test_a_consolidation_that_fails_changes_nothing(tiny_model, loader, error, first):
    model = tiny_model().train()
    space = NullSpace(model)
    if not first:
        space.consolidate([images()])
    before = {name: tensor.clone() for name, tensor in space.state_dict().items()}
    dense = {name: projector.dense() for name, projector in space.projectors().items()}
    with pytest.raises(error):
        space.consolidate(loader())
    after = space.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(space.projectors()[name].dense(), matrix) for name, matrix in dense.items())
    assert model.training and hooks(model) == 0


def test_a_forward_that_skips_the_blocks_is_noticed(tiny_model):
    model = tiny_model()
    with pytest.raises(UserError, match="found no features of blocks"):
        NullSpace(model).consolidate([images()], forward=lambda batch: batch)


def test_it_says_how_much_is_protected(tiny_model, caplog):
    caplog.set_level("INFO", logger="mambacl")
    logging.getLogger("mambacl").propagate = True
    NullSpace(tiny_model(), rank="corner").consolidate([images()])
    assert "hardly limits later tasks; --nullspace.rank energy:0.99 leaves 1%" in caplog.text
    caplog.clear()
    NullSpace(tiny_model(), rank="energy:0.9").consolidate([images()])
    assert "protected after task 1: " in caplog.text and "hardly limits" not in caplog.text
