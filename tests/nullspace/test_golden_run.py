"""Three tasks of the authors' released code, recorded step by step, reproduced through the real loop.

Taken from the recording: the initial weights, the images, the order of the batches, and the first and third head. The
recording is in float32, our side in float64: what differs is the recording's own rounding, the same on every machine.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mambacl.backbones import create_model
from mambacl.methods import Setup, Task
from mambacl.methods.mamba_cl import MambaCL
from mambacl.nullspace import SETTINGS
from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop
from mambacl.training.progress import Progress
from mambacl.training.recipe import RECIPES

RANK, STATES, CLASSES = 4, 8, 4
ROWS = {"x_proj_step": (0, RANK), "x_proj_B": (RANK, RANK + STATES), "x_proj_C": (RANK + STATES, RANK + 2 * STATES)}


class RecordedStream:
    """The recorded images in the recorded order."""

    def __init__(self, common: dict[str, Tensor]) -> None:
        self.common = common
        self.tasks = [[5, 7, 10, 2], [3, 11, 0, 1], [4, 9, 6, 8]]

    def _split(self, split: str, task: int) -> tuple[Tensor, Tensor]:
        prefix = f"data.{split}.task{task}."
        return self.common[prefix + "images"], self.common[prefix + "labels_global"]

    def first_label(self, task: int) -> int:
        return CLASSES * task

    def train_batches(self, task: int, epoch: int, batch_size: int, repeats: int = 1) -> list[tuple[Tensor, Tensor]]:
        images, labels = self._split("train", task)
        return [(images[b], labels[b]) for b in self.common["data.batch_order"][task, epoch].split(batch_size)]

    def plain_batches(self, task: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self._split("train", task)
        return zip(images.split(batch_size), labels.split(batch_size), strict=True)

    def test_batches(self, task: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self._split("eval", task)
        return zip(images.split(batch_size), labels.split(batch_size), strict=True)

    def train_count(self, task: int) -> int:
        return len(self._split("train", task)[1])

    def test_counts(self) -> list[int]:
        return [24, 32, 40]


class Watched(MambaCL):
    """Mamba-CL that takes the recorded heads and notes what it passes through."""

    def __init__(self, model: torch.nn.Module, setup: Setup, run: dict[str, Tensor]) -> None:
        super().__init__(model, setup)
        self.run, self.noted, self.task_index = run, {}, -1
        self.losses: list[float] = []

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self.task_index = task.index
        if task.index != 1:  # the second is the first's continuation, and that is for the product to do
            with torch.no_grad():
                for name, parameter in self.heads.heads[-1].named_parameters():
                    parameter.copy_(self.run[f"task{task.index}.start.param.head.{name}"])
        self.note("start")

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        steps = 0

        def note_first(*_: Any) -> None:
            nonlocal steps
            steps += 1
            if steps in (1, 6):  # six steps an epoch
                self.note("step1" if steps == 1 else "epoch1")

        super().wrap(optimizer)
        optimizer.register_step_post_hook(note_first)
        return optimizer

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, correct = super().loss(images, labels)
        self.losses.append(loss.item())
        return loss, correct

    def finish_task(self, batches: Any) -> dict[str, float]:
        self.note("end")
        seconds = super().finish_task(batches)
        for kind, tensors in (("cov_accum", self.space.covariances()), ("proj", self.space.projectors())):
            for name, value in tensors.items():
                self.noted[f"task{self.task_index}.{kind}.{public_name(name)}"] = (
                    value if kind == "cov_accum" else value.dense()
                )
        for name, decomposition in self.space.decompositions().items():
            self.noted[f"task{self.task_index}.rank.{public_name(name)}"] = decomposition.rank
        return seconds

    def note(self, moment: str) -> None:
        prefix = f"task{self.task_index}.{moment}.param."
        for name, parameter in self.model.named_parameters():
            if name.endswith("x_proj.weight"):
                for part, (a, b) in ROWS.items():
                    self.noted[prefix + name.replace("x_proj", part)] = parameter.detach()[a:b].clone()
            else:
                self.noted[prefix + name] = parameter.detach().clone()
        for name, parameter in self.heads.heads[-1].named_parameters():
            self.noted[f"{prefix}head.{name}"] = parameter.detach().clone()


def public_name(name: str) -> str:
    """`x_proj.weight[0:4]` as the released code calls it."""
    for part, (a, b) in ROWS.items():
        name = name.replace(f"x_proj.weight[{a}:{b}]", f"{part}.weight")
    return name


@pytest.fixture(scope="module")
def recorded(goldens: Path) -> dict[str, Tensor]:
    tensors = load_file(goldens / "mambacl_run" / "run_eta0.95.safetensors")
    return {name: tensor.double() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def recorded_metrics(goldens: Path) -> dict[str, Any]:
    return json.loads((goldens / "mambacl_run" / "metrics.json").read_text())["eta0.95"]


@pytest.fixture(scope="module")
def reproduced(
    goldens: Path, recorded: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Watched, dict[str, Any], RecordedStream]:
    common = {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(goldens / "mambacl_run" / "common.safetensors").items()
    }
    mamba = {"intermediate_size": 64, "state_size": STATES, "time_step_rank": RANK, "group_norm_size": 16}
    model = create_model(
        "defocus_mamba",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        use_aux_loss=False,
        num_classes=0,
        mamba=mamba,
    ).double()
    prefix = "init.pre_split."
    weights = {name.removeprefix(prefix): tensor for name, tensor in common.items() if name.startswith(prefix)}
    model.load_state_dict({name: tensor for name, tensor in weights.items() if not name.startswith("head.")})
    stream = RecordedStream(common)
    recipe = dataclasses.replace(
        RECIPES["public-code"], passes=10, passes_per_epoch=1, decay_after=[4, 7], batch_size=12,
        covariance_batch_size=24,
    )  # fmt: skip
    method = Watched(model, Setup(SETTINGS["public-code"], warm_second_head=recipe.heads == "warm-second"), recorded)
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.checkpoints.mkdir()
    loop = Loop(method, stream, recipe, folder, Progress(), {}, torch.device("cpu"))
    torch.set_default_dtype(torch.float64)  # that of new heads
    try:
        results = loop.run()
    finally:
        torch.set_default_dtype(torch.float32)
    return method, results, stream


@pytest.mark.parametrize(("moment", "tolerance"), [("start", 2e-5), ("step1", 5e-6), ("epoch1", 2e-5), ("end", 2e-5)])
def test_parameters(
    reproduced: tuple[Watched, Any, Any], recorded: dict[str, Tensor], moment: str, tolerance: float
) -> None:
    compared = 0
    for name, expected in recorded.items():
        if f".{moment}.param." in name:
            torch.testing.assert_close(reproduced[0].noted[name], expected, atol=tolerance, rtol=0)
            compared += 1
    assert compared == 3 * 12  # three tasks; two blocks of five parameters, a head of two


def test_second_head_continues_the_first(reproduced: tuple[Watched, Any, Any]) -> None:
    noted = reproduced[0].noted
    for name in ("weight", "bias"):
        assert torch.equal(noted[f"task1.start.param.head.{name}"], noted[f"task0.end.param.head.{name}"])
        assert not torch.equal(noted[f"task2.start.param.head.{name}"], noted[f"task1.end.param.head.{name}"])


@pytest.mark.parametrize("kind", ["cov_accum", "proj"])
def test_covariances_and_projectors(
    reproduced: tuple[Watched, Any, Any], recorded: dict[str, Tensor], kind: str
) -> None:
    compared = 0
    for name, expected in recorded.items():
        if f".{kind}." in name:
            error = torch.linalg.norm(reproduced[0].noted[name] - expected) / torch.linalg.norm(expected)
            assert error < 5e-6, name
            compared += 1
    assert compared == 3 * 10


def test_ranks(reproduced: tuple[Watched, Any, Any], recorded_metrics: dict[str, Any]) -> None:
    for task, ranks in enumerate(recorded_metrics["null_rank"]):
        assert len(ranks) == 10
        for name, entry in ranks.items():
            assert reproduced[0].noted[f"task{task}.rank.{name}"] == entry["null_rank"]


def test_losses_and_learning_rates(reproduced: tuple[Watched, Any, Any], recorded_metrics: dict[str, Any]) -> None:
    expected = [loss for task in recorded_metrics["loss_per_step"] for loss in task]
    assert reproduced[0].losses == pytest.approx(expected, abs=1e-5)


def test_accuracies_and_forgetting(reproduced: tuple[Watched, Any, Any], recorded_metrics: dict[str, Any]) -> None:
    _, results, stream = reproduced
    last = recorded_metrics["tasks"][-1]
    # Counts follow the machine only if two logits are alike to rounding; the closest two of an image are 0.005 apart.
    for t, row in enumerate(results["correct"]):
        assert [right / total for right, total in zip(row, stream.test_counts(), strict=False)] == [
            pytest.approx(value) for value in last["acc_matrix"][t][: t + 1]
        ]
    metrics = results["metrics"]
    assert metrics["final_accuracy_images"] == pytest.approx(last["avg_acc_official_sample_weighted"])
    assert metrics["final_accuracy_tasks"] == pytest.approx(last["avg_acc_unweighted_task_mean"])
    assert metrics["forgetting_public"] == pytest.approx(last["calc_forgetting"])
    assert metrics["forgetting"] == pytest.approx(last["forgetting_if_max_excluded_current_row"])


def test_final_logits(reproduced: tuple[Watched, Any, Any], recorded: dict[str, Tensor]) -> None:
    method, _, stream = reproduced
    with torch.no_grad():
        seen = torch.cat([method.predict(stream._split("eval", task)[0]) for task in range(3)])
    torch.testing.assert_close(seen, recorded["task2.logits_seen_eval"], atol=1e-4, rtol=0)
