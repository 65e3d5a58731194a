"""Counts correct predictions."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


@torch.no_grad()
def count_correct(
    predict: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    right: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> int:
    """The number of correct predictions. `right` decides from logits and labels; without it, the largest logit must be
    that of the image's label."""
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in batches:
        logits, labels = predict(images.to(device, non_blocking=True)), labels.to(device, non_blocking=True)
        correct += (logits.argmax(dim=1) == labels if right is None else right(logits, labels)).sum()
    return int(correct)
