"""Builds the parts of a run from its configuration: device, model, stream and method."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mambacl import processes
from mambacl.backbones import create_model, load_weights
from mambacl.backbones.loading import classifier_names, load_pretrained, weights_file
from mambacl.backbones.registry import MODELS
from mambacl.background import in_background
from mambacl.classifiers import CLASSIFIERS
from mambacl.config import RunConfig, check_device
from mambacl.data import Stream, open_stream
from mambacl.errors import UserError
from mambacl.methods import METHODS, Method, Setup
from mambacl.registry import unknown
from mambacl.scenarios import SCENARIOS
from mambacl.training import checkpoints
from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop, consolidates
from mambacl.training.progress import Progress
from mambacl.training.recipe import Recipe
from mambacl.training.seconds import Watch
from mambacl.training.sharding import check_sharded, cut, shards
from mambacl.training.tracking import Trackers
from mambacl.tuning import recompute


@dataclass(frozen=True)
class Parts:
    config: RunConfig
    model: nn.Module
    stream: Stream
    method: Method
    device: torch.device
    loop_class: type[Loop]
    watch: Watch
    described: Future[dict[str, Any]]
    """`Stream.describe`, computed in the background"""

    def overview(self) -> str:
        """What the run is about to learn, and what the user should know about it."""
        stream, recipe = self.stream, self.config.training
        tasks, size = stream.tasks, stream.transforms.size
        images = f"{len(stream.dataset.train.labels)} training and {len(stream.dataset.test.labels)} test images"
        first = ", ".join(stream.dataset.class_names[c] for c in tasks[0][:6]) + (", ..." if len(tasks[0]) > 6 else "")
        parts = f"{len(tasks)} tasks (first: {first})"
        if stream.domains is not None:
            parts = f"each of {len(tasks)} domains ({', '.join(stream.domains.names)})"
        classes = f"{len(stream.class_order)} classes in {parts}"
        lines = [f"{stream.dataset.name}: {classes}, {images}, {size} px, on {self.device}"]
        if stream.scenario != "class":
            lines.append(f"Evaluation is {stream.scenario}-incremental: the model {SCENARIOS[stream.scenario]}.")
        if self.config.pretrained is False:
            lines.append(f"{self.config.backbone} starts from random weights (--pretrained FILE loads a checkpoint).")
        if not self.method.trains:
            lines.append("Nothing trains, so options for training and for the null space have no effect.")
            return "\n".join(lines)
        if trained := self.method.overview():
            lines.append(trained)
        if min(len(task) for task in tasks) == 1:
            lines.append("A task with a single class teaches nothing: its classifier has only one answer.")
        if recipe.schedule == "multistep" and all(after >= recipe.passes for after in recipe.decay_after):
            lines.append(
                f"With {recipe.passes} passes the learning rate never decays (decay_after {recipe.decay_after})."
            )
        return "\n".join(lines)

    def work(self, task: int = 0, epoch: int = 0) -> dict[str, float]:
        """The images that a run has still to process, by phase, from this task and epoch on."""
        recipe, method, total = self.config.training, self.method, self.stream.test_counts()
        left = dict.fromkeys(("train", "covariance", "classifier", "evaluate"), 0.0)
        for t in range(task, len(self.stream.tasks)):
            images, done = self.stream.train_count(t), epoch if t == task else 0
            if method.trains_in(t):
                left["train"] += images * recipe.passes_per_epoch * (recipe.epochs - done)
            left["covariance"] += images if consolidates(method) else 0
            left["classifier"] += images if method.classifier.updates else 0
            left["evaluate"] += total[t] if method.features_stay else sum(total[: t + 1])  # features that stay are kept
        return left

    def loop(self, folder: RunFolder, progress: Progress | None = None, trackers: Trackers | None = None) -> Loop:
        """`progress`: shows what the loop does."""
        config = self.config
        recipe = config.training
        header = {
            "benchmark": config.name,
            "method": config.method,
            "backbone": config.backbone,
            "seed": config.seed,
            "precision": config.precision,
            "class_names": self.stream.dataset.class_names,
            "class_order": self.stream.class_order,
            "tasks": self.stream.tasks,
            "scenario": self.stream.scenario,
        }
        classifier, reader = self.method.classifier, self.method.reader
        if config.classifier != "auto" or classifier.updates:
            header["classifier"] = classifier.name
        if classifier.updates:
            header["features"] = {
                "count": classifier.num_features,
                "depths": reader.indices,
                "pool": list(reader.pool) if reader.indices else [],
                "mirror": config.features.mirror,
            }
        if self.stream.domains is not None:
            header["domains"] = self.stream.domains.names
        if skipped := self.stream.dataset.skipped:
            header["skipped"] = {"count": len(skipped), "images": list(skipped)}
        bf16 = config.precision == "bf16"
        return self.loop_class(
            self.method, self.stream, recipe, folder, progress or Progress(), header, self.device, bf16, config.seed,
            config.audit_images, config.fast, self.stream.scenario, self.watch, trackers, shards(config),
        )  # fmt: skip


def build(
    config: RunConfig, folder: RunFolder | None = None, loop: type[Loop] = Loop, watch: Watch | None = None
) -> Parts:
    """Builds model, stream and method. The model has the weights from `folder`, or its initial weights without one."""
    watch = watch or Watch()
    if config.method not in METHODS.names():
        words = unknown("method", config.method, METHODS.names())
        raise UserError(f"{words} If a Python file registers it, add --import FILE.")
    method_class = METHODS.get(config.method)
    if config.classifier != "auto":
        CLASSIFIERS.check(config.classifier)
    device = pick_device(config.device)
    torch.manual_seed(config.seed)  # for weights that no checkpoint contains
    with watch.phase("model"):
        model = create_model(config.backbone, num_classes=0, **config.backbone_options)
    data: Any = model.default_cfg
    with watch.phase("data"):
        stream = open_stream(
            config.stream, data["input_size"][-1], list(data["mean"]), list(data["std"]), config.seed,
            config.training.workers, device if config.fast else torch.device("cpu"),
        )  # fmt: skip
    described = in_background(stream.describe)  # the images' fingerprint takes as long as the model
    with watch.phase("model"):
        if folder is None:  # after opening the data, because this can download weights
            if (start := RunFolder.of_weights(config.pretrained)) is None:
                load_pretrained(model, config.backbone, config.pretrained)
            else:
                checkpoints.load_trained(start, model, config.backbone, config.backbone_options)
        else:
            checkpoints.load_backbone(folder, model)
        model.eval()
        check_image_size(model, stream.transforms.size, config.backbone)
        if config.training.recompute:
            recompute(model)
        if shards(config):
            cut(model, device)
        else:
            model = model.to(device)
        method = _method(config, folder, stream, method_class, model)
        check_parts(config.training, method)
        if shards(config):
            check_sharded(method)
    return Parts(config, model, stream, method, device, loop, watch, described)


def check_parts(recipe: Recipe, method: Method) -> None:
    """Refuses to cut batches into pieces, or to share them among processes, if that would change the result."""
    count = processes.count()
    if method.trains and not method.splits and (recipe.accumulate > 1 or count > 1):
        remedy = "set training.accumulate to 1" if count == 1 else "train it with a single process"
        raise UserError(
            f"The images of a batch affect each other in the loss of '{method.name}', so it cannot go through the "
            f"model in pieces: {remedy}."
        )


def _method(
    config: RunConfig, folder: RunFolder | None, stream: Stream, method_class: type[Method], model: nn.Module
) -> Method:
    known = None
    if config.known_classes:  # after the first task, the checkpoints have this classifier
        learned = folder is not None and checkpoints.task_end_file(folder) is not None
        classes = len(stream.tasks[0])
        known = nn.Linear(1, classes) if learned else _known_classifier(config, classes)
    names = [stream.dataset.class_names[c] for c in stream.class_order]
    if stream.domains is not None:  # each task has its own labels for all classes
        names *= len(stream.tasks)
    return method_class(model, setup_of(config, known, [len(classes) for classes in stream.tasks], names))


def setup_of(
    config: RunConfig, known: nn.Linear | None = None, tasks: Sequence[int] = (), class_names: Sequence[str] = ()
) -> Setup:
    """What a method gets; `known` is a classifier for the first task's classes. `tasks`: the classes of each; without
    training there are none, and no `class_names`."""
    return Setup(
        setting=config.nullspace,
        warm_second_head=config.training.heads == "warm-second",
        seed=config.seed,
        options=config.options,
        classifier=config.classifier,
        classifier_options=config.classifier_options,
        features=replace(config.features, kept=0) if config.stream.by_domain else config.features,
        known_classifier=known,
        folder=config.folder / "checkpoints",
        share_steps=config.share_steps,
        tasks=len(tasks),
        classes=sum(tasks),
        epochs=config.training.epochs,
        class_names=tuple(class_names),
    )


@torch.no_grad()
def check_image_size(model: nn.Module, size: int, name: str) -> None:
    """Refuses an image size that the model cannot take, before anything is written."""
    default_cfg: Any = model.default_cfg
    own = default_cfg["input_size"][-1]
    try:
        model(torch.zeros(1, 3, size, size))
    except UserError as error:
        model(torch.zeros(1, 3, own, own))  # if the model's own size fails as well, raise that error
        raise UserError(f"{error} Set --stream.transforms.image_size; the size of {name} is {own}.") from None


def _known_classifier(config: RunConfig, classes: int) -> nn.Linear:
    """The classifier of the checkpoint that the run starts from."""
    if RunFolder.of_weights(config.pretrained) is not None:
        raise UserError(
            f"known_classes takes the classifier of a weights file, and {config.pretrained} is a run: leave out "
            "known_classes to start a new run from its backbone."
        )
    model: Any = create_model(config.backbone, num_classes=classes, **config.backbone_options)
    path = weights_file(MODELS.get(config.backbone), config.pretrained)
    account = load_weights(model, path)
    head = model.get_classifier()
    if any(name.startswith(classifier_names(model)) for name in account.missing) or not isinstance(head, nn.Linear):
        raise UserError(
            f"{path} has no linear classifier for the {classes} classes of the first task: put the classes that it "
            "knows into the first task (stream.tasks), or set known_classes to false."
        )
    return head


def describe_data(config: RunConfig) -> dict[str, Any]:
    """What `Stream.describe` says about the data now, without building the model. Only `transforms` needs the model."""
    return open_stream(config.stream, 1, [0.0] * 3, [1.0] * 3, config.seed, 0).describe()


def check_stream(folder: RunFolder, now: Mapping[str, Any]) -> None:
    """Refuses data, as `Stream.describe` describes them, that are not those that the run was trained on."""
    saved = folder.stream()
    # `dataset` can be a folder's name, `transforms` follows from config.yaml, and `skipped` is text for the reader
    ignored = ("dataset", "transforms", "skipped")
    differing = [key for key in now if key not in ignored and saved.get(key) != now[key]]
    if differing:
        raise UserError(
            f"The data have changed since {folder.path} was trained (stream.json differs in {differing[0]}): "
            "restore them, or start again with --overwrite."
        )


def pick_device(name: str) -> torch.device:
    """The device of this process. Under torchrun, each process of a machine has a GPU of its own, by number."""
    check_device(name)
    number, here = processes.on_machine()
    if processes.launched() and (name == "cuda" or (name == "auto" and torch.cuda.is_available())):
        if here > torch.cuda.device_count():
            raise UserError(
                f"{here} processes need {here} GPUs, but this machine has {torch.cuda.device_count()}: start fewer, or "
                "use --device cpu."
            )
        torch.cuda.set_device(number)
        return torch.device("cuda", number)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"This machine has no device '{name}': use --device auto, or cpu.")
    return device
