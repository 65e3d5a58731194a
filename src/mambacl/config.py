"""A run's configuration: dataclasses, resolved from a preset, a file and options, and checked before any work starts.

Later layers override earlier ones: first the named setting and recipe, then the preset or file, after those that it
`extends`, then the user's options. What a layer holds for the chosen method under `for_method` follows it. A layer that
names a setting or a recipe starts from it and drops earlier changes to another. A layer that names another backbone
drops what earlier layers chose for theirs, and one that names another classifier its options.

None of this imports PyTorch, unless the user names another backbone than the preset's.
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
from mambacl.features import FeatureOptions
from mambacl.files import expanded, is_word
from mambacl.methods.registry import METHODS
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

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


def check_device(name: str) -> None:
    """Refuses a string that is not a device name; does not check whether the device exists."""
    Option.of("device", Device).check(name)


@dataclass(frozen=True)
class RunConfig(Options):
    """One run"""

    name: str = "run"
    """name of the run; default: the name of its preset, file or image folder"""
    method: str = "analytic"
    """continual-learning method; `mambacl methods` lists them"""
    backbone: str = "defocus_mamba_nano"
    """model to train; `mambacl models` lists them"""
    pretrained: bool | str = True
    """true for the model's default weights, the tag of others (`mambacl models` lists them), the path of a checkpoint,
    or a run's folder, for the backbone that it trained; false starts from random weights"""
    known_classes: bool = False
    """the checkpoint already knows the classes of the first task: use its classifier, train nothing in that task, and
    use its images only to find what to protect"""
    backbone_options: dict[str, Any] = field(default_factory=dict)
    """changes to the model's configuration"""
    setting: str = "paper"
    """null-space setting that `nullspace` starts from: paper, public-code, exact"""
    nullspace: Setting = field(default_factory=Setting)
    """how the null space is built and applied"""
    recipe: str = "paper"
    """recipe that `training` starts from: paper, public-code"""
    training: Recipe = field(default_factory=Recipe)
    """how one task is trained"""
    stream: StreamConfig = field(default_factory=StreamConfig)
    """which data, in which tasks"""
    options: dict[str, Any] = field(default_factory=dict)
    """the method's options"""
    classifier: str = "auto"
    """classifier: separate, cosine, nearest-mean or another; auto is the method's, which is separate heads in the
    paper"""
    classifier_options: dict[str, Any] = field(default_factory=dict)
    """the classifier's options"""
    features: FeatureOptions = field(default_factory=FeatureOptions)
    """what a classifier sees that is computed from features"""
    seed: Annotated[int, between(0, 2**63 - 1)] = 0
    """seed of the classifiers, the order of the images and their augmentation"""
    device: Device = "auto"
    """auto (cuda if available), cpu, cuda or cuda:N"""
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    """auto is bf16 on a GPU that supports it, else float32, and does not change during a run; tf32 uses TF32 for matrix
    products on a GPU; bf16 runs training and evaluation under autocast, with TF32 for what that leaves in float32; the
    scan, A, delta and the projection stay in float32"""
    fast: bool = True
    """on a GPU: fused kernels, steps recorded as CUDA graphs, images transformed on the GPU; false uses the plain twin
    of each"""
    shard: bool = False
    """with several processes, each keeps a part of the backbone's weights (FSDP2), for models that are too large for
    one GPU; slower"""
    share_steps: bool = False
    """with several processes, each projects a share of every step and sends it to the others"""
    audit_images: Annotated[int, at_least(0)] = 0
    """images per task to keep for the consistency audit (`mambacl audit RUN`)"""
    track: list[Tracker] = field(default_factory=list)
    """also log to tensorboard, wandb, mlflow or trackio"""
    out: str | None = None
    """run folder; default: runs/NAME-METHOD-SEED"""

    def check(self) -> None:
        if self.known_classes and self.pretrained is False:
            raise OptionError("{group}known_classes needs a checkpoint that knows the classes: set pretrained to it.")
        for name in ("name", "num_classes", "pretrained"):
            if name in self.backbone_options:
                raise OptionError(f"{{group}}backbone_options cannot contain '{name}', which the run sets: remove it.")

    @property
    def folder(self) -> Path:
        return Path(self.out) if self.out else Path("runs") / f"{self.name}-{self.method}-{self.seed}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def as_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False)


