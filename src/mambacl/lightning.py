"""Callbacks for Lightning: `NullSpaceCallback` protects what a model has learned, `ClassifierCallback` keeps a
classifier computed from features. Call `trainer.fit` once per task, with the same callbacks.

    space = mambacl.NullSpace(module.backbone, "exact", rank="energy:0.99")
    space.freeze_others()  # and configure_optimizers takes space.parameters()
    callback = NullSpaceCallback(space)
    for loader in tasks:
        lightning.Trainer(callbacks=[callback], max_epochs=5).fit(module, loader)
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

try:
    from lightning import Callback
except ImportError as error:
    raise ImportError("mambacl.lightning needs Lightning: pip install 'mambacl[lightning]'.") from error

from mambacl.classifiers import StatisticsClassifier
from mambacl.errors import UserError
from mambacl.nullspace import NullSpace
from mambacl.nullspace.statistics import evaluating

Loader = Iterable[Any]


class AtTaskEnd(Callback):
    """Calls `finish_task` with the task's images when a fit ends normally. `loader` gives other images than those of
    the training loader, e.g. without augmentation."""

    def __init__(self, loader: Callable[[], Loader] | None = None) -> None:
        self.loader = loader

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.interrupted and not trainer.sanity_checking:
            self.finish_task(trainer, pl_module, trainer.train_dataloader if self.loader is None else self.loader())

    def finish_task(self, trainer: Any, pl_module: Any, loader: Loader) -> None:
        raise NotImplementedError


class NullSpaceCallback(AtTaskEnd):
    """Projects the steps of every optimizer that trains something of `space`, and consolidates after each fit.

    `forward` runs a batch's images through the model; by default the space's model does. Lightning's checkpoints hold
    the space.
    """

    def __init__(
        self,
        space: NullSpace,
        loader: Callable[[], Loader] | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(loader)
        self.space, self.forward = space, forward
        self._loaded: Mapping[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._loaded is not None:  # now, because the model has just been moved to its device
            if self._loaded["space"]:
                self.space.load_state_dict(self._loaded["space"])
                self.space.projected_step.load_state_dict(self._loaded["step"])
            self._loaded = None
        protected = {id(parameter) for parameter in self.space.parameters()}
        wrapped = 0
        for optimizer in trainer.optimizers:
            if any(id(p) in protected for group in optimizer.param_groups for p in group["params"]):
                self.space.wrap(optimizer)
                wrapped += 1
        if not wrapped:
            raise UserError("No optimizer has protected parameters: let configure_optimizers use space.parameters().")

    def finish_task(self, trainer: Any, pl_module: Any, loader: Loader) -> None:
        self.space.consolidate(loader, self.forward)

    def state_dict(self) -> dict[str, Any]:
        space = self.space.state_dict() if self.space.tasks else {}
        return {"space": space, "step": self.space.projected_step.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._loaded = state_dict


class ClassifierCallback(AtTaskEnd):
    """Updates a classifier, such as `Ridge`, with the features of a task's images after each fit. Batches are (images,
    labels), with labels from 0 in the order in which classes come. `features` maps images to (b, d)."""

    def __init__(
        self,
        classifier: StatisticsClassifier,
        features: Callable[[Tensor], Tensor],
        loader: Callable[[], Loader] | None = None,
    ) -> None:
        super().__init__(loader)
        self.classifier, self.features = classifier, features

    @torch.no_grad()
    def finish_task(self, trainer: Any, pl_module: Any, loader: Loader) -> None:
        if trainer.world_size > 1:
            raise UserError("ClassifierCallback works in one process: merge the processes' classifiers yourself.")
        self.classifier.to(pl_module.device)
        with evaluating(pl_module):
            for images, labels, *_ in loader:
                self.classifier.update(self.features(images.to(pl_module.device)).float(), labels)
        self.classifier.finish_task()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.classifier.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.classifier.load_state_dict(state_dict)
