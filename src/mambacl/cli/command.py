"""A command is a typed function; this file reads its arguments from the command line.

Its positional parameters are words in order, its keyword-only parameters are options. A bool is a flag, a list is an
option that can be repeated, a tuple is an option with several values, a dataclass is an option per field.
`**overrides` takes any option of the command's configuration, usually a run's, as a nested mapping. Type hints define
types, constraints and help texts: see `mambacl.options`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, get_args, get_origin, get_type_hints

from mambacl.config import RunConfig
from mambacl.errors import UserError
from mambacl.options import (
    REQUIRED,
    Option,
    build,
    describe,
    is_group,
    is_mapping,
    nested,
    options_of,
    sentences_of,
    suggestion,
    walk,
)

GPUS = "gpus"  # the parameter of commands that can run in several processes


@cache
def all_options(config: type) -> Mapping[str, Option]:
    """The options and groups of a configuration, by dotted name."""
    return dict(walk(config))


@dataclass(frozen=True)
class Command:
    name: str
    function: Callable[..., int | None]
    config: type = RunConfig
    """the configuration whose options `**overrides` takes"""

    @cached_property
    def parameters(self) -> dict[str, tuple[Any, Option]]:
        """The kind of each parameter, and what it takes. A group is replaced by its options."""
        found: dict[str, tuple[Any, Option]] = {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            if name in self.groups:
                found |= {inner: (parameter.kind, option) for inner, option in described(self.groups[name]).items()}
            else:
                found[name] = (parameter.kind, Option.of(name.rstrip("_"), self.hints[name], parameter.default))
        return found

    @cached_property
    def hints(self) -> dict[str, Any]:
        return get_type_hints(self.function, include_extras=True)

    @cached_property
    def groups(self) -> dict[str, type]:
        """The parameters that are dataclasses."""
        return {name: kind for name, kind in self.hints.items() if is_group(kind)}

    def of_kind(self, *kinds: Any) -> list[Option]:
        return [option for kind, option in self.parameters.values() if kind in kinds]

    @property
    def positionals(self) -> list[Option]:
        return self.of_kind(inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

    @property
    def rest(self) -> Option | None:
        """The parameter that takes any number of further words."""
        return next(iter(self.of_kind(inspect.Parameter.VAR_POSITIONAL)), None)

    @cached_property
    def options(self) -> dict[str, Option]:
        """The command's own options, as typed: --batch-size."""
        return {_typed(option): option for option in self.of_kind(inspect.Parameter.KEYWORD_ONLY)}

    @property
    def takes_run_options(self) -> bool:
        return bool(self.of_kind(inspect.Parameter.VAR_KEYWORD))

    @property
    def summary(self) -> str:
        """One sentence, without the example after it."""
        return re.sub(r": `mambacl [^`]*`$", "", " ".join((self.function.__doc__ or "").split("\n\n")[0].split()))

    @property
    def example(self) -> str:
        """The first call of the command that the docstring quotes."""
        found = re.search(rf"`(mambacl {self.name}\b[^`]*)`", " ".join((self.function.__doc__ or "").split()))
        return found[1] if found else ""

    @property
    def see(self) -> str:
        return f"See `mambacl {self.name} --help`."

    def __call__(self, arguments: Sequence[str]) -> int:
        """Returns the exit code, which is 0 if the function returns none."""
        words, given, overrides = self.read(arguments)
        if (processes := given.pop(GPUS, None)) is not None:
            from mambacl.cli.launching import launch

            return launch(self.name, arguments, processes)
        for name, kind in self.groups.items():
            given[name] = build(kind, {inner: given.pop(inner) for inner in options_of(kind) if inner in given})
        return self.function(*self._placed(words), **given, **overrides) or 0

    def read(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
        """The positional words, the command's options by parameter, and the run's options as a nested mapping."""
        words: list[str] = []
        given: dict[str, Any] = {}
        overrides: dict[str, Any] = {}
        left = list(arguments)
        names = {_typed(option): name for name, (_, option) in self.parameters.items()}
        while left:
            word = left.pop(0)
            if not word.startswith("-") or word == "-":
                words.append(word)
                continue
            typed, equals, value = word.partition("=")
            own = self.options.get(typed.replace("_", "-"))
            if own is None:
                key = self._run_option(typed)
                option = all_options(self.config).get(key) or Option(key, Any)
                value = value if equals else self._next(typed, option, left)
                overrides[key] = option.check(value, key, from_text=True)
            elif own.kind is bool:
                if equals:
                    raise UserError(f"{typed} takes no value: remove '={value}'. {self.see}")
                given[names[_typed(own)]] = True
            else:
                name, value = names[_typed(own)], value if equals else self._next(typed, own, left)
                given[name] = self._value(own, typed, value, given.get(name), left)
        return words, given, nested(overrides)

    def _next(self, typed: str, option: Option, left: list[str]) -> str:
        if not left or left[0].startswith("--"):
            takes = "" if option.kind is Any else f": {describe(option.kind)}"
            raise UserError(f"The option {typed} needs a value{takes}. {self.see}")
        return left.pop(0)

    def _value(self, option: Option, typed: str, value: str, before: Any, left: list[str]) -> Any:
        element = _element(option.kind)
        if element is None:
            return option.check(value, typed, from_text=True)
        values = [value]
        while get_origin(option.kind) is tuple and left and not left[0].startswith("-"):
            values.append(left.pop(0))
        one = Option(option.name, element, constraints=option.constraints)
        made = [one.check(each, typed, from_text=True) for each in values]
        return (*(before or ()), *made) if get_origin(option.kind) is tuple else [*(before or ()), *made]

    def _run_option(self, typed: str) -> str:
        """The dotted name of an option of the run. --audit-images and --audit_images are the same."""
        known = dict(all_options(self.config)) if self.takes_run_options else {}
        name = typed.lstrip("-")
        key = name.replace("-", "_")
        if typed.startswith("--") and key in known:
            if is_group(known[key].kind):
                raise UserError(
                    f"The option '{typed}' is a group: set {typed}.NAME. See `mambacl {self.name} --help {key}`."
                )
            return key
        group = key
        while typed.startswith("--") and "." in group:
            group = group.rpartition(".")[0]
            if group in known and is_mapping(known[group].kind):
                return group + name[len(group) :]  # such a group takes any name
        others = [option.removeprefix("--") for option in self.options] + list(known)
        raise UserError(f"There is no option '{typed}'.{suggestion(name, others, '--')} {self.see}")

    def _placed(self, words: list[str]) -> list[Any]:
        """The positional words, converted to the types of their parameters."""
        placed = []
        for option in self.positionals:
            if words:
                placed.append(option.check(words.pop(0), option.name.upper(), from_text=True))
            elif option.default is REQUIRED:
                raise UserError(f"mambacl {self.name} needs {option.name.upper()}, {option.text}. {self.see}")
            else:
                placed.append(option.default)
        if self.rest is not None:
            return placed + [self.rest.check(word, self.rest.name.upper(), from_text=True) for word in words]
        if words:
            raise UserError(f"mambacl {self.name} does not take '{words[0]}'. {self.see}")
        return placed


def described(group: type) -> dict[str, Option]:
    """The options of a dataclass, with their sentences as help texts."""

    def sentence(name: str) -> str:
        return sentences_of(group).get(name, "")

    return {name: replace(option, words=partial(sentence, name)) for name, option in options_of(group).items()}


def _typed(option: Option) -> str:
    return "--" + option.name.replace("_", "-")


def _element(kind: Any) -> Any:
    """The type of a list's or tuple's elements; None for other types."""
    for member in (kind, *get_args(kind)):
        if get_origin(member) in (list, tuple):
            return get_args(member)[0]
    return None
