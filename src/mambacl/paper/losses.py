"""The loss on old tasks' training images after each task, for the paper's figure of losses.

An ordinary run does not record it. `train(..., loop=LossLoop)` writes it to the run's metrics.jsonl, before the task's
checkpoint, so that an interruption neither loses nor repeats it.
"""

from pathlib import Path

import torch
import torch.nn.functional as F

from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop
from mambacl.training.step import autocast

EVENT = "old-losses"
WATCHED = 2  # the paper shows its first two tasks


class LossLoop(Loop):
    """A loop that measures the losses at the end of each task, on images transformed as in evaluation."""

    def evaluate(self, task: int) -> list[int]:
        old = range(min(task + 1, WATCHED))
        self._record(EVENT, task=task, losses=[self.loss_of(j) for j in old])
        return super().evaluate(task)

    @torch.no_grad()
    def loss_of(self, task: int) -> float:
        """Mean cross-entropy over the task's own classes, as in training."""
        first, count = self.stream.first_label(task), len(self.stream.tasks[task])
        total, images_seen = 0.0, 0
        for images, labels in self.stream.plain_batches(task, self.recipe.eval_batch_size):
            with autocast(self.device, self.bf16):
                logits = self.method.answer(images.to(self.device))
            own = logits[:, first : first + count].float()
            total += float(F.cross_entropy(own, labels.to(self.device) - first, reduction="sum"))
            images_seen += len(labels)
        return total / images_seen


def read_losses(folder: Path) -> dict[int, list[float]]:
    """The losses of the first tasks after each task (from 0); the later ones if a task was repeated."""
    return {event["task"]: event["losses"] for event in RunFolder(folder).events(EVENT, "task")}
