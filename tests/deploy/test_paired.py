"""The statistics of two models on the same images, against values computed by hand."""

import math
from itertools import product
from math import comb

import pytest

from mambacl.deploy.paired import Pairs, calibration_error, mcnemar, newcombe, wilson


def test_pairs_are_counted() -> None:
    right = [(True, True)] * 5 + [(True, False)] * 2 + [(False, True)] + [(False, False)] * 2
    pairs = Pairs.of(right)
    assert pairs == Pairs(both=5, lost=2, gained=1, neither=2) and pairs.images == 10
    assert (pairs.old_accuracy, pairs.new_accuracy, pairs.change) == (0.7, 0.6, -0.1)
    assert (pairs.negative_flip_rate, pairs.positive_flip_rate) == (0.2, 0.1)
    assert pairs.p_value == 1.0  # 2 * (1 + 3) / 8


def test_without_images_nothing_is_known() -> None:
    none = Pairs()
    assert math.isnan(none.change) and math.isnan(none.old_accuracy) and all(map(math.isnan, none.interval))
    assert none.p_value == 1.0


@pytest.mark.parametrize(
    "lost, gained, expected",
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (0, 10, 2 / 1024), (2, 8, 2 * (1 + 10 + 45) / 1024), (4, 4, 1.0)],
)
def test_mcnemars_exact_test(lost: int, gained: int, expected: float) -> None:
    assert mcnemar(lost, gained) == mcnemar(gained, lost) == expected


def test_mcnemars_test_is_exact_for_many_flips() -> None:
    tail = sum(comb(3000, k) for k in range(1401))
    assert mcnemar(1400, 1600) == 2 * tail / 2**3000 > 0


def test_newcombes_interval_by_hand() -> None:
    """48 of 50 images right now, 38 before. Wilson's intervals are 0.865399 to 0.988961 and 0.625873 to 0.857026. The
    correlation is (36 * 0 - 2 * 12) / sqrt(38 * 12 * 48 * 2) = -0.114708; it is negative and not corrected. Below the
    change of 0.2 are sqrt(x^2 - 2 r x y + y^2) with x = 0.96 - 0.865399 and y = 0.857026 - 0.76; above it, x = 0.76 -
    0.625873 and y = 0.988961 - 0.96."""
    assert wilson(48, 50) == pytest.approx((0.865399, 0.988961), abs=1e-6)
    assert wilson(38, 50) == pytest.approx((0.625873, 0.857026), abs=1e-6)
    low, high = newcombe(Pairs(both=36, lost=2, gained=12, neither=0))
    assert (low, high) == pytest.approx((0.056930, 0.340428), abs=1e-6)
    assert newcombe(Pairs(both=36, lost=12, gained=2, neither=0)) == (-high, -low)


def test_newcombes_interval_with_a_positive_correlation_by_hand() -> None:
    """Half of the 100 images make the correction of (40 * 45 - 5 * 10 - 50) / sqrt(45 * 55 * 50 * 50) = 0.683426."""
    assert wilson(50, 100) == pytest.approx((0.403832, 0.596168), abs=1e-6)
    assert wilson(45, 100) == pytest.approx((0.356145, 0.547554), abs=1e-6)
    found = newcombe(Pairs(both=40, lost=5, gained=10, neither=45))
    assert found == pytest.approx((-0.027084, 0.125631), abs=1e-6)


def test_newcombes_interval_at_an_accuracy_of_one_by_hand() -> None:
    """10 images, one lost, all others right twice. With z^2 = 3.841459, Wilson's interval of 10 of 10 is 10 / 13.841459
    = 0.722467 to 1, and that of 9 of 10 is 0.595850 to 0.982124. Nothing correlates with an accuracy of 1. The interval
    goes from -0.1 - (0.9 - 0.595850) to -0.1 + sqrt(0.082124^2 + 0.277533^2)."""
    assert wilson(10, 10) == pytest.approx((0.722467, 1), abs=1e-6)
    assert wilson(9, 10) == pytest.approx((0.595850, 0.982124), abs=1e-6)
    assert newcombe(Pairs(both=9, lost=1)) == pytest.approx((-0.404150, 0.189428), abs=1e-6)


def test_a_correlation_narrows_the_interval() -> None:
    alike, unlike = Pairs(both=40, lost=5, gained=5, neither=40), Pairs(both=20, lost=25, gained=25, neither=20)
    assert alike.interval[1] < unlike.interval[1] and alike.interval[0] == -alike.interval[1]


def test_an_interval_holds_the_change_and_stays_in_its_range() -> None:
    for both, lost, gained, neither in product(range(4), repeat=4):
        pairs = Pairs(both, lost, gained, neither)
        if pairs.images:
            low, high = pairs.interval
            assert -1 <= low <= pairs.change <= high <= 1, pairs


def test_the_calibration_error_by_hand() -> None:
    """Two bins: 0.2 and 0.4, one right: |0.6 - 1|; 0.6, 0.9 and 1.0, two right: |2.5 - 2|; together 0.9 of 5 images."""
    found = calibration_error([0.2, 0.4, 0.6, 0.9, 1.0], [True, False, True, True, False], bins=2)
    assert found == pytest.approx(0.9 / 5, abs=1e-15)
    assert calibration_error([1.0, 0.0], [True, False]) == 0
    assert calibration_error([0.5], [True], bins=2) == 0.5  # the upper edge belongs to a bin
    assert math.isnan(calibration_error([], []))
