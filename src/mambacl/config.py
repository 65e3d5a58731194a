"""A run's configuration: dataclasses, resolved from a preset, a file and options, and checked before any work starts.

Later layers win over earlier ones: the named setting and recipe; the preset or file, after those that it `extends`;
then what was given by hand. A layer that names a setting or a recipe starts again from it: what earlier layers changed
in another is dropped. A layer that names another backbone drops what earlier ones chose for theirs.

PyTorch is not loaded for any of it, unless another backbone than the preset's is named.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from mambacl.data.config import StreamConfig
from mambacl.errors import UserError
from mambacl.files import expanded
from mambacl.nullspace.settings import Setting, given_rules, setting_named
from mambacl.options import (
    Must,
    Option,
    OptionError,
    Options,
    at_least,
    between,
    build,
    build_config,
    merge,
    nested,
    read_yaml,
)
from mambacl.registry import did_you_mean
from mambacl.training.recipe import Recipe, recipe_named

Device = Annotated[
    str, Must("be auto, cpu, cuda or cuda:N", lambda name: bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", name)))
]


def check_device(name: str) -> None:
    """Refuses what is no device's name; whether there is such a device is another question."""
    Option.of("device", Device).check(name)


@dataclass(frozen=True)
class RunConfig(Options):
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
    """how the null space is built and applied"""
    recipe: str = "paper"
    """named recipe that `training` starts from: paper, public-code"""
    training: Recipe = field(default_factory=Recipe)
    """how one task is trained"""
    stream: StreamConfig = field(default_factory=StreamConfig)
    """which data, in which tasks"""
    options: dict[str, Any] = field(default_factory=dict)
    """the method's options"""
    classifier: str = "auto"
    """what answers: separate, cosine, nearest-mean or another; auto is the method's own, in the paper separate heads"""
    classifier_options: dict[str, Any] = field(default_factory=dict)
    """that classifier's own options"""
    seed: Annotated[int, between(0, 2**63 - 1)] = 0
    """of the classifiers, the order of the images and their augmentation"""
    device: Device = "auto"
    """auto (cuda where there is one), cpu, cuda or cuda:N"""
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    """auto is bf16 on a GPU that has it, else float32, and a run keeps what it began with; tf32 takes matrix products
    on a GPU in TF32; bf16 runs training and evaluation under autocast, and what that leaves in float32 as tf32 does;
    the scan, A and delta stay in float32, and so does the projection"""
    fast: bool = True
    """on a GPU: fused kernels, recorded steps, images prepared there; false takes the plain twin of each"""
    audit_images: Annotated[int, at_least(0)] = 0
    """images of each task to keep for the consistency audit: `mambacl audit RUN`"""
    out: str | None = None
    """run folder; runs/NAME-METHOD-SEED if empty"""

    def check(self) -> None:
        if self.known_classes and self.pretrained is False:
            raise OptionError("{group}known_classes needs a model that knows them: set pretrained to its checkpoint.")
        for name in ("name", "num_classes", "pretrained"):
            if name in self.backbone_options:
                raise OptionError(f"{{group}}backbone_options cannot hold '{name}': it is set by the run itself.")

    @property
    def folder(self) -> Path:
        return Path(self.out) if self.out else Path("runs") / f"{self.name}-{self.method}-{self.seed}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def as_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False)


