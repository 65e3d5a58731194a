"""Mamba-CL: fine-tunes the selective SSM and the layer after it, with each update projected onto the null space of the
features of all earlier tasks."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mambacl import processes
from mambacl.methods.base import CLASSIFIER, START, Method
from mambacl.methods.registry import METHODS
from mambacl.nullspace import NullSpace
from mambacl.nullspace.description import in_one_line
from mambacl.nullspace.settings import SYSTEMS, Setting
from mambacl.tuning import ModelParameters, Tuning

# fields of a setting about numbers and places
STORED = ("products", "spectrum", "storage", "covariances", "projectors", "keep_tasks")


class MambaCL(Method):
    name = "mamba-cl"
    summary = "fine-tuning in the null space of earlier tasks (the paper's method)"
    adds_up = True
    takes_shards = True

    def setting(self) -> Setting:
        """How the null space is built and applied."""
        return self.setup.setting

    def by_rule(self, rule: str, **changes: Any) -> Setting:
        """The setting of another system's rule. Precisions, and where covariances are stored, remain those of the
        run."""
        return SYSTEMS[rule].override(**{name: getattr(self.setup.setting, name) for name in STORED}, **changes)

    def make_tuning(self) -> Tuning:
        shares = self.setup.share_steps
        self.space = NullSpace(self.model, self.setting(), folder=self.setup.folder, share_steps=shares)
        setting = self.space.setting
        # gradients and recursive projectors are new tensors in each step, and so are projectors that are brought; with
        # shared steps, processes exchange parameters in the middle of one
        exchanges = shares and processes.count() > 1
        if setting.acts_on == "gradient" or setting.projectors != "device" or exchanges:
            self.recordable = False  # type: ignore[misc]
        if setting.projector == "recursive":  # absorbs the mean input of the batch, which a piece is not
            self.splits = False
        self.step_state: dict[str, Tensor] = {}
        """from a checkpoint: state of the projected step, loaded with the projectors"""
        return ModelParameters(self.model, self.space.trained_names())

    def overview(self) -> str:
        return in_one_line(self.space.describe())

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self.space.wrap(optimizer)

    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        done = self.space.consolidate(batches)
        return {"covariance": done.covariance_seconds, "decomposition": done.decomposition_seconds}

    def moved(self) -> list[dict[str, Tensor]]:
        return [self.space.update_energy(task) for task in range(self.space.tasks)]

    def protected(self) -> dict[str, Any]:
        found = self.space.protected
        return {} if found is None else dataclasses.asdict(found)

    def free(self) -> dict[str, float]:
        return {name: one.rank / one.spectrum.numel() for name, one in self.space.decompositions().items()}

    def state_dict(self) -> dict[str, Tensor]:
        step_state = {f"space.{name}": tensor for name, tensor in self.space.projected_step.state_dict().items()}
        return {**super().state_dict(), **step_state}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith("space.")})
        self.step_state = {name.removeprefix("space."): t for name, t in state.items() if name.startswith("space.")}
        self.space.projected_step.load_state_dict(self.step_state)  # in the first task, no projectors follow

    def task_state_dict(self) -> dict[str, Tensor]:
        return {**self.space.state_dict(), **super().task_state_dict()}

    def task_text(self) -> dict[str, str]:
        protections = self.space.selection.protections
        parts = {p.name: {"block": p.block, "kind": p.part.kind, "feature": p.label} for p in protections}
        return {"setting": json.dumps(dataclasses.asdict(self.space.setting)), "parts": json.dumps(parts)}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        if space := {name: t for name, t in state.items() if not name.startswith((CLASSIFIER, START))}:
            self.space.load_state_dict(space)
            self.space.projected_step.load_state_dict(self.step_state)

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the null space."""
        kept = {name: tensor for name, tensor in state.items() if not name.startswith("space.")}
        return kept, {name: tensor for name, tensor in task_state.items() if name.startswith(CLASSIFIER)}


METHODS.add(MambaCL.name, MambaCL)
