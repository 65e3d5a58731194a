"""PGP, Prompt Gradient Projection (Qiao et al., ICLR 2024): what its versions on L2P and DualPrompt have in common.

When a task has ended, the leading directions of its features join a basis. Later gradients of the prompts lose their
share in these directions before the optimizer sees them. An adaptive optimizer such as Adam rescales the entries of
what is left, so its step is only roughly orthogonal to the basis; with plain SGD it is exactly so.
"""

import time
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from mambacl.methods.base import Method
from mambacl.tuning import Tuning
from mambacl.tuning.gradient_bases import GradientBases

BASES = "bases/"  # prefix of the bases in a task's state


class Projected(Method):
    """Comes before the method whose gradients it projects in a class's list of bases."""

    bases: GradientBases

    def make_tuning(self) -> Tuning:
        tuning = super().make_tuning()
        self.bases = GradientBases(self.num_features, next(self.model.parameters()).detach())
        return tuning

    def products(self, images: Iterable[Tensor]) -> dict[str, tuple[Tensor, float]]:
        """By the name of each basis: X^T X for what the images give as rows X, and the share that the basis holds."""
        raise NotImplementedError

    def protected_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Gradients with the name of their basis; views, because they change in place."""
        raise NotImplementedError

    @torch.no_grad()
    def project(self) -> None:
        for name, gradient in self.protected_gradients():
            self.bases.project(gradient, name)

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer = super().wrap(optimizer)
        optimizer.register_step_pre_hook(lambda *_: self.project())
        return optimizer

    @torch.no_grad()
    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        started = time.perf_counter()
        for name, (products, share) in self.products(images.to(self.device) for images, _ in batches).items():
            self.bases.grow(name, products, share)
        return {**super().finish_task(()), "bases": time.perf_counter() - started}

    def task_state_dict(self) -> dict[str, Tensor]:
        return {**super().task_state_dict(), **{BASES + name: t for name, t in self.bases.state_dict().items()}}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        own = {name.removeprefix(BASES): tensor for name, tensor in state.items() if name.startswith(BASES)}
        self.bases.load_state_dict(own)

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the bases."""
        kept = {name: tensor for name, tensor in task_state.items() if not name.startswith(BASES)}
        return super().for_answers(state, kept)
