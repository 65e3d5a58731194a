"""Makes a run of a checkpoint that was trained elsewhere, so that it can learn classes, be compared and rolled back.

The run has one finished task: the classes that the checkpoint knows. Nothing trains in it. The images to protect take
the place of its training images: the null space is found on them, and a classifier that is computed from features
takes them in. If they are not sorted by class, the checkpoint's own classifier names their classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mambacl.backbones import create_model, load_weights
from mambacl.backbones.loading import classifier_names, read_weights
from mambacl.backbones.registry import MODELS
from mambacl.config import RunConfig, resolve
from mambacl.data.images import FileImages
from mambacl.data.sets.folders import images_under
from mambacl.data.transforms import Transforms
from mambacl.deploy.class_folders import open_folder
from mambacl.deploy.comparing import Show, class_of
from mambacl.deploy.coverage import FEWEST, coverage
from mambacl.deploy.model_file import is_exported
from mambacl.errors import UserError
from mambacl.files import disk_error, expanded
from mambacl.log import logger
from mambacl.methods import METHODS, Method
from mambacl.ops.precision import resolve_precision
from mambacl.options import nested
from mambacl.training import checkpoints
from mambacl.training.api import arithmetic
from mambacl.training.build import check_image_size, setup_of
from mambacl.training.folder import RunFolder
from mambacl.training.next_task import next_task, stream_of

NEEDED = {
    "backbone": "--backbone NAME",
    "classes": "--classes FILE, one name per line",
    "protect": "--protect FOLDER, images of its kind",
    "out": "--out RUN",
}
RANK = "energy:0.99"  # the corner rule of the paper protects few directions of real features
ENOUGH = 100  # images to protect, below which a note says so
LARGEST = 1 << 30  # bytes of class covariances, above which the heads are not aligned


@dataclass(frozen=True)
class Source:
    """What the user gave."""

    weights: Path
    backbone: str
    classes: list[str]
    images: FileImages
    """to protect; their labels are -1 if they are not sorted by class"""
    out: Path
    options: Mapping[str, Any]
    head: nn.Linear | None
    """the checkpoint's classifier, if it has one"""
    notes: list[str] = field(default_factory=list)
    """sentences for the user"""

    @classmethod
    def of(cls, weights: str | Path, given: Mapping[str, Any], options: Mapping[str, Any], skip_bad: bool) -> Source:
        path, options = expanded(weights), nested(dict(options))
        if path.is_dir():
            raise UserError(f"{weights} is a folder without config.yaml: give a run folder or a checkpoint file.")
        if not path.is_file():
            raise UserError(f"{weights} does not exist: give a run folder or a checkpoint file.")
        if is_exported(path):
            raise UserError(
                f"{weights} is an exported model, which lacks the sums that it needs to learn: give its run folder."
            )
        if missing := [words for name, words in NEEDED.items() if given.get(name) is None]:
            raise UserError(f"A checkpoint that was trained elsewhere also needs {missing[0]}.")
        MODELS.get(given["backbone"])  # refuses an unknown name
        names = _names(expanded(given["classes"]))
        images = _to_protect(expanded(given["protect"]), names, skip_bad)
        model_options = options.get("backbone_options", {})
        head = _head(path, given["backbone"], model_options, names, given["classes"])
        if head is None and (images.labels < 0).any():
            raise UserError(
                f"{weights} has no classifier, so {given['protect']} must say which class its images have: it must "
                f"hold CLASS/*, with folders such as {names[0]}."
            )
        return cls(path, given["backbone"], names, images, Path(given["out"]), options, head)

    def identity(self) -> dict[str, Any]:
        return {"weights": self.weights.name, "classes": self.classes, "images": self.images.digest()}


