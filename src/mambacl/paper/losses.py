"""The loss of old tasks' training images after each task, as the paper's figure of losses has it.

A run does not keep it by itself. `train(..., loop=LossLoop)` writes it to the run's metrics.jsonl, before the
checkpoint of the task, so that an interruption neither loses nor repeats it.
"""

from pathlib import Path

import torch
import torch.nn.functional as F

from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop

EVENT = "old-losses"
WATCHED = 2  # the paper shows its first two tasks


class LossLoop(Loop):
    """A loop that measures at the end of each task, with the images as in evaluation."""

    def evaluate(self, task: int) -> list[int]:
        old = range(min(task + 1, WATCHED))
        self._record(EVENT, task=task, losses=[self.loss_of(j) for j in old])
        return super().evaluate(task)

    @torch.no_grad()
    def loss_of(self, task: int) -> float:
        """Mean cross-entropy over the task's own classes, which is what was trained."""
        first, count = self.stream.first_label(task), len(self.stream.tasks[task])
        total, images_seen = 0.0, 0
        for images, labels in self.stream.plain_batches(task, self.recipe.eval_batch_size):
            with self._autocast():
                logits = self.method.predict(images.to(self.device))
            own = logits[:, first : first + count].float()
            total += float(F.cross_entropy(own, labels.to(self.device) - first, reduction="sum"))
            images_seen += len(labels)
        return total / images_seen


def read_losses(folder: Path) -> dict[int, list[float]]:
    """By task learned (from 0), the losses of the first tasks; of a task that was repeated, the later ones."""
    return {event["task"]: event["losses"] for event in RunFolder(folder).events(EVENT, "task")}
