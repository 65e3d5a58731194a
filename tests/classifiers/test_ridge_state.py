"""The ridge classifier's state: merged, saved and resumed, stored as integers, within a limit, on a GPU."""

from typing import Any

import pytest
import torch
from ridge_help import PLAIN, WIDTH, D, assert_alike, joint, some, taught
from tolerance import rounding
from torch import Tensor

from mambacl.classifiers import NearestMean, Ridge
from mambacl.classifiers import ridge as module
from mambacl.classifiers.ridge_options import parsed_size
from mambacl.errors import UserError

# Parts


def test_parts_with_the_same_scale_merge() -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    one = taught(features[:60], labels[:60] % 2)
    expected = joint(features, torch.cat([labels[:60] % 2, labels[60:]]), test, features[:60])
    other = Ridge.like(one)
    other.update(features[60:], labels[60:])
    one.merge(other)
    assert one.classes == 5 and one.counts.sum() == 120
    assert_alike(one.scores(test), expected)


def test_a_part_has_the_same_lift() -> None:
    features, labels = some()
    one = taught(features[:60], labels[:60], activation="fourier", bandwidth=0.2)
    other = Ridge.like(one)
    assert torch.equal(other.lifted(features), one.lifted(features))
    other.update(features[60:], labels[60:])
    one.merge(other)
    assert_alike(one.scores(features), taught_by(one, features, labels).scores(features))


def taught_by(scaled: Ridge, features: Tensor, labels: Tensor) -> Ridge:
    """A new classifier with the same lift and scale."""
    made = Ridge.like(scaled)
    made.update(features, labels)
    made.finish_task()
    return made


@pytest.mark.parametrize("finished", ["first", "second", "neither"])
def test_what_waits_merges(finished: str) -> None:
    """The scale is that of the part which has one."""
    features, labels = some()
    test, _ = some(7, seed=1)
    halves = [Ridge(D, **PLAIN) for _ in range(2)]
    for half, part in zip(halves, (slice(0, 60), slice(60, 120)), strict=True):
        half.update(features[part], labels[part])
    by = {"first": features[:60], "second": features[60:], "neither": features}[finished]
    if finished != "neither":
        halves[finished == "second"].finish_task()
    halves[0].merge(halves[1])
    assert_alike(halves[0].scores(test), joint(features, labels, test, by))


def test_what_cannot_be_merged() -> None:
    features, labels = some()
    one = taught(features[:60], labels[:60])
    for other in (NearestMean(D), Ridge(D, width=41, ridge=2.0), Ridge(D + 1, **PLAIN)):
        with pytest.raises(UserError, match="same number of features and options"):
            one.merge(other)
    with pytest.raises(UserError, match=r"Ridge\.like\(first\)"):
        one.merge(taught(features[60:], labels[60:]))


# Saved states


def test_a_state_in_the_middle_of_a_task_goes_on() -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    made = Ridge(D, **PLAIN)
    for start in (0, 20, 60):  # before and after the scale is fixed
        made.update(features[start : start + 20], labels[start : start + 20])
        resumed = Ridge(D, **PLAIN)
        resumed.load_state_dict({name: tensor.clone() for name, tensor in made.state_dict().items()})
        assert torch.equal(resumed.scores(test), made.scores(test))
        for one in (made, resumed):
            one.update(features[start + 20 : start + 40], labels[start + 20 : start + 40])
            one.finish_task()
        assert torch.equal(resumed.scores(test), made.scores(test))
        assert resumed.nbytes == made.nbytes


OTHERS = [{"seed": 1}, {"activation": "tanh"}, {"bandwidth": 0.3}, {"width": 41}, {"storage": "int16"}]


@pytest.mark.parametrize("options", OTHERS)
def test_a_state_of_other_options_is_refused(options: dict[str, Any]) -> None:
    state = taught(*some()).state_dict()
    with pytest.raises(UserError, match="other options"):
        Ridge(D, **{**PLAIN, **options}).load_state_dict(state)


