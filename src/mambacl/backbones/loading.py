"""`create_model`; loads weights from a file into a model, and reports what happened to each tensor."""

import os
import zipfile
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mambacl.backbones.registry import MODELS, ModelEntry
from mambacl.backbones.unpickling import find_state_dict, read_checkpoint
from mambacl.errors import UserError
from mambacl.files import download, is_word, replacing
from mambacl.log import logger
from mambacl.options import build_config, merge


def create_model(
    name: str, pretrained: bool | str | Path = False, *, num_classes: int | None = None, **config: Any
) -> nn.Module:
    """Creates a backbone by name.

    `pretrained`: True for this model's default weights, the tag of others (`mambacl models` lists them), or the path of
    a checkpoint (.safetensors or a public .pth). `num_classes`: 0 for no classifier (the output is the pooled feature).
    `config`: overrides by name, nested ones as a mapping.
    """
    entry = MODELS.get(name)
    if num_classes is not None:
        config["num_classes"] = num_classes
    model = entry.build(build_config(entry.config_class, merge(entry.config, config), name))
    load_pretrained(model, name, pretrained)
    return model


def load_pretrained(model: nn.Module, name: str, pretrained: bool | str | Path) -> None:
    """Loads this model's default weights (True), others by tag or from a file (a path), or none (False)."""
    if pretrained is not False:
        entry = MODELS.get(name)
        path = weights_file(entry, pretrained)
        if (tag := known_tag(entry, pretrained)) is not None:
            _check_kind(entry, tag, path)
        account, licence = load_weights(model, path), _licences().get(path.name)
        logger.info("%s%s", account, f" Licence: {licence}." if licence else "")


def known_tag(entry: ModelEntry, pretrained: bool | str | Path) -> str | None:
    """The tag of a model's weights that this means: the default (True), a tag, or the full name that timm gives it.
    None for a path, and for what the model does not have."""
    if pretrained is True:
        return next(iter(entry.weights), None)
    return next((t for t, weights in entry.weights.items() if pretrained in (t, weights.full_name)), None)


def _check_kind(entry: ModelEntry, tag: str, path: Path) -> None:
    """Refuses a file under the name of weights that it cannot be: its classifier has other classes."""
    expected = entry.weights[tag].classes
    if expected is None:
        return
    found = _classes_of(path)
    if found != expected:
        raise UserError(
            f"{path} is not {tag}: its classifier has {found} classes, and that of {tag} has {expected}. These are "
            "weights of another kind: remove the file, or give its path as pretrained if you mean to use it."
        )


def _classes_of(path: Path) -> int:
    """Rows of the linear classifier in a safetensors file of timm's; 0 if it has none."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_slice("head.weight").get_shape()[0] if "head.weight" in file.keys() else 0  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file, or is damaged ({error}): download it again.") from None


def _licences() -> dict[str, str]:
    """By file name, of all registered weights."""
    return {weights.file: weights.licence for name in MODELS.names() for weights in MODELS.get(name).weights.values()}


@dataclass
class Account:
    """What happened to each tensor of a file."""

    path: Path
    loaded: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)  # by their new names, like all lists but `dropped`
    reshaped: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # by the model's adapt_state
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    inert: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded from {self.path.name}"]
        if self.renamed:
            parts.append(f"{len(self.renamed)} renamed")
        for word in ("reshaped", "dropped", "missing", "unexpected"):
            names = getattr(self, word)
            if word == "dropped" and not names:
                continue
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            parts.append(f"{len(names)} {word}" + (f" ({shown})" if names else ""))
        if self.inert:
            parts.append(f"foreign classes made inert: {', '.join(self.inert)}")
        return "; ".join(parts) + "."


def read_weights(path: Path, key: str | None = None) -> tuple[dict[str, Tensor], list[str]]:
    """Reads a .safetensors file or a public .pth. Returns the tensors by name, without a leading "module.", and the
    foreign classes in the .pth that were made inert."""
    path = Path(path)
    if (path / "config.yaml").is_file():
        raise UserError(
            f"{path} is a run folder: load its model with mambacl.load, or start another run from it with --pretrained."
        )
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the path of a .safetensors or .pth file.")
    if not path.is_file():
        raise UserError(f"There is no weights file {path}; give the path of a .safetensors or .pth file.")
    if path.suffix == ".safetensors":
        try:
            return {name.removeprefix("module."): tensor for name, tensor in load_file(path).items()}, []
        except SafetensorError as error:
            raise UserError(f"{path} is not a safetensors file, or is damaged ({error}): download it again.") from None
    contents, inert = read_checkpoint(path)
    stored = find_state_dict(contents, path, key)
    try:
        return {name: tensor.read() for name, tensor in stored.items()}, inert
    except (KeyError, TypeError, RuntimeError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged ({error}): download it again.") from None


def convert(source: Path, destination: Path, key: str | None = None) -> Account:
    """Writes the weights of a public checkpoint as safetensors."""
    if destination.suffix != ".safetensors":
        raise UserError(f"The output of convert must end in .safetensors, got {destination}.")
    tensors, inert = read_weights(source, key)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with replacing(destination) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
    return Account(source, loaded=list(tensors), inert=inert)


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the names of a model's classifier, from timm's `default_cfg["classifier"]`. These tensors can differ
    from a file's: another number of classes, or none."""
    config: Any = getattr(model, "default_cfg", {})
    modules = config.get("classifier", "head")
    return tuple(f"{name}." for name in ((modules,) if isinstance(modules, str) else modules))


