"""Which runs a sweep has: its file names presets, methods, seeds and values of options.

    name: rates                             # the folder is runs/rates; default: the file's name
    presets: [demo]                         # presets or YAML files with options
    methods: [mamba-cl, sequential]         # default: the preset's
    seeds: [0, 1, 2]
    grid: {training.lr: [2e-4, 6e-4]}       # any option of a run, each with its values
    options: {training.passes: 3}           # of every run
    runs: [{method: analytic}]              # further runs, each with its own options

Everything is checked while the plan is made, without PyTorch, except what only PyTorch's modules know: see `checks`.
"""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml

from mambacl.classifiers.registry import CLASSIFIERS
from mambacl.config import RunConfig, parse_yaml, preset_names, resolve
from mambacl.errors import UserError
from mambacl.files import expanded
from mambacl.methods.registry import METHODS
from mambacl.options import Must, Options, build, merge, nested
from mambacl.training.identity import flatten

SWEEP = "sweep.yaml"  # in the sweep's folder: the file, with the options of the command line
LONGEST = 120  # letters of a run's name
SETS = {
    "out": "the sweep has a folder per run",
    "name": "a run has the name of its preset",
    "extends": "name the file under presets",
}
OF_THE_FILE = {"seed": "list them under seeds", "method": "list them under methods", **SETS}

Word = Must("be a word of letters, digits, dots, underscores and hyphens", lambda name: is_name(name))
Seeds = Must("be whole numbers from 0 on", lambda seeds: bool(seeds) and all(0 <= seed < 2**63 for seed in seeds))


def is_name(text: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*", text) is not None


@dataclass(frozen=True)
class SweepFile(Options):
    """The file of a sweep."""

    name: Annotated[str | None, Word] = None
    """of the sweep and its folder, runs/NAME; default: the file's name"""
    presets: list[str] = field(default_factory=list)
    """presets, or YAML files with options"""
    methods: list[str] = field(default_factory=list)
    """methods; default: that of each preset"""
    seeds: Annotated[list[int], Seeds] = field(default_factory=lambda: [0])
    """seeds of the runs"""
    grid: dict[str, Any] = field(default_factory=dict)
    """options, each with a list of values: every combination is a run"""
    options: dict[str, Any] = field(default_factory=dict)
    """options of every run"""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """further runs: options, and preset, method and seed; for what an entry lacks, see `presets` and `seeds`"""


@dataclass(frozen=True)
class PlannedRun:
    key: str
    """the name of its folder"""
    config: RunConfig

    @property
    def folder(self) -> Path:
        return self.config.folder


@dataclass(frozen=True)
class Plan:
    name: str
    folder: Path
    runs: tuple[PlannedRun, ...]
    text: str = ""
    """the file that describes it, as sweep.yaml; empty for runs that no file describes"""


def read(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any], out: Path | None = None) -> Plan:
    """The runs of a sweep's file, of the folder of an earlier sweep, or of a mapping. `overrides` are further options
    of every run."""
    if isinstance(source, Mapping):
        where, inside, content = "The sweep", Path(), {"name": "sweep", **source}
    else:
        path = expanded(source)
        if path.is_dir():
            path, out = path / SWEEP, path if out is None else out
        where, inside = str(path), path.parent
        content = {"name": path.stem, **parse_yaml(_text(path), where)}
    try:
        spec = build(SweepFile, content)
        grid = _grid(spec.grid)
        options = _without_own(merge(nested(spec.options), _without_own(overrides, "The command line")), "options")
        if twice := [name for name in flatten(options) if any(_same(name, other) for other in grid)]:
            raise UserError(f"{twice[0]} is in grid, and also one of the options of every run: remove one.")
        if not spec.presets and not spec.runs:
            raise UserError("there are no presets, and so no runs: name some, as in `presets: [demo]`.")
        entries = list(_entries(spec, grid))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    name = spec.name or "sweep"
    folder = Path("runs") / name if out is None else out
    runs: dict[str, RunConfig] = {}
    for place, preset, own, label in entries:
        try:
            key, config = _configured(_preset(preset, inside), merge(options, nested(own)), label, folder)
        except UserError as error:
            raise UserError(f"{where}{place}: {error}") from None
        if key in runs and runs[key].as_dict() != config.as_dict():  # two values look the same in a name
            key = f"{key}-{_digest(config)}"
            config = dataclasses.replace(config, out=str(folder / key))
        runs[key] = config
    text = {**content, "name": name, "options": options, "presets": [_kept(preset, inside) for preset in spec.presets]}
    text["runs"] = [{**e, **({"preset": _kept(e["preset"], inside)} if "preset" in e else {})} for e in spec.runs]
    shown = yaml.safe_dump({key: value for key, value in text.items() if value}, sort_keys=False)
    return Plan(name, folder, tuple(PlannedRun(key, config) for key, config in runs.items()), shown)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no file {path}: write one that names presets, methods, seeds and options.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): write it as UTF-8 text.") from None