# Storage


@pytest.mark.parametrize("storage, size", [("int24", 0.75), ("int16", 0.5)])
def test_integers_are_close_and_smaller(storage: str, size: float) -> None:
    features, labels = some(1000)
    test, _ = some(200, seed=1)
    wide = {"width": 600, "ridge": 20.0}
    exact, small = taught(features, labels, **wide), taught(features, labels, cuts=3, storage=storage, **wide)
    assert small.gram.nbytes == size * exact.gram.nbytes
    # Correlations are off by 0.29 units on average: a random matrix, whose largest eigenvalue the ridge divides.
    step = 1 / module.storage_of.LARGEST[small.gram.dtype]
    relative = 2 * 600**0.5 * 0.29 * step * small.spread.square().max().item() / 20.0
    assert relative < 0.05
    relative += 100 * rounding(600)  # of the sums, in another order
    difference = (small.scores(test) - exact.scores(test)).norm() / exact.scores(test).norm()
    assert (
        difference <= relative and (small.scores(test).argmax(1) == exact.scores(test).argmax(1)).float().mean() > 0.95
    )


@pytest.mark.parametrize("storage", [None, "float32", "float64", "int24", "int16"])
@pytest.mark.parametrize("limit", ["300kB", "3MB", "2.5 MB"])
def test_the_state_keeps_to_its_limit(limit: str, storage: str | None) -> None:
    features, labels = some(60, classes=5)
    made = taught(features, labels, width="auto", state_limit=limit, storage=storage, expected_classes=5, ridge=1e3)
    assert 0.97 * parsed_size(limit) < made.nbytes <= parsed_size(limit)
    assert made.options.storage == (storage or "int24")


def test_a_limit_and_a_width() -> None:
    assert Ridge(D, width=100, state_limit="1MB").units == 100
    with pytest.raises(UserError, match=r"5000 units and room for 200 classes needs \d+\.\d MB, more than .* 1MB"):
        Ridge(D, width=5000, state_limit="1MB")
    with pytest.raises(UserError, match="more than the state_limit of 1kB"):
        Ridge(D, state_limit="1kB")
    for options, message in (
        ({"state_limit": "lots"}, "such as 500MB, got 'lots'"),
        ({"width": "auto"}, "needs a state_limit"),
        ({"width": -1}, "width must be at least 0"),
        ({"ridge": -1.0}, "ridge must be at least 0"),
        ({"rigde": 1.0}, "Did you mean 'ridge'"),
        ({"storage": "float8"}, "storage takes"),
    ):
        with pytest.raises(UserError, match=message):
            Ridge(D, **options)


def test_more_classes_than_expected_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    made = Ridge(D, state_limit="1MB", expected_classes=3)
    for _ in range(4):
        made.add_task(2)
    assert [record.message.count("expected_classes (3)") for record in caplog.records] == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("storage", ["float32", "int24", "int16", "factor"])
def test_a_gpu_gives_the_same(storage: str) -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    there = Ridge(D, **PLAIN, storage=storage).cuda()
    here = Ridge(D, **PLAIN, storage=storage)
    for made, device in ((here, "cpu"), (there, "cuda")):
        made.update(features.to(device), labels.to(device))
        made.finish_task()
    assert torch.equal(here.projection, there.projection.cpu())
    expected = joint(features, labels, test, features)
    back = Ridge(D, **PLAIN, storage=storage)
    back.load_state_dict(there.state_dict())
    assert_alike(back.scores(test), there.scores(test.cuda()).cpu())
    for made in (here, back) if storage == "float32" else ():
        assert_alike(made.scores(test), expected)
    auto = Ridge(D, width=WIDTH, storage=storage).cuda()
    auto.update(features.cuda(), labels.cuda())
    auto.finish_task()
    assert auto.scores(test.cuda()).isfinite().all() and auto.ridge > 0
