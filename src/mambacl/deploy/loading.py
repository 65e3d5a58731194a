"""Loads a run, or a file that `mambacl export` wrote, without the data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.backbones import create_model
from mambacl.backbones.registry import MODELS
from mambacl.config import RunConfig
from mambacl.data.transforms import Transforms
from mambacl.deploy.description import NO_WEIGHTS, Description
from mambacl.deploy.hub_files import from_address, is_address
from mambacl.deploy.model_file import read_model
from mambacl.deploy.predictor import Predictor
from mambacl.errors import UserError
from mambacl.files import expanded, is_word
from mambacl.log import logger
from mambacl.methods import METHODS, Method
from mambacl.training import checkpoints
from mambacl.training.api import load_method, task_end
from mambacl.training.build import pick_device, setup_of
from mambacl.training.folder import RunFolder
from mambacl.training.learned import History, known_names, read_history
from mambacl.training.provenance import versions


def load(path: str | Path, device: str = "auto") -> Predictor:
    """The model of a run folder at the end of its latest task, or of a file from `mambacl export`, ready to predict.
    `device`: auto, cpu, cuda or cuda:N, whatever the run used. hf://OWNER/NAME or hf://OWNER/NAME@REVISION is a model
    on the Hugging Face Hub."""
    if is_address(path):
        path = from_address(path)
    place = expanded(path)
    if not place.exists():
        raise UserError(f"{path} does not exist: give a run folder, or a file from `mambacl export RUN`.")
    where = pick_device(device)
    return _from_file(place, where) if place.is_file() else from_run(RunFolder.existing(place), where)


def from_run(folder: RunFolder, device: torch.device, with_task_state: bool = False) -> Predictor:
    """The model of a run; `with_task_state`, also what only learning needs."""
    config, stream = folder.config(), folder.stream()
    checkpoint = task_end(folder)
    model, transforms = _model(config)
    checkpoints.load_backbone(folder, model)
    here = dataclasses.replace(config, out=str(folder.path))  # the folder may have moved
    method = _method(here, model, device)
    load_method(folder, method, checkpoint, with_task_state)
    history = read_history(folder, checkpoint.position.task)
    if config.stream.scenario == "task":
        logger.info("%s was evaluated with the task known; it is not here, so all classes compete.", folder.path)
    description = Description(
        classes=known_names(stream, history, config.stream.by_domain),
        config=config,
        preprocessing=_preprocessing(transforms, method),
        licence=_licence(config),
        card=_card(folder, config, stream, history),
    )
    return Predictor(method, transforms, description, device)


def _from_file(path: Path, device: torch.device) -> Predictor:
    tensors, description = read_model(path)
    config = description.config
    model, transforms = _model(config)
    try:
        model.load_state_dict(tensors["backbone"])
        method = _method(config, model, device)
        _load_method(method, tensors)
    except (KeyError, RuntimeError):
        raise UserError(f"The tensors of {path} do not fit its description: export the model again.") from None
    return Predictor(method, transforms, description, device)


def _load_method(method: Method, tensors: Mapping[str, dict[str, Tensor]]) -> None:
    method.load_state_dict(tensors["method"])
    if tensors["task"]:
        method.load_task_state_dict(tensors["task"])


def _model(config: RunConfig) -> tuple[nn.Module, Transforms]:
    """The backbone, with random weights, and its transforms."""
    with torch.random.fork_rng(devices=[]):  # a program's random numbers stay the same
        model = create_model(config.backbone, num_classes=0, **config.backbone_options)
    return model, Transforms.of_model(config.stream.transforms, model)


def _method(config: RunConfig, model: nn.Module, device: torch.device) -> Method:
    return METHODS.get(config.method)(model.eval().to(device), setup_of(config))


def _preprocessing(transforms: Transforms, method: Method) -> list[dict[str, Any]]:
    mirrored = len(method.views(torch.empty(1, 3, 1, 1))) > 1
    steps = transforms.describe()["evaluation"]
    return [*steps, {"mirror": "the scores of the image and its mirror image are added"}] if mirrored else steps


def _licence(config: RunConfig) -> str:
    """Of the weights that the run started from; "unknown" for a file."""
    if config.pretrained is False:
        return NO_WEIGHTS
    found = MODELS.get(config.backbone).weights.get(str(config.pretrained))
    return found.licence if found is not None and found.licence else "unknown"


def _card(folder: RunFolder, config: RunConfig, stream: Mapping[str, Any], history: History) -> dict[str, Any]:
    """Where the model comes from; no paths of this machine. Counts are of the training alone."""
    weights = config.pretrained
    results, done, learned = folder.results(), history.own, history.known
    counted = [] if learned else results.get("correct", [])
    return {
        "name": config.name,
        "method": config.method,
        "backbone": config.backbone,
        "pretrained": weights if isinstance(weights, bool) or is_word(weights) else Path(weights).name,
        "data": stream["dataset"],
        "tasks": done + len(learned),
        "classes_per_task": [*(len(task) for task in stream["tasks"][:done]), *(len(task.classes) for task in learned)],
        "scenario": config.stream.scenario,
        "training_images": sum(stream["train"][:done]) + sum(sum(task.images.values()) for task in learned),
        "test_images": sum(stream["test"][:done]),
        "correct": counted[done - 1 : done],
        "metrics": results.get("metrics", {}) if len(counted) == done else {},
        "versions": results.get("versions", versions()),
    }
