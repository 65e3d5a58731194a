"""What a comparison says about limits, and its page."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from mambacl.deploy.comparison import ClassPairs, Comparison, Flip, Limits, Side, read_limits
from mambacl.deploy.comparison_page import as_page, as_text, summary_table
from mambacl.deploy.paired import Pairs
from mambacl.errors import UserError
from mambacl.reports.rendering import to_text

OLD = Side("old", "analytic", "nano", 2, 0.8, 0.1, images_per_second=100.0, bytes=2_000_000)
NEW = Side("new", "analytic", "nano", 3, 0.7, 0.05, images_per_second=80.0, bytes=3_000_000)
CAT, DOG, EEL = Pairs(98, 2, 0, 0), Pairs(90, 3, 4, 3), Pairs(0, 0, 9, 1)
FOUND = Comparison(
    OLD,
    NEW,
    test="photos",
    shared=Pairs(188, 5, 4, 3),
    all=Pairs(188, 5, 13, 4),
    classes=(ClassPairs("cat", False, CAT), ClassPairs("dog", False, DOG), ClassPairs("eel", True, EEL)),
    flips=(Flip("cat/<b>.png", "cat", "eel"),),
    drift={"blocks.0": 0.0, "blocks.1": 0.03},
)


def test_without_limits_nothing_is_broken() -> None:
    assert FOUND.broken(Limits()) == [] == FOUND.broken({})


@pytest.mark.parametrize(
    "name, kept, past, sentence",
    [
        ("max_negative_flips", 0.025, 0.0249, "5 of 200 images of old classes were right before and are wrong now "
         "(2.50%), more than the limit of 2.49%."),
        ("max_drop", 0.5, 0.49, "The accuracy on the old classes fell by 0.50 points, more than the limit of 0.49."),
        ("max_class_drop", 2, 1.9, "The accuracy on 'cat' fell by 2.0 points, more than the limit of 1.9."),
        ("max_drift", 0.03, 0.02, "The output of blocks.1 changed by 3.00%, more than the limit of 2.00%."),
        ("max_slowdown", 0.25, 0.2, "The new model takes 25% more time per image, more than the limit of 20%."),
    ],
)  # fmt: skip
def test_each_limit_holds_up_to_its_value(name: str, kept: float, past: float, sentence: str) -> None:
    assert FOUND.broken({name: kept}) == [] and FOUND.broken({name: past}) == [sentence]


def test_several_limits_give_several_sentences() -> None:
    every = Limits(max_negative_flips=0, max_drop=0, max_class_drop=0, max_drift=0, max_slowdown=0)
    assert len(FOUND.broken(every)) == 5
    worse = dataclasses.replace(FOUND, classes=(ClassPairs("cat", False, CAT), ClassPairs("ant", False, CAT)))
    assert "1 more of the classes" in worse.broken({"max_class_drop": 1})[0]


def test_a_gain_breaks_nothing() -> None:
    better = dataclasses.replace(FOUND, shared=Pairs(188, 4, 5, 3), new=OLD)
    assert better.drop == -0.5 and better.broken({"max_drop": 0, "max_slowdown": 0}) == []


def test_a_limit_that_cannot_be_checked_is_broken() -> None:
    [sentence] = dataclasses.replace(FOUND, drift=None).broken({"max_drift": 1})
    assert sentence.startswith("The drift is not known")


def test_limits_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text("max-negative-flips: 0.01\nmax_drop: 0.5\n")
    assert Limits(**read_limits(file)) == Limits(max_negative_flips=0.01, max_drop=0.5)
    for text, sentence in (
        ("max_dorp: 1", "Did you mean 'max_drop'"),
        ("max_drop: much", "max_drop takes a number"),
        ("max_negative_flips: 5", "at least 0 and at most 1"),
        ("max_drop: .nan", "max_drop"),
        ("max_slowdown: -1", "at least 0"),
        ("- a", "must contain options"),
        ("a: [", "is not valid YAML"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=re.escape(sentence)) as error:
            read_limits(file)
        assert str(file) in str(error.value), text
    with pytest.raises(UserError, match="does not exist"):
        read_limits(tmp_path / "gone.yaml")


def test_the_figures_are_plain_json() -> None:
    empty = dataclasses.replace(FOUND, classes=(*FOUND.classes, ClassPairs("fox", False, Pairs())))
    found = json.loads(json.dumps(empty.as_dict(), allow_nan=False))
    assert found["shared"]["lost"] == 5 and found["shared"]["negative_flip_rate"] == 0.025 and found["drop"] == 0.5
    assert found["classes"][0]["change"] == -0.02 and found["classes"][3]["change"] is None
    assert found["slowdown"] == 0.25 and found["drift"]["blocks.1"] == 0.03


def test_the_page_shows_the_figures_and_escapes_names() -> None:
    html = as_page(FOUND, FOUND.broken({"max_drop": 0}), limited=True)
    assert "Past a limit:" in html and "fell by 0.50 points" in html and "within the limits" not in html
    assert "cat/<wbr>&lt;b&gt;.<wbr>png" in html and "<b>." not in html
    assert html.count('<section id="') == 4 and "http:" not in html and "https:" not in html
    assert "blocks.1" in html and "3.000%" in html and "5 of 200" in html
    html = as_page(dataclasses.replace(FOUND, drift=None, flips=(), unreadable=("a.png is empty",)), [], limited=True)
    assert "within the limits" in html and "different backbones" in html and "a.png is empty" in html


def test_the_summary_fits_a_terminal_of_80_columns() -> None:
    table = to_text(summary_table(FOUND), 80).split("Old classes:")[0]
    assert max(map(len, table.splitlines())) <= 80 and table.count("accuracy on old classes") == 1
    assert "points (95%: " in table and "; p = " in table


def test_the_text_shows_the_classes_that_fell_most() -> None:
    text = as_text(FOUND)
    assert text.index("\ncat ") < text.index("\ndog ") < text.index("\neel ")
    assert "−0.5 points" in text and "2 of 3" not in text
    many = tuple(ClassPairs(f"class {i}", False, Pairs(i, 50 - i, 0, 0)) for i in range(50))
    shown = as_text(dataclasses.replace(FOUND, classes=many, untested=("ant", "bee")))
    assert "class 0 " in shown and "class 9 " in shown and "class 10 " not in shown and "10 of 50" in shown
    assert "2 of the old model's 2 classes have no test images: ant, bee." in shown
