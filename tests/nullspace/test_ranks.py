"""Rank rules against the recorded table and against spectra whose answer can be seen."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mambacl.errors import UserError
from mambacl.nullspace import null_rank
from mambacl.nullspace.ranks import as_spectrum, gaussian_filter

GOLDENS = Path(__file__).parents[1] / "goldens" / "mambacl_run"
SPECTRA = dict(np.load(GOLDENS / "threshold_spectra.npz"))
ROWS = [row for row in json.loads((GOLDENS / "threshold_table.json").read_text()) if row["name"] in SPECTRA]


def test_every_spectrum_has_its_row():
    assert {row["name"] for row in ROWS} == set(SPECTRA) and len(ROWS) == 16


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_smoothed_corner_is_the_public_codes_in_float32(row):
    assert null_rank(SPECTRA[row["name"]], "smoothed-corner") == row["official_null_rank"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_smoothed_corner_is_the_public_codes_in_float64(row):
    spectrum = SPECTRA[row["name"]].astype(np.float64)
    assert null_rank(spectrum, "smoothed-corner") == row["official_null_rank_if_spectrum_given_in_float64"]


def test_one_recorded_spectrum_tells_the_precisions_apart():
    differing = [
        row["name"]
        for row in ROWS
        if row["official_null_rank"] != row["official_null_rank_if_spectrum_given_in_float64"]
    ]
    assert differing == ["exp_n2048_tau200"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_corner_is_the_papers_formula(row, dtype):
    assert null_rank(SPECTRA[row["name"]].astype(dtype), "corner") == row["paper_R_if_j_is_1based"]


@pytest.mark.parametrize("rule", ["corner", "smoothed-corner", "energy:0.9", "fraction:0.3"])
def test_arrays_and_tensors_give_the_same(rule):
    spectrum = SPECTRA["gram_n320"]
    tensor = torch.from_numpy(spectrum).requires_grad_()
    assert null_rank(spectrum, rule) == null_rank(tensor, rule) == null_rank(list(spectrum), rule)


def test_corner_is_the_default():
    assert null_rank(np.array([9.0, 8.0, 1.0, 0.5, 0.2])) == 2


@pytest.mark.parametrize(
    "spectrum, expected",
    [
        ([9.0, 8.0, 1.0, 0.5, 0.2], 2),  # second differences -6, 6.5, 0.2: the corner is the third value
        ([10.0, 1.0, 0.9, 0.8, 0.7], 3),
        ([4.0, 3.0, 2.0, 0.0, 0.0], 1),
        ([5.0, 5.0, 5.0], 1),  # all alike: the first inner value
        ([2.0, 1.0], 0),
        ([2.0], 0),
    ],
)
def test_corner_protects_the_corner_itself(spectrum, expected):
    assert null_rank(np.array(spectrum), "corner") == expected


@pytest.mark.parametrize(
    "spectrum, expected",
    [
        ([9.0, 8.0, 1.0, 0.5, 0.2], 3),  # short and without ties: from the corner on
        ([4.0, 3.0, 2.0, 0.0, 0.0], 1),  # the last of equal values wins
        ([5.0, 5.0, 5.0], 1),
        ([2.0, 1.0], 1),
        ([2.0], 0),
    ],
)
def test_smoothed_corner_gives_ties_to_the_last(spectrum, expected):
    assert null_rank(np.array(spectrum), "smoothed-corner") == expected


def test_smoothing_starts_at_128_values():
    short, long = (np.exp(-np.arange(n) / 3.0) for n in (127, 128))
    assert null_rank(short, "smoothed-corner") == 126
    assert null_rank(long, "smoothed-corner") < 126


@pytest.mark.parametrize(
    "share, expected",
    [(0.0, 4), (0.3, 3), (0.5, 3), (0.51, 2), (0.75, 2), (0.9, 1), (1.0, 0)],
)
def test_energy_keeps_the_leading_directions_that_hold_the_share(share, expected):
    assert null_rank(np.array([4.0, 2.0, 1.5, 0.5]), f"energy:{share}") == expected


def test_all_the_energy_leaves_exactly_the_zeros():
    assert null_rank(np.array([4.0, 2.0, 0.5, 0.0, 0.0, 0.0]), "energy:1.0") == 3
    assert null_rank(np.zeros(4), "energy:0.9") == 4


@pytest.mark.parametrize("share, expected", [(0.0, 0), (0.24, 2), (0.5, 5), (0.99, 9), (1.0, 10)])
def test_fraction_is_a_share_of_the_directions(share, expected):
    assert null_rank(np.linspace(3, 1, 10), f"fraction:{share}") == expected


@pytest.mark.parametrize("share, size, expected", [(0.29, 100, 29), (0.57, 100, 57), (0.7, 10, 7)])
def test_fraction_is_not_off_by_one_where_the_product_rounds_down(share, size, expected):
    assert null_rank(np.linspace(3, 1, size), f"fraction:{share}") == expected


@pytest.mark.parametrize(
    "rule", ["", "knee", "corner:0.5", "energy", "energy:", "fraction", "energy:much", "energy:1.1", "fraction:-0.1"]
)
def test_wrong_rules_are_named(rule):
    with pytest.raises(UserError, match="rank rule"):
        null_rank(np.ones(4), rule)


@pytest.mark.parametrize("rule", ["energy:nan", "fraction:nan", "energy:inf"])
def test_shares_that_are_no_numbers_are_refused(rule):
    with pytest.raises(UserError, match="needs a share between 0 and 1"):
        null_rank(np.ones(4), rule)


def test_a_rule_close_to_a_known_one_is_suggested():
    with pytest.raises(UserError, match=r"Did you mean 'smoothed-corner'\? Known: corner, smoothed-corner, energy:"):
        null_rank(np.ones(4), "smooth-corner")


@pytest.mark.parametrize("spectrum", [np.ones((2, 2)), np.ones(0), np.array(1.0)], ids=["matrix", "empty", "scalar"])
def test_a_spectrum_is_a_vector(spectrum):
    with pytest.raises(UserError, match="A spectrum must be a vector"):
        null_rank(spectrum)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_spectrum_is_finite(value):
    with pytest.raises(UserError, match="NaN or infinite"):
        null_rank(np.array([value, 1.0, 0.5]))


def test_gaussian_filter_keeps_the_sum_and_flat_values():
    assert np.allclose(gaussian_filter(np.full(200, 3.0), 10.0), 3.0)
    impulse = np.zeros(201)
    impulse[100] = 1.0
    smooth = gaussian_filter(impulse, 10.0)
    assert np.isclose(smooth.sum(), 1.0) and smooth.argmax() == 100
    assert smooth[59] == 0.0 < smooth[60]  # cut off at four deviations


def test_eigenvalues_become_a_descending_spectrum_without_negatives():
    assert as_spectrum(torch.tensor([-1e-9, 0.5, 2.0])).tolist() == [2.0, 0.5, 0.0]