def resolve(source: str | Path | Mapping[str, Any] | RunConfig | None, overrides: Mapping[str, Any]) -> RunConfig:
    """The whole configuration, from a preset's name, a YAML file, a mapping or another configuration, and overrides."""
    first, *others = map(_with_given_rules, [*_layers(source), nested(overrides)])
    values = {"setting": RunConfig.setting, "recipe": RunConfig.recipe, **first}
    for layer in others:
        values = _with_layer(values, layer)
    named: dict[str, Any] = {}
    if isinstance(values["setting"], str):
        named["nullspace"] = dataclasses.asdict(setting_named(values["setting"]))
    if isinstance(values["recipe"], str):
        named["training"] = dataclasses.asdict(recipe_named(values["recipe"]))
    config = _with_absolute_paths(from_dict(merge(named, values)))
    own_images = config.stream.dataset in ("folders", "domain-folders")
    if config.name in ("run", "images") and own_images and config.stream.root is not None:
        return dataclasses.replace(config, name=Path(config.stream.root).name)  # runs of several folders keep apart
    return config


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Checks names, types and values; what is missing, as in a folder of an earlier version, has its default."""
    return build(RunConfig, values, from_text=True)


def _with_given_rules(layer: Mapping[str, Any]) -> dict[str, Any]:
    rules = layer.get("nullspace")
    return {**layer, "nullspace": given_rules(rules)} if isinstance(rules, Mapping) else dict(layer)


def _with_layer(values: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    values = _for_backbone(values, layer)
    dropped = [group for name, group in (("setting", "nullspace"), ("recipe", "training")) if name in layer]
    return merge(_without(values, dropped), layer)


def _for_backbone(base: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen for a backbone is dropped when another one is named: its weights, its options, the blocks to
    fine-tune, and the image size where the other's own differs. The other starts from its public weights, if it has
    any. What the layer says itself need not be looked up, so that a preset may name a backbone without PyTorch."""
    name = layer.get("backbone")
    own = base.get("backbone", RunConfig.backbone)
    if not isinstance(name, str) or name == own:
        return base
    dropped = ["pretrained", "backbone_options", "nullspace.blocks"]
    transforms, said = _part(base, "stream", "transforms"), _part(layer, "stream", "transforms")
    sizes = ("image_size", "resize")
    chosen = [key for key in sizes if transforms.get(key) is not None and key not in said]
    if chosen or "resize" in _part(transforms, "covariance"):
        before = _input_size(own, _part(base, "backbone_options"))
        if before is None or before != _input_size(name, _part(layer, "backbone_options")):
            dropped += [f"stream.transforms.{key}" for key in (*sizes, "covariance.resize")]
    base = _without(base, dropped)
    if "pretrained" not in layer:
        from mambacl.backbones.registry import MODELS

        if MODELS.get(name).weights is None:
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


def preset_names() -> list[str]:
    folder = files("mambacl") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read_preset(source: str | Path) -> list[dict[str, Any]]:
    """The layers of a shipped preset, by name, or of a YAML file, by path: first those that it extends. A run is called
    after its preset or file unless that says otherwise."""
    return _read_layers(source, Path(), ())


def _layers(source: str | Path | Mapping[str, Any] | RunConfig | None) -> list[dict[str, Any]]:
    if isinstance(source, RunConfig):
        return [source.as_dict()]
    if isinstance(source, Mapping):
        return _with_extended(nested(source), Path(), ())
    return [{}] if source is None else read_preset(source)


def _read_layers(source: str | Path, folder: Path, above: tuple[str, ...]) -> list[dict[str, Any]]:
    """`folder`: of the file that names the source; `above`: what has led here."""
    names = preset_names()
    if str(source) in names:
        where, name, inside = str(source), str(source), folder
        text = (files("mambacl") / "presets" / f"{source}.yaml").read_text(encoding="utf-8")
    else:
        path = folder / expanded(source)
        where, name, inside = str(path), path.stem, path.parent
        if not path.is_file():
            hint = did_you_mean(str(source), names)
            raise UserError(f"'{source}' is neither a preset nor a file.{hint} Presets: {', '.join(names)}.")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read ({error}).") from None
    if where in above:
        raise UserError(f"{where} extends itself, by way of {', '.join(above)}: remove one `extends`.")
    return _with_extended({"name": name, **nested(parse_yaml(text, where))}, inside, (*above, where))


def _with_extended(layer: dict[str, Any], folder: Path, above: tuple[str, ...]) -> list[dict[str, Any]]:
    other = layer.pop("extends", None)
    if other is None:
        return [layer]
    if not isinstance(other, (str, Path)):
        raise UserError(f"extends takes the name of a preset or the path of a file, got {other!r}.")
    return [*_read_layers(other, folder, above), layer]


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    try:
        contents = read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        line = f", line {place.line + 1}" if place else ""
        raise UserError(f"{where}{line} is not valid YAML: {getattr(error, 'problem', error)}.") from None
    if contents is not None and not isinstance(contents, dict):
        raise UserError(f"{where} must hold options, one 'name: value' per line.")
    return contents or {}
