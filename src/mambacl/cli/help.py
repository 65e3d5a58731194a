"""Prints the help of a command, or of a group of a run's options: `mambacl train --help training`."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import TextWrapper
from typing import Any, Literal, get_args, get_origin

from mambacl.cli.command import Command, all_options
from mambacl.config import RunConfig, preset_names
from mambacl.options import REQUIRED, Option, build, describe, is_group, is_mapping, options_of, sentences_of
from mambacl.registry import Registry, unknown

COLUMN = 20
PLACEHOLDERS = {int: "N", float: "X", str: "NAME", Path: "PATH"}
RUN, ALL = "run", "all"


def wrap(text: str, indent: str = "", further: str | None = None, taken: int = 0) -> list[str]:
    """Wraps a paragraph; leaves `taken` columns free."""
    width = max(80, min(120, shutil.get_terminal_size((100, 24)).columns)) - taken
    wide = TextWrapper(width, initial_indent=indent, subsequent_indent=further or indent, break_on_hyphens=False)
    return wide.wrap(" ".join(text.split()))


def command_help(command: Command, arguments: Sequence[str], below: Sequence[Command] = ()) -> str:
    """`below` are the commands whose names begin with this command's, such as `bench against`."""
    place = next(place for place, word in enumerate(arguments) if word in ("-h", "--help"))
    topic = arguments[place + 1] if len(arguments) > place + 1 else ""
    if command.takes_run_options and topic and not topic.startswith("-"):
        return group_help(command, topic.replace("-", "_"), arguments)
    words = [option.name.upper() if option.default is REQUIRED else f"[{option.name.upper()}]"
             for option in command.positionals]  # fmt: skip
    words += [f"[{command.rest.name.upper()} ...]"] if command.rest else []
    words += ["[--OPTION VALUE ...]"] if command.options or command.takes_run_options else []
    summary, more = command.summary, (command.function.__doc__ or "").partition("\n\n")[2]
    lines = [f"usage: mambacl {command.name} {' '.join(words)}".rstrip()]
    lines += [f"example: {command.example}"] if command.example else []
    lines += ["", *wrap(summary[0].upper() + summary[1:] + "."), ""]
    lines += [*wrap(more), ""] if more else []
    for option in [*command.positionals, *([command.rest] if command.rest else [])]:
        lines += _row(option.name.upper(), option.text)
    for typed, option in command.options.items():
        shown = _default(option.default) if option.default or (option.default == 0 and option.kind is not bool) else ""
        lines += _row(f"{typed} {_placeholder(option.kind)}".rstrip(), option.text + shown)
    if below:
        lines += ["", "Commands with other options:", *(line for c in below for line in _row(c.name, c.summary))]
    if command.name == "train" or command.config is not RunConfig:
        where = f"`mambacl {command.name} --help GROUP` lists one, `--help all` lists all"
        lines += ["", f"Options of the run, by group ({where}):", *_groups(command.config)]
    if command.name == "train":
        lines += wrap(f"Presets: {', '.join(preset_names())}.", further="  ")  # all within 24 lines
    return "\n".join(lines).rstrip()


def group_help(command: Command, topic: str, arguments: Sequence[str] = ()) -> str:
    """The options of a group, each with its type, default and meaning. For a method's or model's options, `arguments`
    can name the method or model."""
    config, known = command.config, all_options(command.config)
    if topic in _mappings(config):
        return _foreign(command, topic, arguments)
    if topic == ALL:
        mappings = [_mapping(command, name) for name in ("options", "backbone_options") if name in known]
        return "\n\n".join([*(group_help(command, name) for name in _group_names(config)), *mappings])
    if topic == RUN:
        return "\n".join([f"{RUN}: options outside the other groups.", *_option_lines(config(), "")])
    if topic in known and not is_group(known[topic].kind):
        return "\n".join(_option(topic, known[topic], _sentence(config, topic)))
    if topic not in known:
        raise unknown("group of options", topic, [*_group_names(config), *_mappings(config), ALL])
    kind = known[topic].kind
    value: Any = config()
    for part in topic.split("."):
        value = getattr(value, part)
    lines = [f"{topic}: {_summary(kind)}.", *_option_lines(value, f"{topic}.")]
    inner = [name for name, option in options_of(kind).items() if is_group(option.kind)]
    if inner:
        lines += ["", *wrap(f"Groups inside it: {', '.join(f'{topic}.{name}' for name in inner)}.")]
    return "\n".join(lines)


def _foreign(command: Command, topic: str, arguments: Sequence[str]) -> str:
    """The options of methods, classifiers or models, which need PyTorch."""
    lines = [_mapping(command, topic)]
    if topic in OWNERS:
        named = dict(pairwise(part for word in arguments for part in word.split("=", 1)))
        for name, value in _defaults(OWNERS[topic], named.get(OWNERS[topic])).items():
            rows = list(_option_lines(value, f"{topic}.", inner=True))
            lines += ["", f"{name}:" + ("" if rows else " none"), *rows]
    return "\n".join(lines)


