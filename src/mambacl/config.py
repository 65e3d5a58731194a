"""A run's configuration: dataclasses, resolved from a preset, a file and options, and checked before any work starts.

Later sources win over earlier ones: the named setting and recipe, the preset or file, then what was given by hand.
Naming a setting or a recipe starts anew from it: what an earlier source changed in another is dropped.

PyTorch is not loaded for any of it, unless another backbone than the preset's is named.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from mambacl.errors import UserError
from mambacl.nullspace.settings import Setting, given_rules, setting_named
from mambacl.options import build_config, merge
from mambacl.paths import expanded
from mambacl.registry import did_you_mean
from mambacl.streams.config import StreamConfig
from mambacl.training.recipe import Recipe, recipe_named

set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass(frozen=True)
class RunConfig:
    """One run"""

    name: str = "run"
    """what the run is called: its preset's, file's or image folder's name"""
    method: str = "mamba-cl"
    """continual-learning method; `mambacl methods` lists them"""
    backbone: str = "defocus_mamba_nano"
    """model to teach; `mambacl models` lists them"""
    pretrained: bool | str = True
    """true for the public weights of that model, or the path of a checkpoint; false starts from random weights"""
    known_classes: bool = False
    """the checkpoint already tells the first task's classes apart: its classifier is taken over, nothing is trained in
    that task, and its images only show what to protect"""
    backbone_options: dict[str, Any] = field(default_factory=dict)
    """changes to the model's configuration"""
    setting: str = "paper"
    """named null-space setting that `nullspace` starts from: paper, public-code, exact"""
    nullspace: Setting = field(default_factory=Setting)
    """the null space"""
    recipe: str = "paper"
    """named recipe that `training` starts from: paper, public-code"""
    training: Recipe = field(default_factory=Recipe)
    """training"""
    stream: StreamConfig = field(default_factory=StreamConfig)
    """the stream of tasks"""
    options: dict[str, Any] = field(default_factory=dict)
    """the method's own options"""
    classifier: str = "auto"
    """what answers: separate, cosine, nearest-mean or another; auto is the method's own, in the paper separate heads"""
    classifier_options: dict[str, Any] = field(default_factory=dict)
    """that classifier's own options"""
    seed: int = 0
    """of the classifiers, the order of the images and their augmentation"""
    device: str = "auto"
    """auto (cuda where there is one), cpu, cuda or cuda:N"""
    precision: Literal["auto", "float32", "tf32", "bf16"] = "float32"
    """auto is bf16 on a GPU that has it, else float32, and a run keeps what it began with; tf32 takes matrix products
    on a GPU in TF32; bf16 runs training and evaluation under autocast, and what that leaves in float32 as tf32 does;
    the scan, A and delta stay in float32, and so does the projection"""
    fast: bool = True
    """on a GPU: fused kernels, recorded steps, images prepared there; false takes the plain twin of each"""
    audit_images: int = 0
    """images of each task to keep for the consistency audit: `mambacl audit RUN`"""
    out: str | None = None
    """run folder; runs/NAME-METHOD-SEED if empty"""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed must not be negative, nor above 2^63 - 1, got {self.seed}.")
        if self.audit_images < 0:
            raise UserError(f"audit_images must not be negative, got {self.audit_images}.")
        if self.pretrained is None:
            raise UserError("pretrained is true, false or the path of a checkpoint.")
        if self.known_classes and self.pretrained is False:
            raise UserError("known_classes needs a model that knows them: set pretrained to its checkpoint.")
        for name in ("name", "num_classes", "pretrained"):
            if name in self.backbone_options:
                raise UserError(f"backbone_options cannot hold '{name}': it is set by the run itself.")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise UserError(f"device must be auto, cpu, cuda or cuda:N, got '{self.device}'.")

    @property
    def folder(self) -> Path:
        return Path(self.out) if self.out else Path("runs") / f"{self.name}-{self.method}-{self.seed}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def as_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False)


