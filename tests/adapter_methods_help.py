"""Models of all families, a task that can be learned, and a short training, for the methods with adapters."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mambacl.backbones import create_model
from mambacl.methods import METHODS, Method, Setup, Task

SIZES = {
    "defocus_mamba_nano": {"embed_dim": 32, "depth": 2, "mamba": {"intermediate_size": 64, "time_step_rank": 4}},
    "vim_nano": {"embed_dim": 32, "depth": 2},
    "vmamba_nano": {"depths": (1, 1), "dims": 16},
    "mambavision_nano": {"depths": (1, 1, 2, 2)},
    "vit_nano": {"embed_dim": 32, "depth": 2, "num_heads": 2},
}
FAMILIES = list(SIZES)
BLOCKS = {"defocus_mamba_nano": 2, "vim_nano": 2, "vmamba_nano": 2, "mambavision_nano": 4, "vit_nano": 2}


def small(family: str) -> nn.Module:
    """The same weights each time; features of a usual size."""
    torch.manual_seed(0)
    model = create_model(family, num_classes=0, pretrained=False, **SIZES[family])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "proj" in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model.eval()


def new_method(name: str, family: str = "defocus_mamba_nano", **options: object) -> Method:
    return METHODS.get(name)(small(family), Setup(options=options))


def images_of(labels: Tensor, seed: int) -> Tensor:
    """Images that tell the classes apart: each has a pattern of its own, under noise."""
    patterns = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(99))
    patterns = patterns.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
    noise = torch.randn(len(labels), 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    return patterns[labels] + 0.3 * noise


def task_data(task: int, classes: int, seed: int, each: int = 8) -> tuple[Tensor, Tensor]:
    labels = torch.arange(classes).repeat(each) + task * classes
    return images_of(labels, seed), labels


def optimizer_of(method: Method, lr: float = 3e-3, head_lr: float = 2e-2) -> torch.optim.Optimizer:
    roles = method.named_parameters()
    rates = {"backbone": lr, "classifier": head_lr}
    return method.wrap(torch.optim.Adam([{"params": [p for _, p in roles[role]], "lr": rates[role]} for role in roles]))


def step(method: Method, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    loss, _ = method.loss(*batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def learn(method: Method, tasks: Iterable[int], classes: int = 2, steps: int = 25) -> list[float]:
    """Losses of the last task, step by step."""
    losses: list[float] = []
    for task in tasks:
        method.start_task(Task(task, classes, task * classes, seed=task))
        optimizer, batch = optimizer_of(method), task_data(task, classes, seed=task)
        losses = [step(method, optimizer, batch) for _ in range(steps)]
        method.finish_task([batch])
    return losses


@torch.no_grad()
def accuracy(method: Method, tasks: Iterable[int], classes: int = 2) -> float:
    right = [method.predict(x).argmax(1) == y for x, y in (task_data(t, classes, seed=100 + t) for t in tasks)]
    return torch.cat(right).float().mean().item()
