"""Phases of a task: what trains in which epoch, with which loss and rate; and a run resumes in any of them."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from small_run import CONFIG
from torch import Tensor
from training_help import assert_same_run, interrupted_after

import mambacl
from mambacl.methods import METHODS, Method
from mambacl.methods.base import Phase
from mambacl.tuning import ModelParameters, Tuning

HEAD = Phase("head", roles=("classifier",), rate=0.5)
BOTH = Phase("both")
LAST = Phase("last", roles=("backbone",), new_optimizer=True)


class InPhases(Method):
    """The classifier, then both, then the biases of the steps alone."""

    name, summary = "in-phases", "for tests"
    seen: ClassVar[list[tuple[str, int]]] = []

    def make_tuning(self) -> Tuning:
        names = [name for name, _ in self.model.named_parameters() if name.endswith("dt_proj.bias")]
        return ModelParameters(self.model, names)

    def phase(self, epoch: int, epochs: int) -> Phase:
        return HEAD if epoch < 1 else BOTH if epoch < epochs - 1 else LAST

    def start_epoch(self, epoch, batches) -> None:  # type: ignore[no-untyped-def]
        self.before = self.weights()
        self.seen.append((self.current.name, sum(len(labels) for _, labels in batches())))

    def weights(self) -> tuple[Tensor, Tensor]:
        roles = self.named_parameters()
        backbone, head = (torch.cat([p.detach().flatten() for _, p in roles[r]]) for r in ("backbone", "classifier"))
        return backbone, head

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        backbone, head = (not torch.equal(a, b) for a, b in zip(self.weights(), self.before, strict=True))
        moved = {"head": (False, True), "both": (True, True), "last": (True, False)}[self.current.name]
        assert (backbone and not moved[0], head and not moved[1]) == (False, False), self.current.name
        loss, correct = super().loss(images, labels)
        return (2 * loss if self.current.name == "last" else loss), correct


@pytest.mark.usefixtures("few_test_images")
def test_a_run_in_phases_resumes_in_each_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_entries", {**METHODS._entries, InPhases.name: InPhases})
    config = {**CONFIG, "method": "in-phases", "stream": {**CONFIG["stream"], "tasks": [5, 5]}}
    config["training"] = {**CONFIG["training"], "passes": 4, "clip": 1.0, "schedule": "coda-cosine"}
    InPhases.seen.clear()
    mambacl.train(config, out=str(tmp_path / "whole"))
    assert InPhases.seen == [("head", 40), ("both", 40), ("both", 40), ("last", 40)] * 2
    for checkpoints in (1, 2, 3, 8):  # after each phase of the first task, and within the second
        broken = tmp_path / f"broken{checkpoints}"
        with interrupted_after(checkpoints):
            mambacl.train(config, out=str(broken))
        mambacl.resume(broken)
        assert_same_run(tmp_path / "whole", broken)
