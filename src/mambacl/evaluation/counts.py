"""Counting right predictions."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


@torch.no_grad()
def count_correct(
    predict: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor]], device: torch.device
) -> int:
    """Right predictions: the largest logit over all classes seen is at the image's label."""
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in batches:
        logits = predict(images.to(device, non_blocking=True))
        correct += (logits.argmax(dim=1) == labels.to(device, non_blocking=True)).sum()
    return int(correct)