def build_parser(prog: str = "mambacl train") -> ArgumentParser:
    """A parser with an option for each field of `RunConfig`."""
    parser = ArgumentParser(prog=prog, exit_on_error=False, allow_abbrev=False)
    parser.add_class_arguments(RunConfig)
    return parser


@cache
def _parser() -> ArgumentParser:
    """For values that are at hand already: one serves all, and building it takes a quarter of a second."""
    return build_parser()


def resolve(source: str | Path | Mapping[str, Any] | RunConfig | None, overrides: Mapping[str, Any]) -> RunConfig:
    """The whole configuration, from a preset's name, a YAML file, a mapping or another configuration, and overrides."""
    if isinstance(source, RunConfig):
        base: Mapping[str, Any] = source.as_dict()
    elif isinstance(source, Mapping):
        base = source
    elif source is None:
        base = {}
    else:
        base = read_preset(source)
    base = _for_backbone(_nested(base), _nested(overrides))
    values: dict[str, Any] = {}
    for layer in ({"setting": "paper", "recipe": "paper"}, base, overrides):
        values = _with_layer(values, _nested(layer))
    config = _with_absolute_paths(from_dict(values))
    own_images = config.stream.dataset in ("folders", "domain-folders")
    if config.name in ("run", "images") and own_images and config.stream.root is not None:
        return dataclasses.replace(config, name=Path(config.stream.root).name)  # runs of several folders keep apart
    return config