def load_weights(model: nn.Module, path: Path, key: str | None = None) -> Account:
    """Loads a file into a model, whose `adapt_state`, if any, translates names and shapes. Raises `UserError` if a
    backbone tensor is missing or has another shape. The classifier can differ, and batch norms count from 0 if the file
    has no count."""
    stored, inert = read_weights(path, key)
    account, heads = Account(Path(path), inert=inert), classifier_names(model)
    own = model.state_dict()
    adapt = getattr(model, "adapt_state", None)
    tensors = stored if adapt is None else adapt(dict(stored))
    _account_for_adapting(account, stored, tensors)
    for name, tensor in tensors.items():
        if name not in own:
            account.unexpected.append(name)
            continue
        if tensor.shape != own[name].shape:
            fitted = None if name.startswith(heads) else _fitted(name, tensor, own[name])
            if fitted is None:
                account.unexpected.append(name)
                continue
            tensor = fitted
            account.reshaped.append(name)
        own[name] = tensor
        account.loaded.append(name)
    account.missing = [name for name in own if name not in account.loaded]
    lost = [n for n in account.missing if not n.startswith(heads) and not n.endswith("num_batches_tracked")]
    if lost and any(name.startswith("backbone.") for name in stored):
        raise UserError(
            f"{path} is a model that `mambacl export` wrote: load it with mambacl.load, or start another run from it "
            "with --pretrained RUN, the run's folder."
        )
    if lost and any(name.startswith("method.") for name in stored):
        raise UserError(
            f"{path} holds what a run trained, without the rest of its backbone: start another run from it with "
            "--pretrained RUN, the run's folder."
        )
    if lost:
        shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        raise UserError(
            f"{path} does not fit this model: it lacks {shown}, or has them in another shape. "
            "Check the model's name and its options against the checkpoint."
        )
    model.load_state_dict(own)
    return account


def _account_for_adapting(account: Account, stored: dict[str, Tensor], adapted: dict[str, Tensor]) -> None:
    """Records what a model's adapt_state did. A tensor that was only renamed or reshaped still has the same memory."""
    by_memory = {tensor.data_ptr(): name for name, tensor in stored.items()}
    sources: dict[str, str | None] = {}
    for name, tensor in adapted.items():
        same_name = name if name in stored else None
        sources[name] = name if stored.get(name) is tensor else by_memory.get(tensor.data_ptr(), same_name)
    for name, source in sources.items():
        if source != name:
            account.renamed.append(name)
        if source is not None and adapted[name].shape != stored[source].shape:
            account.reshaped.append(name)
    used = set(sources.values())
    if None not in used:  # otherwise a tensor was computed from unknown others
        account.dropped = [name for name in stored if name not in used]


def _fitted(name: str, tensor: Tensor, wanted: Tensor) -> Tensor | None:
    """A tensor of the file in the model's shape, if they differ only in layout or resolution; otherwise None."""
    if name == "pos_embed" and tensor.dim() == 3 and tensor.shape[-1] == wanted.shape[-1]:
        return _resized_positions(tensor, wanted.shape[1])
    if tensor.numel() != wanted.numel():
        return None
    squeezed = [n for n in tensor.shape if n != 1]
    return tensor.reshape(wanted.shape) if squeezed == [n for n in wanted.shape if n != 1] else None


def _resized_positions(positions: Tensor, count: int) -> Tensor | None:
    """Resizes a square grid of position embeddings (1, l, c)."""
    old, new = round(positions.shape[1] ** 0.5), round(count**0.5)
    if old * old != positions.shape[1] or new * new != count:
        return None
    grid = positions.float().unflatten(1, (old, old)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False)
    return grid.flatten(2).transpose(1, 2)


def cache_folder() -> Path:
    """The folder for downloaded weights: $MAMBACL_CACHE, or mambacl in the user's cache folder."""
    if own := os.environ.get("MAMBACL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mambacl"


def weights_file(entry: ModelEntry, pretrained: bool | str | Path = True) -> Path:
    """The file with a model's default weights (True) or others by tag, downloaded at the first call unless it is part
    of the package. A path is returned unchanged."""
    tag = known_tag(entry, pretrained)
    if tag is None and (isinstance(pretrained, Path) or (isinstance(pretrained, str) and not is_word(pretrained))):
        return Path(pretrained)
    if tag is None and not isinstance(pretrained, str):
        raise UserError(f"There are no public weights for '{entry.name}'; give the path of your own as pretrained.")
    if tag is None:
        known = f"its weights are {', '.join(entry.weights)}" if entry.weights else "it has no public weights"
        raise UserError(
            f"'{entry.name}' has no weights '{pretrained}': {known}; for a file, give its path, such as ./{pretrained}."
        )
    weights = entry.weights[tag]
    if weights.packaged:
        return Path(str(files("mambacl.backbones") / "weights" / weights.packaged))
    path = cache_folder() / weights.file
    if not path.exists():
        checksum = weights.sha256 and f"sha256:{weights.sha256}"
        otherwise = f"fetch it elsewhere and put it at {path}, or give its path as pretrained"
        download(weights.url, path, checksum, otherwise)
    return path
