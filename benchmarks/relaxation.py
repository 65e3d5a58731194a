"""python benchmarks/relaxation.py [--device cpu|cuda] [--seeds 3] [--json FILE]

Plasticity at equal drift: is letting A move, within the bound of docs/exact.md, better than fixing it? The packaged
nano model learns two classes of Fashion-MNIST and is consolidated; then it learns two more, with A fixed and the rest
projected ever less strictly (eta below 1), or with eta = 1 and A relaxed ever more. Reported for each: the loss on the
second task's training images, and how far the features of the first task's test images have moved; then the loss that
fixing A reaches at the same drift, interpolated. About 4 minutes on two cores, one on an H200.
"""

import argparse
import copy
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl import NullSpace, create_model
from mambacl.config import resolve
from mambacl.data import open_stream
from mambacl.data.stream import Stream

RANK = "energy:0.99"
FIXED: dict[str, dict[str, Any]] = {
    f"A fixed, eta {eta}": {"eta": eta} for eta in (1.0, 0.999, 0.998, 0.995, 0.99, 0.98, 0.95, 0.9)
}
RELAXED: dict[str, dict[str, Any]] = {f"A relaxed by {relax}": {"relax": relax} for relax in (0.03, 0.1, 0.3, 0.9)}
ALONE: dict[str, dict[str, Any]] = {
    f"A alone, relaxed by {relax}": {"relax": relax, **{k: {"trains": False} for k in ("W_delta", "W_B", "W_C", "out")}}
    for relax in (0.1, 0.9)
}
PUBLISHED: dict[str, dict[str, Any]] = {"A by delta dA = 0, corner": {"A": {"feature": "delta"}, "rank": "corner"}}


def train(
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
def learned(model: nn.Module, head: nn.Module, stream: Stream, task: int) -> float:
    """Loss on the task's training images as in evaluation."""
    device, total, count = next(model.parameters()).device, 0.0, 0
    for images, labels in stream.plain_batches(task, 100):
        logits = head(model(images.to(device)))
        total += F.cross_entropy(logits, labels.to(device) - stream.first_label(task), reduction="sum").item()
        count += len(images)
    return total / count


@torch.no_grad()
def features(model: nn.Module, stream: Stream, task: int) -> Tensor:
    device = next(model.parameters()).device
    return torch.cat([model(images.to(device)) for images, _ in stream.test_batches(task, 100)])


def measure(device: torch.device, seed: int, passes: int, lr: float) -> dict[str, dict[str, float]]:
    config = resolve("demo", {"seed": seed})
    torch.manual_seed(seed)
    model = create_model("defocus_mamba_nano", num_classes=0, pretrained=True).to(device).eval()
    data: Any = model.default_cfg
    stream = open_stream(config.stream, 32, list(data["mean"]), list(data["std"]), seed, 0)
    heads = [nn.Linear(192, 2).to(device) for _ in range(2)]
    train(model, heads[0], NullSpace(model, "exact"), stream, 0, passes, lr)
    found: dict[str, dict[str, float]] = {}
    for name, overrides in {**FIXED, **RELAXED, **ALONE, **PUBLISHED}.items():
        own, head = copy.deepcopy(model), copy.deepcopy(heads[1])
        settings: dict[str, Any] = {"rank": RANK, **overrides}
        space = NullSpace(own, "exact", **settings)
        space.consolidate(stream.plain_batches(0, 100))
        before = features(own, stream, 0)
        A = torch.cat([p.detach().flatten() for n, p in own.named_parameters() if n.endswith("A_log")])
        train(own, head, space, stream, 1, passes, lr)
        drift = (features(own, stream, 0) - before).norm() / before.norm()
        A = torch.cat([p.detach().flatten() for n, p in own.named_parameters() if n.endswith("A_log")]) - A
        found[name] = {
            "loss": learned(own, head, stream, 1),
            "drift": drift.item(),
            "A_moved": A.square().mean().sqrt().item(),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    logging.getLogger("mambacl").setLevel(logging.WARNING)
    runs = [measure(torch.device(given.device), seed, given.passes, given.lr) for seed in range(given.seeds)]
    names = list(runs[0])
    mean = {n: {key: float(np.mean([run[n][key] for run in runs])) for key in runs[0][n]} for n in names}
    fixed = sorted((mean[n]["drift"], mean[n]["loss"]) for n in FIXED)
    print(f"{'':28} {'loss':>8} {'drift':>9} {'A moved':>9}   loss with A fixed at this drift")
    for n in names:
        drifts, losses = np.array(fixed).T
        at_equal = float(np.interp(mean[n]["drift"], drifts, losses))
        mean[n]["loss_with_A_fixed"] = at_equal
        shown = "" if n in FIXED else f"{at_equal:8.4f}"
        print(f"{n:28} {mean[n]['loss']:8.4f} {mean[n]['drift']:9.5f} {mean[n]['A_moved']:9.5f}   {shown}")
    if given.json:
        given.json.write_text(json.dumps({"mean": mean, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
