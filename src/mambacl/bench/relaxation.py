"""`mambacl bench relaxation`: is training A, within the bound of docs/exact.md, better than fixing it?

The packaged nano model learns two classes of Fashion-MNIST and is consolidated. Then it learns two more, with A fixed
and the rest projected less and less strictly (eta below 1), or with eta = 1 and A relaxed more and more. The results
are the loss on the second task's training images, the drift of the features of the first task's test images, and the
loss of a fixed A at the same drift, interpolated. Takes about 4 minutes on two cores, one on an H200.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.backbones import create_model
from mambacl.bench.result import Result, quiet
from mambacl.config import resolve
from mambacl.data import open_stream
from mambacl.data.stream import Stream
from mambacl.nullspace import NullSpace
from mambacl.training.build import pick_device

RANK = "energy:0.99"
Ways = Mapping[str, Mapping[str, Any]]
FIXED: Ways = {f"A fixed, eta {eta}": {"eta": eta} for eta in (1.0, 0.999, 0.998, 0.995, 0.99, 0.98, 0.95, 0.9)}
RELAXED: Ways = {f"A relaxed by {relax}": {"relax": relax} for relax in (0.03, 0.1, 0.3, 0.9)}
ALONE: Ways = {
    f"A alone, relaxed by {relax}": {"relax": relax, **{k: {"trains": False} for k in ("W_delta", "W_B", "W_C", "out")}}
    for relax in (0.1, 0.9)
}
PUBLISHED: Ways = {"A by delta dA = 0, corner": {"A": {"feature": "delta"}, "rank": "corner"}}
WAYS: Ways = {**FIXED, **RELAXED, **ALONE, **PUBLISHED}
NOTES = (
    "Means over {seeds} seeds. drift: relative change of the first task's features. loss with A fixed: at the same "
    "drift, interpolated between the rows with A fixed.",
)


@quiet(logging.WARNING)
def measure(device: str, seeds: int, passes: int, lr: float) -> Result:
    where = pick_device(device)
    return as_result([measure_seed(where, seed, passes, lr) for seed in range(seeds)])


def measure_seed(
    device: torch.device, seed: int, passes: int, lr: float, ways: Ways = WAYS, changes: Mapping[str, Any] | None = None
) -> dict[str, dict[str, float]]:
    """The results of each way; `changes` override the stream of the preset demo."""
    config = resolve("demo", {"seed": seed, "stream": dict(changes or {})})
    torch.manual_seed(seed)
    model = create_model("defocus_mamba_nano", num_classes=0, pretrained="tin32-39ep").to(device).eval()
    data: Any = model.default_cfg
    stream = open_stream(config.stream, 32, list(data["mean"]), list(data["std"]), seed, 0)
    heads = [nn.Linear(192, 2).to(device) for _ in range(2)]
    _train(model, heads[0], NullSpace(model, "exact"), stream, 0, passes, lr)
    found: dict[str, dict[str, float]] = {}
    for name, overrides in ways.items():
        own, head = copy.deepcopy(model), copy.deepcopy(heads[1])
        settings: dict[str, Any] = {"rank": RANK, **overrides}
        space = NullSpace(own, "exact", **settings)
        space.consolidate(stream.plain_batches(0, 100))
        features, A = _features(own, stream, 0), _A_log(own)
        _train(own, head, space, stream, 1, passes, lr)
        found[name] = {
            "loss": _loss(own, head, stream, 1),
            "drift": ((_features(own, stream, 0) - features).norm() / features.norm()).item(),
            "A_moved": (_A_log(own) - A).square().mean().sqrt().item(),
        }
    return found


def as_result(runs: Sequence[Mapping[str, Mapping[str, float]]]) -> Result:
    """Means over the runs and, for each way, the loss of a fixed A at the same drift."""
    mean = {n: {key: float(np.mean([run[n][key] for run in runs])) for key in runs[0][n]} for n in runs[0]}
    drifts, losses = np.array(sorted((mean[n]["drift"], mean[n]["loss"]) for n in mean if n in FIXED)).T
    result = Result("Relaxing A at equal drift", notes=[note.format(seeds=len(runs)) for note in NOTES])
    for name, figures in mean.items():
        equal = None if name in FIXED else float(np.interp(figures["drift"], drifts, losses))
        result.rows.append({"way": name, **figures, "loss_with_A_fixed": equal})
    return result


def _train(
    model: nn.Module, head: nn.Module, space: NullSpace, stream: Stream, task: int, passes: int, lr: float
) -> None:
    device = next(model.parameters()).device
    optimizer = space.wrap(torch.optim.Adam([*space.parameters(), *head.parameters()], lr=lr))
    for epoch in range(passes):
        for images, labels in stream.train_batches(task, epoch, 25):
            loss = F.cross_entropy(head(model(images.to(device))), labels.to(device) - stream.first_label(task))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def _loss(model: nn.Module, head: nn.Module, stream: Stream, task: int) -> float:
    """The loss on the task's training images, without augmentation."""
    device, total, count = next(model.parameters()).device, 0.0, 0
    for images, labels in stream.plain_batches(task, 100):
        logits = head(model(images.to(device)))
        total += F.cross_entropy(logits, labels.to(device) - stream.first_label(task), reduction="sum").item()
        count += len(images)
    return total / count


@torch.no_grad()
def _features(model: nn.Module, stream: Stream, task: int) -> Tensor:
    device = next(model.parameters()).device
    return torch.cat([model(images.to(device)) for images, _ in stream.test_batches(task, 100)])


def _A_log(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for name, p in model.named_parameters() if name.endswith("A_log")])
