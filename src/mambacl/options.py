"""Typed options: a dataclass defines each option's type, default and constraints once. The check, the error message,
the command line and its help follow from that.

    @dataclass(frozen=True)
    class Recipe(Options):
        passes: Annotated[int, at_least(1)] = 50
        \"\"\"passes over a task's images\"\"\"

This is a small module instead of pydantic, tyro or cyclopts, because the same check must serve nested presets, the
command line, Python callers and other packages' dataclasses, report a mistake in one sentence with the remedy, import
in milliseconds, and need no further package.
"""

import ast
import dataclasses
import inspect
import json
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from mambacl.errors import UserError
from mambacl.registry import did_you_mean

T = TypeVar("T")
WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    type(None): "null",
}
REQUIRED = inspect.Parameter.empty
SYNONYMS = {
    "learning_rate": "lr",
    "epochs": "passes",
    "data": "root",
    "data_dir": "root",
    "model": "backbone",
    "weights": "pretrained",
    "checkpoint": "pretrained",
    "output": "out",
}
"""what other tools call an option, and its name here"""


class OptionError(UserError):
    """A mistake in an option. `sentence` has `{group}` before each name; its group fills it in."""

    def __init__(self, sentence: str, group: str = "") -> None:
        super().__init__(sentence.replace("{group}", group))
        self.sentence, self.group = sentence, group

    def inside(self, group: str) -> "OptionError":
        return OptionError(self.sentence, f"{group}.{self.group}")


@dataclass(frozen=True)
class Must:
    """A constraint; `words` complete "NAME must ...". Null is exempt."""

    words: str
    holds: Callable[[Any], bool]


def at_least(least: float) -> Must:
    return Must(f"be at least {least}", lambda value: value >= least)


def finite_from(least: float) -> Must:
    return Must(f"be finite and at least {least}", lambda value: least <= value < math.inf)


def between(low: float, high: float) -> Must:
    return Must(f"be at least {low} and at most {high}", lambda value: low <= value <= high)


@dataclass(frozen=True)
class Option:
    """One option: a field of a dataclass, or a parameter of a function."""

    name: str
    kind: Any
    default: Any = REQUIRED
    constraints: tuple[Must, ...] = ()
    words: str | Callable[[], str] = ""
    """help text; a function if it takes time to compute"""

    @classmethod
    def of(cls, name: str, hint: Any, default: Any = REQUIRED) -> "Option":
        """From a type hint; `Annotated` adds constraints and a help text."""
        kind, notes = _notes(hint)
        constraints = tuple(note for note in notes if isinstance(note, Must))
        words = next((note for note in notes if isinstance(note, str) or callable(note)), "")
        return cls(name, kind, default, constraints, words)

    @property
    def text(self) -> str:
        return self.words if isinstance(self.words, str) else self.words()

    def check(self, value: Any, shown: str | None = None, from_text: bool = False) -> Any:
        """The value in the option's type. `from_text`: reads text as YAML if the option does not take text."""
        shown = shown or "{group}" + self.name
        if is_group(self.kind) and not isinstance(value, (Mapping, self.kind)):
            raise OptionError(f"The option '{shown}' is a group: set {shown}.NAME, not {_quoted(value)} itself.")
        try:
            found = convert(self.kind, value, from_text)
        except OptionError as error:  # of an option inside this group
            raise error.inside(self.name) from None
        if found is _NO:
            raise OptionError(f"{shown} takes {describe(self.kind)}, got {_quoted(value)}.")
        for constraint in self.constraints if found is not None else ():
            if not constraint.holds(found):
                raise OptionError(f"{shown} must {constraint.words}, got {_quoted(found)}.")
        return found


def _notes(hint: Any) -> tuple[Any, list[Any]]:
    """A type without its `Annotated`, and the annotations; also inside a union, as in `Device | None`."""
    if get_origin(hint) is Annotated:
        kind, notes = _notes(get_args(hint)[0])
        return kind, [*notes, *get_args(hint)[1:]]
    if get_origin(hint) in (Union, types.UnionType):
        members = [_notes(member) for member in get_args(hint)]
        return reduce(or_, (kind for kind, _ in members)), [note for _, notes in members for note in notes]
    return hint, []


class Options:
    """Base of a configuration dataclass, which checks its values on creation. `check` is for constraints between
    several options."""

    def __post_init__(self) -> None:
        for name, option in options_of(type(self)).items():
            object.__setattr__(self, name, option.check(getattr(self, name)))
        self.check()

    def check(self) -> None: ...


def build(kind: type[T], values: Mapping[str, Any], from_text: bool = False) -> T:
    """Builds a configuration dataclass from a mapping, with groups as inner mappings. Missing options get defaults."""
    options = options_of(kind)
    for key in values:
        if key not in options:
            raise OptionError(_unknown(str(key), kind))
    return kind(**{key: options[key].check(value, from_text=from_text) for key, value in values.items()})


