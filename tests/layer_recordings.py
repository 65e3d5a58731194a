"""Recordings of public code that changes linear layers of a ViT (tests/goldens/low_rank), and their start values."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from prompt_recordings import FIRST, LATER, Recording
from safetensors import safe_open
from torch import nn

from mambacl.methods import METHODS, Method, Setup, Task
from mambacl.training.recipe import Recipe

FOLDER = Path(__file__).parent / "goldens" / "low_rank"


class LayerRecording(Recording):
    """The tensors of a recording by name, in float64, and its configuration."""

    def __init__(self, name: str) -> None:
        with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
            self.config = json.loads(file.metadata()["configuration"])
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        self.compared: set[str] = set()
        self.classes: int = self.config["classes"]

    def weights(self) -> dict[str, torch.Tensor]:
        return {n.removeprefix("backbone."): t for n, t in self.tensors.items() if n.startswith("backbone.")}

    def batch(self, task: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a step, counted from 0: the batches take turns."""
        name = f"task{task}.batch{step % 2}"
        return self[f"{name}.images"], self[f"{name}.labels"]

    def batches(self, task: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self.batch(task, step) for step in range(2)]

    def method(self, name: str, **options: object) -> Method:
        """On the recording's ViT."""
        setup = Setup(options=options, tasks=self.config["tasks"])
        method: Method = METHODS.get(name)(self.model(), setup)
        return method

    def start(self, method: Method, task: int) -> nn.Linear:
        """Starts a task; the new head, in float64."""
        method.start_task(Task(task, self.classes, task * self.classes, seed=task))
        method.heads.double()
        head = method.heads.heads[-1]
        assert isinstance(head, nn.Linear)
        return head

    def left(self, *kinds: str) -> list[str]:
        """The tensors whose names contain one of these words and that have not been compared."""
        return sorted(n for n in self.tensors if n not in self.compared and any(kind in n for kind in kinds))


@torch.no_grad()
def set_head(head: nn.Linear, weight: torch.Tensor, bias: torch.Tensor) -> None:
    head.weight.copy_(weight)
    head.bias.copy_(bias)


def adam_with_recorded_rates(
    recording: LayerRecording, method: Method, task: int, check: Callable[[], None] = lambda: None
) -> torch.Tensor:
    """Trains a task as InfLoRA's and BiLoRA's code does: Adam, two batches in turn, a rate per epoch by the schedule
    coda-cosine. `check` is called after the first backward. Returns the losses."""
    c = recording.config
    recipe = Recipe(passes=c["epochs"], schedule="coda-cosine")
    trained = [parameter for named in method.named_parameters().values() for _, parameter in named]
    optimizer = method.wrap(torch.optim.Adam(trained, lr=c["lr"]))
    rates, losses = [], []
    for step in range(2 * c["epochs"]):
        for group in optimizer.param_groups:
            group["lr"] = c["lr"] * recipe.lr_factor(step // 2)
        rates.append(optimizer.param_groups[0]["lr"])
        loss, _ = method.loss(*recording.batch(task, step))
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        if step == 0:
            check()
        optimizer.step()
    recording.near(f"task{task}.learning_rates", torch.tensor(rates, dtype=torch.float64), FIRST)
    return torch.stack(losses)


@torch.no_grad()
def check_answers(recording: LayerRecording, method: Method, task: int) -> None:
    """The current head, features and the scores of all heads at the end of a task."""
    head, images = method.heads.heads[-1], recording["test.images"]
    recording.near(f"task{task}.head_final.weight", head.weight, LATER)
    recording.near(f"task{task}.head_final.bias", head.bias, LATER)
    recording.near(f"task{task}.test.features", method.features(images), LATER)
    recording.near(f"task{task}.test.logits_all_heads", method.predict(images), LATER)