def _without_own(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Refuses options that the sweep itself sets."""
    for name, remedy in OF_THE_FILE.items():
        if name in options:
            raise UserError(f"{where} cannot set {name}: {remedy}.")
    return dict(options)


def _grid(given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values of each option, by dotted name."""
    grid = flatten(given)
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"grid.{name} takes a list of values, got {json.dumps(values, default=str)}.")
    _without_own({name.partition(".")[0]: None for name in grid}, "grid")
    return grid


def _same(name: str, other: str) -> bool:
    """Whether two dotted names mean the same option, or one the other's group."""
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")


def points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations of the values."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _entries(spec: SweepFile, grid: Mapping[str, list[Any]]) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """For each run: its place in the file, its preset, its own options, and the words for them in its name."""
    if spec.methods or spec.grid or not spec.runs:
        methods = [{"method": method} for method in spec.methods] or [{}]
        for preset, method, point, seed in itertools.product(spec.presets, methods, points(grid), spec.seeds):
            yield "", preset, {**point, **method, "seed": seed}, label_of(point)
    for number, entry in enumerate(spec.runs, start=1):
        own = {key: value for key, value in entry.items() if key not in ("preset", "seed")}
        for name, remedy in SETS.items():
            if name in own:
                raise UserError(f"run {number} under runs cannot set {name}: {remedy}.")
        if "preset" not in entry and not spec.presets:
            raise UserError(f"run {number} under runs names no preset, and there are no presets: add `preset: NAME`.")
        label = label_of({name: value for name, value in flatten(own).items() if name != "method"})
        presets = [entry["preset"]] if "preset" in entry else spec.presets
        seeds = [entry["seed"]] if "seed" in entry else spec.seeds
        for preset, seed in itertools.product(presets, seeds):
            yield f", run {number} under runs", str(preset), {**own, "seed": seed}, label


def _configured(preset: str, options: dict[str, Any], label: str, folder: Path) -> tuple[str, RunConfig]:
    config = checked(resolve(preset, options))
    key = f"{config.name}-{config.method}{label}-{config.seed}"
    return key, dataclasses.replace(config, out=str(folder / key))


def checked(config: RunConfig) -> RunConfig:
    """Refuses names that a run would refuse, without importing PyTorch."""
    METHODS.check(config.method)
    if config.classifier != "auto":
        CLASSIFIERS.check(config.classifier)
    return config


def _preset(name: str, inside: Path) -> str:
    """A file is relative to the sweep's file."""
    path = inside / expanded(name)
    return name if name in preset_names() or not path.is_file() else str(path)


def _kept(name: str, inside: Path) -> str:
    """As it is written down: files with their whole path."""
    found = _preset(str(name), inside)
    return str(Path(found).absolute()) if found != name or Path(found).is_file() else found


# The names of runs


def label_of(point: Mapping[str, Any]) -> str:
    """The words for some options in a run's name, as in -lr=0.001; an option is shortened to its last word if that is
    the only one."""
    tails = [name.rpartition(".")[2] for name in point]
    words = [
        f"-{tail if tails.count(tail) == 1 else name}={_word(value)}"
        for (name, value), tail in zip(point.items(), tails, strict=True)
    ]
    label = "".join(words)
    return label if len(label) <= LONGEST else f"-{hashlib.sha256(label.encode()).hexdigest()[:12]}"


def _word(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "+".join(map(_word, value)) or "none"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.") or "none"


def _digest(config: RunConfig) -> str:
    text = json.dumps({**config.as_dict(), "out": None}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