def resolve(source: str | Path | Mapping[str, Any] | RunConfig | None, overrides: Mapping[str, Any]) -> RunConfig:
    """The complete configuration, from a preset's name, a YAML file, a mapping or a configuration, and overrides."""
    first, *others = map(_with_given_rules, _with_method_options([*_layers(source), nested(overrides)]))
    values = {"setting": RunConfig.setting, "recipe": RunConfig.recipe, **first}
    for layer in others:
        dropped = [group for name, group in (("setting", "nullspace"), ("recipe", "training")) if name in layer]
        if layer.get("classifier", "auto") not in ("auto", values.get("classifier")):
            dropped.append("classifier_options")
        values = merge(_without(_for_backbone(values, layer), dropped), layer)
    named: dict[str, Any] = {}
    if isinstance(values["setting"], str):
        named["nullspace"] = dataclasses.asdict(setting_named(values["setting"]))
    if isinstance(values["recipe"], str):
        named["training"] = dataclasses.asdict(recipe_named(values["recipe"]))
    config = _with_absolute_paths(from_dict(merge(named, values)))
    own_images = config.stream.dataset in ("folders", "domain-folders")
    if config.name in ("run", "images") and own_images and config.stream.root is not None:
        # so that runs on different folders have different names
        return dataclasses.replace(config, name=Path(config.stream.root).name)
    return config


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Checks names, types and values. Missing options, as in a folder of an earlier version, get their defaults."""
    return build(RunConfig, values, from_text=True)


def _with_method_options(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts what a layer holds under `for_method` for the chosen method into a layer behind it. A layer with options of
    Mamba-CL that names no method chooses Mamba-CL instead of the default method, which would ignore them."""
    method, made = RunConfig.method, []
    for layer in layers:
        if method == RunConfig.method and any(name in layer for name in ("setting", "nullspace", "recipe")):
            layer.setdefault("method", "mamba-cl")
        method = layer.get("method", method)
    for layer in layers:
        by_method = layer.pop("for_method", {})
        if not isinstance(by_method, Mapping) or not all(isinstance(entry, Mapping) for entry in by_method.values()):
            raise UserError("for_method takes the options of each method: `for_method: {sequential: {training: ...}}`.")
        for name in by_method:
            METHODS.check(str(name))
        chosen = [nested(options) for name, options in by_method.items() if name == method]
        made += [layer, *chosen]
    return made


def _with_given_rules(layer: Mapping[str, Any]) -> dict[str, Any]:
    rules = layer.get("nullspace")
    return {**layer, "nullspace": given_rules(rules)} if isinstance(rules, Mapping) else dict(layer)


def _for_backbone(base: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """If a layer names another backbone, drops what was chosen for the old one: its weights, its options, the blocks to
    fine-tune, and the image size if the new one's differs. The new one starts from its public weights, if it has any.
    Looks up only what the layer does not set, so that a preset can name a backbone without importing PyTorch."""
    name = layer.get("backbone")
    own = base.get("backbone", RunConfig.backbone)
    if not isinstance(name, str) or name == own:
        return base
    dropped = ["pretrained", "backbone_options", "nullspace.blocks"]
    transforms, given = _part(base, "stream", "transforms"), _part(layer, "stream", "transforms")
    sizes = ("image_size", "resize")
    chosen = [key for key in sizes if transforms.get(key) is not None and key not in given]
    if chosen or "resize" in _part(transforms, "covariance"):
        before = _input_size(own, _part(base, "backbone_options"))
        if before is None or before != _input_size(name, _part(layer, "backbone_options")):
            dropped += [f"stream.transforms.{key}" for key in (*sizes, "covariance.resize")]
    base = _without(base, dropped)
    if "pretrained" not in layer:
        from mambacl.backbones.registry import MODELS

        if not MODELS.get(name).weights:
            base["pretrained"] = False
    return base


def _part(values: Any, *keys: str) -> Mapping[str, Any]:
    """A group of options; empty if missing or of the wrong type, which is reported later."""
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
    """The shape of a model's images; None if the model cannot be built on the meta device. Building the real model
    reports the error."""
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
    """So that a run can be resumed from any folder."""
    changes: dict[str, Any] = {}
    if config.stream.root is not None:
        root = str(expanded(config.stream.root).absolute())
        changes["stream"] = dataclasses.replace(config.stream, root=root)
    given = config.pretrained
    # a word is a tag, unless it is the name of a run's folder
    if isinstance(given, str) and (not is_word(given) or (Path(given) / "config.yaml").is_file()):
        changes["pretrained"] = str(expanded(given).absolute())
    return dataclasses.replace(config, **changes)


def preset_names() -> list[str]:
    folder = files("mambacl") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _layers(source: str | Path | Mapping[str, Any] | RunConfig | None) -> list[dict[str, Any]]:
    if isinstance(source, RunConfig):
        return [source.as_dict()]
    if isinstance(source, Mapping):
        return _with_extended(nested(source), Path(), ())
    return [{}] if source is None else _read_layers(source, Path(), ())


def _read_layers(source: str | Path, folder: Path, above: tuple[str, ...]) -> list[dict[str, Any]]:
    """The layers of a shipped preset, by name, or of a YAML file, by path; those that it extends come first. A run has
    the name of its preset or file, unless that sets another. `folder` is that of the file that names the source;
    `above` are the files that extend it."""
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
            raise UserError(f"{path} cannot be read ({error}): write it as UTF-8 text.") from None
    if where in above:
        raise UserError(f"{where} extends itself through {', '.join(above)}: remove one `extends`.")
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
        raise UserError(f"{where} must contain options, one 'name: value' per line.")
    return contents or {}
