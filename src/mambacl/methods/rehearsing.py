"""What iCaRL and DER share: a memory of training images, which join the batches of later tasks."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from mambacl.classifiers.exemplars import ExemplarMemory
from mambacl.methods.base import Method
from mambacl.ops.precision import at_least_float32
from mambacl.stored import StoredImages
from mambacl.tuning import Tuning

STORED = "stored/"  # prefix of the memory in a task's state


class Rehearsing(Method):
    """Comes before the method whose features herding uses in a class's list of bases. Its options are
    `MemoryOptions`."""

    stores_images: ClassVar[bool] = True
    own_answer: ClassVar[bool] = True
    needs_task_state = True

    def make_tuning(self) -> Tuning:
        self.options.room(self.setup.classes)  # raises if there is none
        self.memory = ExemplarMemory(self.options)
        return super().make_tuning()

    def overview(self) -> str:
        return f"{super().overview()}\n{self.options.words(self.setup.classes)}"

    def stored(self) -> StoredImages | None:
        return self.memory.stored()

    def keep_images(self, read: Callable[[int], Tensor]) -> None:
        self.memory.keep(read)

    @torch.no_grad()
    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        started = time.perf_counter()
        features, labels = [], []
        for images, own in batches:
            found = at_least_float32(self.features(images.to(self.device)))
            features.append(found / (found.norm(dim=1, keepdim=True) + 1e-8))  # as PyCIL avoids a division by 0
            labels.append(own.cpu())
        rows, every = torch.cat(features), torch.cat(labels)
        first = sum(self.heads.widths[:-1])
        kept = self.memory.update(rows, every, first, self.heads.classes, self.task)
        self.learn_stored(rows[kept], every[kept].to(self.device))
        return {"herding": time.perf_counter() - started}

    def learn_stored(self, features: Tensor, labels: Tensor) -> None:
        """Called with the normalised features of the images that are stored now."""

    def task_state_dict(self) -> dict[str, Tensor]:
        own = {STORED + name: tensor for name, tensor in self.memory.state_dict().items()}
        return {**super().task_state_dict(), **own}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        own = {name.removeprefix(STORED): t for name, t in state.items() if name.startswith(STORED)}
        if own:  # what only predicts has none
            self.memory.load_state_dict(own)

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the stored images."""
        return super().for_answers(state, {n: t for n, t in task_state.items() if not n.startswith(STORED)})
