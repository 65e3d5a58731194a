"""Typed options: each kind of value, constraints, groups, and the one sentence that a mistake gets."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from mambacl.errors import UserError
from mambacl.options import (
    Must,
    OptionError,
    Options,
    at_least,
    build,
    build_config,
    merge,
    nested,
    sentences_of,
    suggestion,
    walk,
)


@dataclass(frozen=True)
class Inner(Options):
    size: Annotated[int, at_least(1)] = 3
    """how large
    it is"""
    share: Annotated[float | None, Must("lie between 0 and 1", lambda share: 0 <= share <= 1)] = None

    def check(self) -> None:
        if self.size == 13:
            raise OptionError("{group}size brings bad luck with {group}share.")


@dataclass(frozen=True)
class Outer(Options):
    on: bool = True
    """whether"""
    text: str = "a"
    path: Path | None = None
    choice: Literal["red", "green"] = "red"
    either: bool | str = True
    numbers: int | list[int] = 1
    pair: tuple[int, int] = (1, 2)
    free: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    twin: Inner = field(default_factory=lambda: Inner(size=5))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"on": "false"}, False),
        ({"text": "5"}, "5"),
        ({"text": "null"}, "null"),
        ({"path": "a/b"}, Path("a/b")),
        ({"path": "null"}, None),
        ({"choice": "green"}, "green"),
        ({"either": "true"}, True),
        ({"either": "weights.pth"}, "weights.pth"),
        ({"numbers": "4"}, 4),
        ({"numbers": "[4, 5]"}, [4, 5]),
        ({"numbers": (4, 5)}, [4, 5]),
        ({"pair": "[3, 4]"}, (3, 4)),
        ({"free": {"a": "1e-3", "b": "word"}}, {"a": 0.001, "b": "word"}),
        ({"inner": {"share": 1}}, Inner(share=1.0)),
        ({"inner": {"size": "7"}}, Inner(size=7)),
    ],
)
def test_text_is_read_where_an_option_takes_something_else(values: dict[str, Any], expected: Any) -> None:
    found = getattr(build(Outer, values, from_text=True), next(iter(values)))
    assert found == expected and type(found) is type(expected)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"on": 1}, "on takes true or false, got 1."),
    ({"on": "maybe"}, "on takes true or false, got 'maybe'."),
    ({"text": None}, "text takes text, got null."),
    ({"choice": "blue"}, "choice takes one of red, green, got 'blue'."),
    ({"either": 2.5}, "either takes true or false or text, got 2.5."),
    ({"numbers": [1, True]}, "numbers takes a whole number or a list of whole numbers, got [1, true]."),
    ({"pair": [1, 2, 3]}, "pair takes a list of whole numbers, got [1, 2, 3]."),
    ({"free": [1]}, "free takes a mapping, got [1]."),
    ({"inner": 5}, "The option 'inner' is a group: set inner.NAME, not 5 itself."),
    ({"inner": {"size": 0}}, "inner.size must be at least 1, got 0."),
    ({"twin": {"share": float("nan")}}, "twin.share must lie between 0 and 1, got NaN."),
    ({"twin": {"size": 13}}, "twin.size brings bad luck with twin.share."),
    (
        {"inner": {"sise": 2}},
        "There is no option 'inner.sise'. Did you mean 'inner.size'? Known: inner.size, inner.share.",
    ),
    ({"share": 2}, "There is no option 'share'. Did you mean 'inner.share'? Known: on, text, path"),
]


@pytest.mark.parametrize(("values", "sentence"), WRONG)
@pytest.mark.parametrize("from_text", [False, True])
def test_one_sentence_names_option_value_and_remedy(values: dict[str, Any], sentence: str, from_text: bool) -> None:
    with pytest.raises(OptionError) as caught:
        build(Outer, values, from_text)
    assert str(caught.value).startswith(sentence)


def test_a_dataclass_checks_itself_and_reads_no_text() -> None:
    assert Outer(inner={"size": 2}).inner == Inner(size=2)  # type: ignore[arg-type]
    for wrong, sentence in (({"on": "false"}, "on takes"), ({"inner": {"size": "2"}}, "inner.size takes")):
        with pytest.raises(UserError, match=sentence):
            Outer(**wrong)


def test_a_plain_dataclass_of_another_package_is_checked_too() -> None:
    @dataclass
    class Theirs:
        alpha: float = 0.1
        names: list[str] = field(default_factory=list)

    assert build_config(Theirs, {"alpha": 1, "names": ("a",)}, "ours") == Theirs(1.0, ["a"])
    with pytest.raises(
        UserError, match=r"^ours: there is no option 'alhpa'\. Did you mean 'alpha'\? Known: alpha, names\.$"
    ):
        build_config(Theirs, {"alhpa": 1}, "ours")
    with pytest.raises(UserError, match=r"^ours: names takes a list of values, got 3\.$"):
        build_config(Theirs, {"names": 3}, "ours")


def test_names_with_dots_and_layers() -> None:
    assert nested({"a.b.c": 1, "a": {"b.d": 2}, "e": Inner()}) == {
        "a": {"b": {"c": 1, "d": 2}},
        "e": {"size": 3, "share": None},
    }
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}
    assert [name for name, _ in walk(Outer)][-6:] == [
        "inner", "inner.size", "inner.share", "twin", "twin.size", "twin.share",
    ]  # fmt: skip
    assert suggestion("sise", ["inner.size", "size"], "--") == " Did you mean '--size'?"


def test_the_string_below_a_field_is_its_help() -> None:
    assert sentences_of(Inner) == {"size": "how large it is"} and sentences_of(Outer) == {"on": "whether"}
