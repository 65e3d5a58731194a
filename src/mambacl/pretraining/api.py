"""`pretrain`, for the command line and for Python."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mambacl.backbones import create_model
from mambacl.backbones.registry import MODELS
from mambacl.config import RunConfig, parse_yaml
from mambacl.data import DataSet, Stream, Transforms
from mambacl.data.stream import open_data
from mambacl.errors import UserError
from mambacl.files import write_bytes, write_json
from mambacl.log import logger
from mambacl.ops.precision import resolve_precision
from mambacl.options import build
from mambacl.pretraining.export import CARD, Facts, write_card, write_weights
from mambacl.pretraining.loop import CHECKPOINT, Pretraining
from mambacl.pretraining.options import EXECUTION, PretrainConfig, from_options
from mambacl.training.api import arithmetic, terminable
from mambacl.training.build import check_image_size, pick_device
from mambacl.training.display import show
from mambacl.training.folder import EVENTS, PROGRESS, RunFolder
from mambacl.training.folder import PRETRAINING as CONFIG
from mambacl.training.folder import PRETRAINING_RESULTS as RESULTS
from mambacl.training.identity import flatten
from mambacl.training.loop import TrainingError
from mambacl.training.provenance import commit, versions


@dataclass(frozen=True)
class Pretrained:
    """A finished pre-training."""

    folder: Path
    weights: Path
    accuracy: dict[str, float]
    """top-1 on the test images, as shares of one: `file`, `ema` (the same weights in single precision) and `raw`"""


def pretrain(
    backbone: str | None = None,
    *,
    overwrite: bool = False,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Pretrained:
    """Pre-trains a backbone and exports its weights.

        pretrain("vim_mini", stream={"dataset": "cifar100", "root": "data"}, epochs=50)

    If the folder already holds the same training, continues it, or returns it if it is finished; `overwrite` starts
    again. `clock` returns seconds.
    """
    given = options if backbone is None else {**options, "backbone": backbone}
    config = from_options(given)
    folder = RunFolder(config.folder)
    existing = None if overwrite else _existing(folder)
    config = _with_precision(config, existing)
    if existing is not None:
        _refuse_another(folder, existing, config)
        if (folder.path / RESULTS).exists():
            logger.info("%s is already finished; --overwrite trains it again.", folder.path)
            return _finished(folder, config)
    job = _build(config, folder, clock)
    with folder.locked():
        folder.clear_left_over()
        if existing is None:
            _clear(folder, config)
            write_bytes(folder.path / CONFIG, config.as_yaml().encode())
        with terminable(), arithmetic(RunConfig(precision=config.precision, fast=config.fast)), _fastest_convolutions():
            job.restore()
            try:
                with show(job.progress, folder):
                    job.run()
                    return _export(job)
            except KeyboardInterrupt:
                logger.warning("Repeat the command to continue from the last checkpoint in %s.", folder.path)
                raise
            except (TrainingError, UserError) as error:
                raise TrainingError(f"{error} (The last checkpoint is in {folder.path}.)") from error
            finally:
                with suppress(OSError):  # a full disk may have stopped the training
                    job.background.wait()


def _existing(folder: RunFolder) -> PretrainConfig | None:
    path = folder.path / CONFIG
    if folder.exists():
        raise UserError(f"{folder.path} holds a run of `mambacl train`: choose another --out.")
    if not path.exists():
        return None
    return build(PretrainConfig, parse_yaml(path.read_text(encoding="utf-8"), str(path)))


def _with_precision(config: PretrainConfig, existing: PretrainConfig | None) -> PretrainConfig:
    """Replaces the precision `auto`: by that of an existing training, or by what the device supports."""
    if config.precision != "auto":
        return config
    found: Any = existing.precision if existing else resolve_precision("auto", pick_device(config.device))
    return dataclasses.replace(config, precision=found)


def _refuse_another(folder: RunFolder, existing: PretrainConfig, wanted: PretrainConfig) -> None:
    a, b = flatten(existing.as_dict()), flatten(wanted.as_dict())
    differing = [name for name in {**a, **b} if a.get(name) != b.get(name) and name not in EXECUTION]
    if differing:
        raise UserError(
            f"{folder.path} holds another pre-training (it differs in {', '.join(differing[:4])}): choose another "
            "--out, or --overwrite it."
        )


def _clear(folder: RunFolder, config: PretrainConfig) -> None:
    for name in (RESULTS, CHECKPOINT, EVENTS, PROGRESS, CARD, f"{config.backbone}.safetensors", CONFIG):
        (folder.path / name).unlink(missing_ok=True)


def _build(config: PretrainConfig, folder: RunFolder, clock: Callable[[], float]) -> Pretraining:
    """Model, data and optimizer. Writes nothing."""
    device = pick_device(config.device)
    dataset = open_data(config.stream)
    options = _model_options(config, dataset)
    torch.manual_seed(config.seed)
    model: Any = create_model(config.backbone, **options)
    transforms = Transforms.of_model(config.stream.transforms, model)
    where = device if config.fast else torch.device("cpu")
    stream = Stream(dataset, transforms, 1, seed=config.seed, device=where)
    check_image_size(model.eval(), stream.transforms.size, config.backbone)
    dataset.check()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info(
        "%s, %.2f M parameters, on %s: %d classes, %d training and %d test images, %d px, on %s; to %s",
        config.backbone, parameters / 1e6, config.data_name, len(dataset.class_names), len(dataset.train.labels),
        len(dataset.test.labels), stream.transforms.size, device, folder.path,
    )  # fmt: skip
    bf16, fingerprint = config.precision == "bf16", dataset.fingerprint()
    return Pretraining(config, model.to(device), stream, folder, device, bf16, fingerprint, clock)


def _model_options(config: PretrainConfig, dataset: DataSet) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(MODELS.get(config.backbone).config_class)}
    options = {**config.backbone_options, "num_classes": len(dataset.class_names)}
    if config.drop_path:
        if "drop_path_rate" not in fields:
            raise UserError(f"{config.backbone} has no drop path: set --drop-path 0.")
        options["drop_path_rate"] = config.drop_path
    return options


@contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """On a GPU, cuDNN tries its algorithms and keeps the fastest: shapes never change."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _export(job: Pretraining) -> Pretrained:
    """Writes the weights, evaluates what the file holds, and writes the card."""
    config, folder = job.config, job.folder
    accuracy = job.evaluate(job.position.epoch)
    parameters = dict(job.model.named_parameters())
    # without parameters that had no gradient, such as a head that the classifier does not use
    untrained = {name for name, parameter in parameters.items() if parameter not in job.optimizer.state}
    state = {name: value for name, value in job.average.model.state_dict().items() if name not in untrained}
    weights = folder.path / f"{config.backbone}.safetensors"
    write_weights(weights, state)
    options = {**config.backbone_options, "num_classes": job.classes}
    model: Any = create_model(config.backbone, weights, **options).eval().to(job.device)
    accuracy = {"file": job.accuracy(model), **accuracy}
    data, stream = model.default_cfg, job.stream
    transforms = config.stream.transforms
    facts = Facts(
        weights=weights.name,
        parameters=sum(value.numel() for name, value in parameters.items() if name not in untrained),
        classes=job.classes,
        train_images=stream.train_count(0),
        test_images=stream.test_counts()[0],
        image_size=job.size,
        mean=tuple(transforms.mean or data["mean"]),
        std=tuple(transforms.std or data["std"]),
        fingerprint=job.fingerprint,
        epochs=job.position.steps / job.steps_per_epoch,
        steps=job.position.steps,
        seconds=job.position.spent,
        accuracy=accuracy,
        device=torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "a CPU",
        commit=commit(),
        versions=versions(),
    )
    write_card(folder.path / CARD, config, facts)
    write_json(folder.path / RESULTS, dataclasses.asdict(facts))
    logger.info("top-1 of the exported weights: %.2f%%; %s", 100 * accuracy["file"], weights)
    return Pretrained(folder.path, weights, accuracy)


def _finished(folder: RunFolder, config: PretrainConfig) -> Pretrained:
    results = json.loads((folder.path / RESULTS).read_text(encoding="utf-8"))
    return Pretrained(folder.path, folder.path / f"{config.backbone}.safetensors", results["accuracy"])
