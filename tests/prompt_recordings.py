"""Recordings of public prompt-based code (tests/goldens/prompts): their ViT, their batches, a replay of their steps.

    recording = Recording("l2p")
    method = METHODS.get("l2p")(recording.model(), Setup(options=...))
    replay(recording, method, {"prompt.pool": Place(lambda: method.pool.values)}, clip=1.0)

A recording says what each tensor is before and after each step; `replay` trains the method on the recorded batches in
float64 and compares losses, gradients and parameters on the way, then test logits.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mambacl.backbones import create_model
from mambacl.methods import Method, Task

FOLDER = Path(__file__).parent / "goldens" / "prompts"
FIRST, LATER = 1e-9, 1e-7  # relative to a tensor's largest value: task 0 before its first update, and all that follows


class Recording:
    """The tensors of a recording by name, in float64, and its configuration."""

    def __init__(self, name: str) -> None:
        with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
            self.config = json.loads(file.metadata()["configuration"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        self.tensors = {key: t.double() if t.is_floating_point() else t for key, t in tensors.items()}
        self.compared: set[str] = set()
        self.classes: int = self.config["classes_per_task"]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def model(self) -> nn.Module:
        """Its ViT, without a head."""
        c = self.config
        model = create_model(
            "vit", img_size=c["image"], patch_size=c["patch"], embed_dim=c["width"], depth=c["depth"],
            num_heads=c["heads"], mlp_ratio=c["mlp_ratio"], num_classes=0,
        )  # fmt: skip
        model.double().load_state_dict(self.weights())
        return model.eval()

    def weights(self) -> dict[str, Tensor]:
        """By the names that our ViT has."""
        state = {}
        for name, tensor in self.tensors.items():
            if name.startswith("backbone."):
                name = name.removeprefix("backbone.").replace("patch_embed.", "patch_embed.proj.")
                state[name.replace("block", "blocks.") if name.startswith("block") else name] = tensor
        return state

    def batch(self, task: int, step: int) -> tuple[Tensor, Tensor]:
        """Of a step, counted from 1: the batches take turns."""
        name = f"task{task}.batch{(step - 1) % 2}"
        return self[f"{name}.images"], self[f"{name}.labels"]

    def near(self, name: str, found: Tensor, tolerance: float) -> None:
        stored = self[name]
        self.compared.add(name)
        assert found.shape == stored.shape, f"{name}: {tuple(found.shape)} is not {tuple(stored.shape)}"
        error = (found.detach() - stored).abs().max() / max(float(stored.abs().max()), 1e-3)
        assert error <= tolerance, f"{name}: {float(error):.1e}"


@dataclass(frozen=True)
class Place:
    """Where a recorded parameter is in our method: a parameter, and how to see it as recorded."""

    parameter: Callable[[], Tensor]
    view: Callable[[Tensor], Tensor] = lambda tensor: tensor


def adam(method: Method, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for named in method.named_parameters().values() for _, p in named], lr=lr)


def as_coda(epoch: int, epochs: int) -> float:
    """The factor of the learning rate in CODA-Prompt's code, written out."""
    angle = 99 * torch.pi * max(epoch - 1, 0) / (200 * (epochs - 1))
    return float(torch.tensor(angle, dtype=torch.float64).cos())


def replay(
    recording: Recording, method: Method, places: Mapping[str, Place], *, clip: float = 0.0,
    schedule: Callable[[int, int], float] = lambda epoch, epochs: 1.0,
    optimizer: Callable[[Method, float], torch.optim.Optimizer] = adam,
    started: Callable[[int], None] = lambda task: None,
) -> None:  # fmt: skip
    """Trains all recorded tasks. `started` is called when a task has started: it sets what was drawn at random.
    The head of a task starts from its rows of the recorded head."""
    classes, steps = recording.classes, recording.config["steps"]
    for task in range(recording.config["tasks_run"]):
        method.start_task(Task(task, classes, task * classes, seed=task))
        method.heads.double()
        rows = slice(task * classes, (task + 1) * classes)
        head: nn.Linear = method.heads.heads[-1]  # type: ignore[assignment]
        with torch.no_grad():
            head.weight.copy_(recording["init.head.weight"][rows])
            head.bias.copy_(recording["init.head.bias"][rows])
        started(task)
        heads = {"head.weight": Place(lambda h=head: h.weight), "head.bias": Place(lambda h=head: h.bias)}
        lr = recording.config["lr"]
        taken = optimizer(method, lr)
        for step in range(1, steps + 1):
            name, first = f"task{task}.step{step}", task == 0 and step == 1
            tolerance = FIRST if first else LATER
            method.enter(method.phase(step - 1, steps))
            images, labels = recording.batch(task, step)
            loss, _ = method.loss(images, labels)
            recording.near(f"{name}.loss.total", loss, tolerance)
            taken.zero_grad()
            loss.backward()
            trained = [p for group in taken.param_groups for p in group["params"]]
            if f"{name}.grad_norm" in recording:
                norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
                recording.near(f"{name}.grad_norm", norm, tolerance)
            compare(recording, name + ".grad.", places, heads, rows, tolerance, gradients=True)
            if clip:
                nn.utils.clip_grad_norm_(trained, clip)
            for group in taken.param_groups:
                group["lr"] = lr * schedule(step - 1, steps) * group.get("factor", 1.0)
            taken.step()
            compare(recording, name + ".", places, heads, rows, LATER)
        with torch.no_grad():
            found = method.predict(recording["test.images"])
        stored = f"task{task}.end.test_logits"
        recording.tensors[stored] = recording[stored][:, : rows.stop]  # some recordings also score classes to come
        recording.near(stored, found, LATER)
    recorded = {name for name in recording.tensors if ".grad." in name or name.endswith((".total", "test_logits"))}
    assert recorded <= recording.compared, f"not compared: {sorted(recorded - recording.compared)[:5]}"


def compare(
    recording: Recording, prefix: str, places: Mapping[str, Place], heads: Mapping[str, Place], rows: slice,
    tolerance: float, gradients: bool = False,
) -> None:  # fmt: skip
    """What the recording has under these names; of the head, the rows of the current task."""
    for name, place in {**places, **heads}.items():
        if prefix + name not in recording:
            continue
        parameter = place.parameter()
        tensor = parameter.grad if gradients else parameter
        assert tensor is not None, f"{prefix}{name}: no gradient"
        if name in heads:
            recording.tensors[prefix + name] = recording[prefix + name][rows]
        recording.near(prefix + name, place.view(tensor), tolerance)