def is_foreign(run: str | Path, given: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether `run` is a checkpoint that was trained elsewhere. A run takes no options: it has them."""
    if not (expanded(run) / "config.yaml").is_file():
        return bool(given or options)
    if found := [*given, *options]:
        raise UserError(
            f"{run} is a run and keeps its options: leave out --{found[0]}, which is for a checkpoint file."
        )
    return False


def check_new(source: Source, new: str | Path, more: bool, skip_bad: bool) -> None:
    """Refuses what could not be learned, before a run is made."""
    given = open_folder(new, "--new", source.classes, skip_bad)
    if not more and (both := [name for name in given.names if name in source.classes]):
        raise UserError(
            f"The checkpoint already has the class '{both[0]}': add --more for more images of it, or rename the folder."
        )
    if not skip_bad:
        given.images.check()


def adopt(source: Source, device: torch.device, show: Show) -> RunFolder:
    """The run that a checkpoint becomes; if this was done before, the same run."""
    folder = RunFolder(source.out)
    if folder.exists():
        if folder.stream().get("adopted") != source.identity():
            raise UserError(f"{source.out} holds another run: choose another --out.")
        if folder.finished():
            logger.info("%s is already a run of this checkpoint.", source.out)
            return folder
    model: Any = create_model(source.backbone, num_classes=0, **source.options.get("backbone_options", {}))
    logger.info("%s", load_weights(model, source.weights))
    model.eval()
    config = resolve(_layer(source, "auto"), {})
    transforms = Transforms.of_model(config.stream.transforms, model)
    check_image_size(model, transforms.size, source.backbone)
    features = _features(model.to(device), source.images, transforms, show)
    labels = _labels(source, features)
    config = resolve(_layer(source, _classifier(source, labels, features.shape[1])), source.options)
    precision: Any = resolve_precision(config.precision, device)
    config = dataclasses.replace(config, precision=precision)
    source.notes.append(coverage(features).describe(len(features)))
    _note_labels(source, labels)
    method = METHODS.get(config.method)(model, setup_of(config, source.head if config.known_classes else None))
    if source.head is None and method.trains and method.classifier.trains:
        raise UserError(
            f"{source.weights} has no classifier, and the method {config.method} cannot train one on the images to "
            "protect: choose --method analytic, or a classifier that is computed from features (--classifier lda)."
        )
    images = FileImages(source.images.root, source.images.files, labels)
    try:
        _write(folder, source, config, method, images, transforms, device)
    except OSError as error:
        raise disk_error(error, source.out) from None
    return folder


def _write(
    folder: RunFolder, source: Source, config: RunConfig, method: Method, images: FileImages, transforms: Transforms,
    device: torch.device,
) -> None:  # fmt: skip
    stream = stream_of(images, [len(source.classes)], transforms, config, device)
    about = {**stream.describe(), "class_names": source.classes, "adopted": source.identity()}
    with folder.locked():
        folder.clear()
        folder.create(config, about)
        checkpoints.save_backbone(folder, checkpoints.backbone_state(method.model))
        loop = next_task(method, stream, config, folder, device, trains=False)
        header = {"backbone": config.backbone, "precision": config.precision, "class_names": source.classes}
        loop.header |= {**header, "class_order": stream.class_order, "scenario": "class"}
        with arithmetic(config):
            loop.learn(trains=False)
        loop.keep()


def _names(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise UserError(f"The file {path} with the classes does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): write one class per line, in UTF-8.") from None
    names = [line for line in lines if line]
    if not names:
        raise UserError(f"{path} has no classes: write one per line, in the order of the checkpoint's classifier.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path} has the class '{twice}' twice: each class needs a name that no other has.")
    return names


def _to_protect(folder: Path, names: list[str], skip_bad: bool) -> FileImages:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: --protect takes a folder with images of the checkpoint's kind.")
    files = images_under(folder)
    known = set(names)
    classes = [class_of(file.relative_to(folder), known) if file.parent != folder else "" for file in files]
    place = {name: label for label, name in enumerate(names)}
    labels = [place.get(name, -1) for name in classes]
    if any(label >= 0 for label in labels) and -1 in labels:
        odd = files[labels.index(-1)]
        raise UserError(
            f"{odd} is in no folder of a known class, but other images of {folder} are: sort all of them, or none."
        )
    images = FileImages(folder, files, np.array(labels, dtype=np.int64))
    if skip_bad:
        bad = images.bad()
        images = images.subset(np.setdiff1d(np.arange(len(files)), np.array(list(bad), dtype=np.int64)))
    else:
        images.check()
    if len(images.labels) < FEWEST:
        raise UserError(f"{folder} has {len(images.labels)} images to protect; at least {FEWEST} are needed: add some.")
    return images


def _head(
    path: Path, backbone: str, options: Mapping[str, Any], names: list[str], file: str | Path
) -> nn.Linear | None:
    """The classifier of a checkpoint, or None if it has none. Refuses one for another number of classes."""
    model: Any = create_model(backbone, num_classes=len(names), **options)
    account, prefixes = load_weights(model, path), classifier_names(model)
    if not any(name.startswith(prefixes) for name in account.missing):
        head = model.get_classifier()
        return head if isinstance(head, nn.Linear) else None
    stored, _ = read_weights(path)
    found = [stored[name] for name in account.unexpected if name.startswith(prefixes) and name in stored]
    if sizes := {len(tensor) for tensor in found if tensor.dim() > 0}:
        raise UserError(
            f"{file} has {len(names)} classes, but the classifier in {path} has {sizes.pop()}: list each of its "
            "classes once, in its order."
        )
    return None


def _layer(source: Source, classifier: str) -> dict[str, Any]:
    """The configuration without the user's options."""
    method = source.options.get("method", "analytic" if source.head is None else "mamba-cl")
    trains, own_answer = METHODS.get(method).trains, METHODS.get(method).own_answer
    layer: dict[str, Any] = {
        "name": source.out.resolve().name, "method": method, "backbone": source.backbone,
        "pretrained": str(source.weights.absolute()), "known_classes": source.head is not None and trains,
        "stream": {"dataset": "folders", "root": str(source.images.root.absolute()), "tasks": 1},
        "out": str(source.out), "classifier": classifier if trains and not own_answer else "auto",
    }  # fmt: skip
    given = {name: source.options[name] for name in ("stream", "backbone_options") if name in source.options}
    if method == "mamba-cl" and "setting" not in source.options:
        layer["nullspace"] = {"rank": RANK}
    for name, value in given.items():
        layer[name] = {**layer.get(name, {}), **value}
    return layer


@torch.no_grad()
def _features(model: nn.Module, images: FileImages, transforms: Transforms, show: Show) -> Tensor:
    """The final features (n, d) of all images."""
    device = next(model.parameters()).device
    found = []
    for index in show(range(len(images.labels)), len(images.labels)):
        pixels = transforms.normalize(transforms.evaluate(images.image(index))[None])
        found.append(model(pixels.to(device)).float().cpu())
    return torch.cat(found)


@torch.no_grad()
def _labels(source: Source, features: Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Those of the folder, or what the checkpoint's own classifier says."""
    if source.head is None or (source.images.labels >= 0).all():
        return source.images.labels
    return source.head.cpu()(features).argmax(1).numpy()


def _classifier(source: Source, labels: np.ndarray[Any, Any], width: int) -> str:
    """Heads are aligned if each class has images: those of separate tasks do not compare otherwise."""
    counts = np.bincount(labels, minlength=len(source.classes))
    fits = len(source.classes) * width * width * 8 <= LARGEST
    return "aligned" if source.head is not None and counts.min() > 1 and fits else "auto"


def _note_labels(source: Source, labels: np.ndarray[Any, Any]) -> None:
    counts = np.bincount(labels, minlength=len(source.classes))
    if len(labels) < ENOUGH:
        source.notes.append(f"{len(labels)} images to protect are few: {ENOUGH} or more protect better.")
    if (source.images.labels < 0).any():
        source.notes.append("They are not sorted by class, so the checkpoint's own classifier named their classes.")
    if source.head is None and not counts.min():
        name = source.classes[int(counts.argmin())]
        raise UserError(
            f"{source.images.root} has no images of the class '{name}', and the checkpoint has no classifier that "
            "knows it: add some."
        )
    if source.head is not None and counts.min() < 2:
        source.notes.append(
            f"{int((counts < 2).sum())} of {len(source.classes)} classes have fewer than two of these images, so the "
            "checkpoint's classifier stays as it is, and its scores may not compare with those of new classes: check "
            "the accuracy on them with --test."
        )
