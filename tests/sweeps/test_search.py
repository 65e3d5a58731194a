"""Which points `mambacl tune` tries, and which it chooses."""

import math
from pathlib import Path

import pytest
from cli_help import fails

from mambacl.errors import UserError
from mambacl.sweeps.search import Range, chosen_points, ends, first_best, parse, space_of

RATE = "training.lr"


def test_a_grid_has_every_combination() -> None:
    space = space_of(
        parse([f"{RATE}=1e-4,3e-4,1e-3", "features.pool=[class],[class,mean]", "nullspace.rank=energy:0.9,corner"])
    )
    assert space[RATE] == [1e-4, 3e-4, 1e-3] and space["features.pool"] == [["class"], ["class", "mean"]]
    assert space["nullspace.rank"] == ["energy:0.9", "corner"]
    points = chosen_points(space, None)
    assert len(points) == 12 and points[0] == {RATE: 1e-4, "features.pool": ["class"], "nullspace.rank": "energy:0.9"}


def test_random_points_are_the_same_for_the_same_seed_and_the_first_ones_stay() -> None:
    space = space_of({RATE: (1e-5, 1e-2), "training.passes": "2:32", "training.heads": ["new", "warm-second"]})
    points = chosen_points(space, 40, seed=3)
    assert len(points) == 40 and points[:10] == chosen_points(space, 10, seed=3) != chosen_points(space, 10, seed=4)
    assert all(1e-5 <= point[RATE] <= 1e-2 and 2 <= point["training.passes"] <= 32 for point in points)
    assert {type(point["training.passes"]) for point in points} == {int}
    assert {point["training.heads"] for point in points} == {"new", "warm-second"}


def test_draws_are_uniform_on_a_logarithmic_scale() -> None:
    count = 400
    values = [point[RATE] for point in chosen_points(space_of({RATE: (1e-5, 1e-1)}), count)]
    shares = sorted((math.log10(value) + 5) / 4 for value in values)
    largest = max(max(abs(share - i / count), abs(share - (i + 1) / count)) for i, share in enumerate(shares))
    assert largest < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov, exceeded with probability 0.001


def test_a_small_grid_gives_no_more_points_than_it_has() -> None:
    points = chosen_points(space_of({"training.passes": [1, 2, 3]}), 50)
    assert sorted(point["training.passes"] for point in points) == [1, 2, 3]
    assert Range(2, 8, whole=True).at(0.5) == 4 and str(Range(1e-5, 0.01)) == "1e-05:0.01"


def test_the_best_of_equals_is_the_first_and_failed_points_do_not_count() -> None:
    assert first_best([0.2, 0.5, None, 0.5], "max") == 1 and first_best([0.2, 0.5, 0.2], "min") == 0
    assert first_best([None, None], "max") is None and first_best([-0.1, None, 0.0], "max") == 2


def test_a_value_at_the_end_of_the_search_is_noticed() -> None:
    space = space_of(
        {RATE: [1e-4, 1e-3, 1e-2], "training.passes": [1, 3], "stream.validation": [0.6, 0.7], "fast": [True]}
    )
    inside = {RATE: 1e-3, "training.passes": 1, "stream.validation": 0.6, "fast": True}
    assert ends(space, inside) == [("stream.validation", "smallest", 0.6)]  # passes cannot be fewer than 1
    further = {**inside, RATE: 1e-2, "training.passes": 3, "stream.validation": 0.7}  # a share of 1.4 is none
    assert ends(space, further) == [(RATE, "largest", 1e-2), ("training.passes", "largest", 3)]
    ranged = space_of({RATE: (1e-5, 1e-1)})
    assert ends(ranged, {RATE: 1.2e-5}) == [(RATE, "smallest", 1.2e-5)] and ends(ranged, {RATE: 1e-3}) == []
    assert ends(space_of({RATE: [1e-3]}), {RATE: 1e-3}) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Name what to search, as in --search training.lr="),
        (["--search", "training.lr"], "--search takes OPTION=VALUE,VALUE or OPTION=LOW:HIGH, got 'training.lr'."),
        (["--search", "training.lr=1,2", "--search", "training.lr=3"], "--search has training.lr twice"),
        (["--search", "training.lr=1e-5:1e-2"], "training.lr has a range, from which points are drawn: say how many"),
        (["--search", "training.lr=1e-2:1e-5", "--trials", "3"], "The range of training.lr must go from a positive"),
        (["--search", "training.lr=0:1", "--trials", "3"], "must go from a positive number to a larger one"),
        (["--search", "training.lr=[1"], "The values of training.lr cannot be read"),
        (["--search", "training.lrr=1,2"], "There is no option 'training.lrr'. Did you mean 'training.lr'?"),
        (["--search", "training.lr=a,b"], "training.lr takes a number, got 'a'."),
        (["--search", "method=frozen,frozn"], "There is no method 'frozn'. Did you mean 'frozen'?"),
        (["--search", "seed=1,2"], "A search cannot set seed: name the seeds with --seeds."),
        (["--search", "stream.validation=0.1,0.2"], "A search cannot set stream.validation: --validation sets it."),
        (["--search", "training.lr=1,2", "--stream.test_share", "0.1"], "A search cannot set stream.test_share"),
        (["--search", "training.lr=1,2", "--training.lr", "3"], "training.lr is searched, and also one of the options"),
        (["--search", "training.lr=1,2", "--metric", "final"], "There is no metric 'final'."),
        (["--search", "training.lr=1,2", "--validation", "1.5"], "--validation must be at least 0.001 and at most"),
        (["--search", "training.lr=1,2", "--seeds", "0,x"], "--seeds takes whole numbers, as in 0,1,2, got '0,x'."),
        (["--search", "training.lr=1,2", "--trials", "0"], "--trials must be at least 1"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in fails(capsys, "tune", "demo", *words)
    assert not any(tmp_path.iterdir())


def test_values_of_a_search_in_python() -> None:
    with pytest.raises(UserError, match=r"a list of values or a range for training\.lr"):
        space_of({RATE: 3})
    assert space_of({"training.lr": (1, 100)})[RATE] == Range(1, 100, whole=False)
    assert space_of({"classifier_options.width": (100, 4000)})["classifier_options.width"].whole