def _for_backbone(base: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What a preset chose for its own backbone is dropped when another one is named: its weights, its options, the
    blocks to fine-tune, and the image size where the other's own differs. The other starts from its public weights, if
    it has any."""
    name = overrides.get("backbone")
    if not isinstance(name, str) or name == base.get("backbone", RunConfig.backbone):
        return base
    from mambacl.backbones.registry import MODELS

    dropped = ["pretrained", "backbone_options", "nullspace.blocks"]
    sizes = ("image_size", "resize")
    if any(_part(base, "stream", "transforms").get(key) is not None for key in sizes):
        own = _input_size(base.get("backbone", RunConfig.backbone), _part(base, "backbone_options"))
        if own is None or own != _input_size(name, _part(overrides, "backbone_options")):
            dropped += [f"stream.transforms.{key}" for key in (*sizes, "covariance.resize")]
    base = _without(base, dropped)
    if "pretrained" not in overrides and MODELS.get(name).weights is None:
        base["pretrained"] = False
    return base


def _part(values: Any, *keys: str) -> Mapping[str, Any]:
    """A group of options, empty where there is none; one of the wrong kind is refused later, by name."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values if isinstance(values, Mapping) else {}


def _without(values: Mapping[str, Any], dropped: Iterable[str], prefix: str = "") -> dict[str, Any]:
    return {
        key: _without(value, dropped, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in values.items()
        if prefix + key not in dropped
    }


def _input_size(name: str, options: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of the images a model is made for; None where it cannot be built without values, for any reason: what
    is wrong with it is said when it is built in earnest."""
    import torch

    from mambacl.backbones.registry import MODELS

    try:
        entry = MODELS.get(name)
        with torch.device("meta"):
            model: Any = entry.build(build_config(entry.config_class, merge(entry.config, options), name))
        return tuple(model.default_cfg["input_size"])
    except Exception:
        return None


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """So that a run can be continued from any folder."""
    changes: dict[str, Any] = {}
    if config.stream.root is not None:
        root = str(expanded(config.stream.root).absolute())
        changes["stream"] = dataclasses.replace(config.stream, root=root)
    if isinstance(config.pretrained, str):
        changes["pretrained"] = str(expanded(config.pretrained).absolute())
    return dataclasses.replace(config, **changes)


def _with_layer(values: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(layer.get("setting"), str):
        values = {**values, "nullspace": dataclasses.asdict(setting_named(layer["setting"]))}
    if isinstance(layer.get("recipe"), str):
        values = {**values, "training": dataclasses.asdict(recipe_named(layer["recipe"]))}
    if isinstance(layer.get("nullspace"), Mapping):
        layer = {**layer, "nullspace": given_rules(layer["nullspace"])}
    return merge(values, layer)


def _nested(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with dots, as in {"training.lr": 1e-3}, become nested mappings; dataclasses become mappings, too."""
    nested: dict[str, Any] = {}
    for key, value in layer.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        elif isinstance(value, Mapping):
            value = _nested(value)
        elif isinstance(value, Path):
            value = str(value)
        for part in reversed(str(key).split(".")[1:]):
            value = {part: value}
        nested = merge(nested, {str(key).split(".")[0]: value})
    return nested


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Checks names, types and values."""
    _check_names(values, RunConfig, "")
    parser = _parser()
    try:
        parsed = parser.parse_object(dict(values))
        built = parser.instantiate(parsed)
        return RunConfig(**{f.name: built[f.name] for f in dataclasses.fields(RunConfig)})
    except ArgumentError as error:
        raise readable(error) from None


def _check_names(values: Mapping[str, Any], config_class: type, prefix: str) -> None:
    fields = {f.name: f.type for f in dataclasses.fields(config_class)}
    for key, value in values.items():
        if key not in fields:
            known = ", ".join(prefix + name for name in fields)
            raise UserError(f"There is no option '{prefix}{key}'.{did_you_mean(key, fields)} Known: {known}.")
        kind = fields[key]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise UserError(f"The option '{prefix}{key}' is a group: set {prefix}{key}.NAME, not {value!r} itself.")
            _check_names(value, kind, f"{prefix}{key}.")


def readable(error: Exception) -> UserError:
    """One sentence out of the parser's several lines."""
    text = str(error)
    key = re.search(r'Parser key "([^"]+)"', text)
    value = re.search(r"(?:Got|Given) value: (.*)", text)
    if not key or not value:
        return UserError(" ".join(text.split()))
    subtypes = re.search(r"Subtypes: \[(.*)\]", text) or re.search(r"Expected an? (.*?)\. Got", text)
    expected = (
        re.sub(r"<class '([\w.]+)'>|typing\.|NoneType", lambda m: m.group(1) or "", subtypes.group(1))
        if subtypes
        else ""
    )
    expected = re.sub(r"dict\[[^\]]*\]", "a mapping", expected, flags=re.IGNORECASE)
    expected = re.sub(r"Literal\[([^\]]*)\]", lambda m: "one of " + m.group(1).replace("'", ""), expected)
    expected = ", ".join(part for part in expected.split(", ") if part) or "another kind of value"
    return UserError(f"The option {key.group(1)} takes {expected}, got '{value.group(1).strip()}'.")


def preset_names() -> list[str]:
    folder = files("mambacl") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read_preset(source: str | Path) -> dict[str, Any]:
    """A shipped preset by name, or a YAML file by path. The run is called after it unless it says otherwise."""
    names = preset_names()
    if str(source) in names:
        text = (files("mambacl") / "presets" / f"{source}.yaml").read_text(encoding="utf-8")
        return {"name": str(source), **parse_yaml(text, str(source))}
    path = Path(source)
    if not path.is_file():
        hint = did_you_mean(str(source), names)
        raise UserError(f"'{source}' is neither a preset nor a file.{hint} Presets: {', '.join(names)}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}).") from None
    return {"name": path.stem, **parse_yaml(text, str(path))}


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    try:
        contents = yaml.load(text, Loader=_Loader)
        json.dumps(contents, default=str)  # refuses what refers to itself
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        line = f", line {place.line + 1}" if place else ""
        raise UserError(f"{where}{line} is not valid YAML: {getattr(error, 'problem', error)}.") from None
    if contents is not None and not isinstance(contents, dict):
        raise UserError(f"{where} must hold options, one 'name: value' a line.")
    return contents or {}


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as everybody expects."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$|^[-+]?\d[\d_]*\.[\d_]*$|^[-+]?\.\d[\d_]*$"),
    list("-+0123456789."),
)