def _defaults(option: str, name: str | None) -> dict[str, Any]:
    """The default options of the named method, classifier or model; without a name, of all methods or classifiers, or
    of the default model."""
    from mambacl.backbones.registry import MODELS
    from mambacl.classifiers import CLASSIFIERS
    from mambacl.methods import METHODS

    if option == "--backbone":
        entry = MODELS.get(name or RunConfig.backbone)
        return {entry.name: build(entry.config_class, entry.config)}
    registry: Registry[Any] = METHODS if option == "--method" else CLASSIFIERS
    return {known: registry.get(known).options_class() for known in ([name] if name else registry.names())}


OWNERS = {"options": "--method", "classifier_options": "--classifier", "backbone_options": "--backbone"}
"""for each mapping of options: the option that names their owner"""


def _mapping(command: Command, topic: str) -> str:
    listing = f"mambacl {command.name} {OWNERS.get(topic)} NAME --help {topic}"
    where = f"; `{listing}` lists them" if topic in OWNERS else ""
    return "\n".join(wrap(f"{topic}: {_sentence(command.config, topic)}{where}."))


def _option_lines(value: Any, group: str, inner: bool = False) -> Iterator[str]:
    """The options of a dataclass, whose values are the defaults; `inner` adds the options of groups inside it."""
    sentences = sentences_of(type(value))
    for name, option in options_of(type(value)).items():
        if not is_group(option.kind):
            option = dataclasses.replace(option, default=getattr(value, name))
            yield from _option(group + name, option, sentences.get(name, ""))
        elif inner:
            yield from _option_lines(getattr(value, name), f"{group}{name}.", inner)


def _option(name: str, option: Option, sentence: str) -> Iterator[str]:
    must = "".join(f", must {constraint.words}" for constraint in option.constraints)
    default = _default(option.default) if option.default is not REQUIRED else ""
    yield from wrap(f"--{name} {describe(option.kind)}{must}{default}", "  ", " " * 6)
    yield from wrap(sentence, " " * 6)


def _groups(config: type) -> list[str]:
    """One line per group; groups of the same type, such as those of the kinds of parameters, share a line. So do the
    options of method, classifier and model."""
    known, mappings = all_options(config), _mappings(config)
    names = [name for name, option in known.items() if "." not in name and not is_group(option.kind)]
    lines, seen = _row(RUN, ", ".join(name for name in names if name not in mappings)), set()
    for name, option in known.items():
        if is_group(option.kind) and option.kind not in seen:
            seen.add(option.kind)
            alike = [other for other, twin in known.items() if twin.kind is option.kind and other != name]
            also = f"; also {', '.join(other.rpartition('.')[2] for other in alike)}" if alike else ""
            summary = _summary(option.kind)
            lines += _row(name, summary[0].lower() + summary[1:] + also)
        elif name == "options":
            others = ", ".join(other for other in mappings if other != name)
            lines += _row(name, f"{_sentence(config, name)}; also {others}")
        elif name in mappings and "options" not in mappings:
            lines += _row(name, _sentence(config, name))
    return lines


def _group_names(config: type) -> list[str]:
    return [RUN, *(name for name, option in all_options(config).items() if is_group(option.kind))]


def _mappings(config: type) -> list[str]:
    return [name for name, option in all_options(config).items() if is_mapping(option.kind) and "." not in name]


def _sentence(config: type, name: str) -> str:
    group, _, last = name.rpartition(".")
    owner = all_options(config)[group].kind if group else config
    return sentences_of(owner).get(last, "")


def _summary(kind: type) -> str:
    return (kind.__doc__ or "").split(".")[0].strip()


def _row(left: str, words: str, column: int = COLUMN) -> list[str]:
    lines = wrap(words, taken=column + 2) or [""]
    first = [f"  {left}"] if len(left) >= column else []
    made = [f"  {'' if first or number else left:{column}}{line}" for number, line in enumerate(lines)]
    return [line.rstrip() for line in [*first, *made]]


def rows(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Names and what they mean, in two columns."""
    column = max(len(name) for name, _ in pairs) + 2
    return [line for name, words in pairs for line in _row(name, words, column)]


def _placeholder(kind: Any) -> str:
    if kind is bool:
        return ""
    member = next((member for member in get_args(kind) if get_origin(member) or member in PLACEHOLDERS), kind)
    if get_origin(member) is Literal:
        return "|".join(get_args(member))
    if get_origin(member) in (list, tuple):
        member = get_args(member)[0]
    return PLACEHOLDERS.get(member, "VALUE")


def _default(value: Any) -> str:
    return f" (default {value if isinstance(value, (str, Path)) else json.dumps(value, default=str)})"