def build_config(config_class: type, values: Mapping[str, Any], owner: str) -> Any:
    """Does the same for the options of a model or method; `owner` is its name."""
    try:
        return build(config_class, values)
    except OptionError as error:
        raise UserError(f"{owner}: {str(error)[0].lower()}{str(error)[1:]}") from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` overridden by `over`; merges inner mappings as well."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turns keys with dots, as in {"training.lr": 1e-3}, into nested mappings, and dataclasses into mappings."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        elif isinstance(value, Mapping):
            value = nested(value)
        elif isinstance(value, Path):
            value = str(value)
        first, *rest = str(key).split(".")
        for part in reversed(rest):
            value = {part: value}
        made = merge(made, {first: value})
    return made


# The options of a dataclass


def _options_of(kind: Any) -> dict[str, Option]:
    """The fields of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    made = {}
    for field in dataclasses.fields(kind):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = REQUIRED if default is dataclasses.MISSING else default
        made[field.name] = Option.of(field.name, hints[field.name], default)
    return made


options_of: Callable[[Any], dict[str, Option]] = cache(_options_of)


def is_group(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def is_mapping(kind: Any) -> bool:
    """Whether it takes options of any name."""
    return dict in (get_origin(kind), *map(get_origin, get_args(kind)))


def walk(kind: type, group: str = "") -> Iterator[tuple[str, Option]]:
    """All options by dotted name, including those of groups; each group comes before its options."""
    for name, option in options_of(kind).items():
        yield group + name, option
        if is_group(option.kind):
            yield from walk(option.kind, f"{group}{name}.")


def sentences_of(kind: Any) -> dict[str, str]:
    """The string below each field, which is its help text."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        try:
            body = ast.parse(dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
        except (OSError, TypeError, SyntaxError):  # without the source, only help texts are missing
            continue
        for field, below in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                found[field.target.id] = " ".join(str(getattr(below.value, "value", "")).split())
    return found


def suggestion(name: str, known: Iterable[str], before: str = "") -> str:
    """' Did you mean ...?' if a known name is close; prefers one with the same last word (training.lr for lr), or with
    a synonym of it (training.lr for learning-rate)."""
    known = list(known)
    last = name.rpartition(".")[2].replace("-", "_")
    wanted = (last, SYNONYMS.get(last, last))
    same = [other for other in known if other.rpartition(".")[2] in wanted]
    hint = f" Did you mean '{same[0]}'?" if same else did_you_mean(name, known)
    return hint.replace("'", f"'{before}", 1)


def _unknown(name: str, kind: type) -> str:
    known = ", ".join("{group}" + other for other in options_of(kind))
    hint = suggestion(name, [other for other, _ in walk(kind)], "{group}")
    return f"There is no option '{{group}}{name}'.{hint} {f'Known: {known}.' if known else 'There are none.'}"


# Values


class _No:
    """Marks a value that does not fit, because None is a valid value."""


_NO = _No()


def _is(kind: Any, value: Any) -> bool:
    return (get_origin(kind) or kind) is type(value)


def convert(kind: Any, value: Any, from_text: bool = False) -> Any:
    """The value in that type, or `_NO` if it does not fit."""
    if from_text and isinstance(value, str) and kind is not str:
        read = _read(value)
        found = _NO if isinstance(read, str) else convert(kind, read, True)
        return convert(kind, value) if found is _NO else found
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        alike = sorted(inner, key=lambda member: not _is(member, value))  # the same type first
        fitting = (convert(member, value, from_text) for member in alike)
        return next((found for found in fitting if found is not _NO), _NO)
    if origin is Literal:
        return next((choice for choice in inner if choice == value and type(choice) is type(value)), _NO)
    if origin in (list, tuple):
        return _sequence(origin, inner, value, from_text)
    if origin is dict:
        if not isinstance(value, Mapping):
            return _NO
        found = {key: convert(inner[1], item, from_text) for key, item in value.items()}
        return _NO if any(item is _NO for item in found.values()) else found
    if is_group(kind) and isinstance(value, Mapping):
        return build(kind, value, from_text)
    return _plain(kind, value)


def _sequence(origin: Any, inner: Sequence[Any], value: Any, from_text: bool) -> Any:
    if not isinstance(value, (list, tuple)):
        return _NO
    fixed = origin is tuple and (len(inner) != 2 or inner[1] is not ...)
    if fixed and len(inner) != len(value):
        return _NO
    found = [convert(inner[place if fixed else 0], item, from_text) for place, item in enumerate(value)]
    return _NO if any(item is _NO for item in found) else origin(found)


def _plain(kind: Any, value: Any) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if kind in (str, Path) and isinstance(value, (str, os.PathLike)):
        return kind(value)
    if kind is None or kind is type(None):
        return value if value is None else _NO
    if not isinstance(kind, type):  # an unknown hint of another package
        return value
    return value if isinstance(value, kind) and not (kind is int and isinstance(value, bool)) else _NO


def describe(kind: Any) -> str:
    """What an option takes, in words: "a number or null"."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        *others, last = dict.fromkeys(describe(member) for member in inner)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (list, tuple):
        plural = {int: "whole numbers", float: "numbers"}.get(inner[0], "values")
        return f"a list of {plural}"
    if origin is dict:
        return "a mapping"
    return WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def _quoted(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else json.dumps(value, default=repr)


# YAML


class Loader(yaml.SafeLoader):
    """A YAML loader that reads 1e-3 as a number."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$|^[-+]?\d[\d_]*\.[\d_]*$|^[-+]?\.\d[\d_]*$"),
    list("-+0123456789."),
)


def read_yaml(text: str) -> Any:
    """Parses YAML. Raises a ValueError or a YAMLError if it is invalid or refers to itself."""
    content = yaml.load(text, Loader=Loader)
    json.dumps(content, default=str)
    return content


def _read(text: str) -> Any:
    try:
        return read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
