"""Weights that are cut among processes (FSDP2): the same model, gradients, audit and statistics as whole ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks, outcomes
from safetensors.torch import load_file
from several_processes_help import SGD, TERMS, assert_same_outcome, train, train_few
from tolerance import assert_near, rounding
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mambacl import processes
from mambacl.backbones import create_model
from mambacl.errors import UserError
from mambacl.nullspace.shards import whole
from mambacl.nullspace.sharing import is_cut
from mambacl.training.checkpoints import Checkpoint, Position, same_for_all
from mambacl.training.clipping import clip_gradients
from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop
from mambacl.training.sharding import cut
from mambacl.training.step import TrainingStep


def features_and_gradients(names: list[str], shard: bool) -> list[tuple[Tensor, dict[str, Tensor]]]:
    found = []
    for name in names:
        torch.manual_seed(0)
        model = create_model(name, num_classes=0).eval()
        if shard:
            cut(model, torch.device("cpu"))
            assert all(is_cut(parameter) for parameter in model.parameters())
        size = model.default_cfg["input_size"][-1]
        images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
        features = model(images)
        features.square().mean().backward()
        gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        tokens = model.forward_features(images)  # an entrance of its own
        assert tokens.isfinite().all()
        found.append((features.detach(), gradients))
    return found


@pytest.mark.slow
def test_every_backbone_can_be_cut() -> None:
    names = ["defocus_mamba_nano", "vim_nano", "vmamba_nano", "mambavision_nano", "vit_nano"]
    alone = features_and_gradients(names, shard=False)
    for found in on_ranks(2, features_and_gradients, names, True):
        for name, (features, gradients), (expected, others) in zip(names, found, alone, strict=True):
            assert_near(features, expected, TERMS, name)
            largest = max(gradient.abs().max().item() for gradient in others.values())
            for parameter, gradient in others.items():
                assert_near(gradients[parameter], gradient, TERMS, f"{name} {parameter}", largest)


def test_a_method_that_needs_whole_weights_is_refused(tmp_path: Path) -> None:
    found = outcomes(2, train_few, tmp_path / "run", {"method": "ease", "shard": True})
    assert all(isinstance(one.error, UserError) and "'ease' needs whole weights" in str(one.error) for one in found)
    assert not (tmp_path / "run").exists()


def clipped(shard: bool, clip: float) -> list[Tensor]:
    """Gradients of a cut layer of seven rows and of a layer beside it, as a step has clipped them."""
    torch.manual_seed(0)
    backbone, head = nn.Sequential(nn.Sequential(nn.Linear(5, 7), nn.GELU()), nn.Sequential(nn.GELU())), nn.Linear(7, 3)
    images, labels = torch.randn(6, 5), torch.arange(6) % 3
    if shard:
        cut(backbone, torch.device("cpu"))
    parameters = [*backbone.parameters(), *head.parameters()]
    torch.nn.functional.cross_entropy(head(backbone(images)), labels).backward()
    clip_gradients(parameters, clip)
    return [whole(p.grad) for p in parameters if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_gradients_of_cut_and_whole_weights_are_clipped_together(clip: float) -> None:
    alone = clipped(False, clip)
    norm = torch.nn.utils.get_total_norm(alone)
    assert len(alone) == 4 and (norm == pytest.approx(clip, rel=1e-4) if clip < 1 else 0.1 < norm < clip)
    for found in on_ranks(2, clipped, True, clip):
        for one, other in zip(found, alone, strict=True):
            assert_near(one, other, 100)


def audits(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "audit.json").read_text())["tasks"]


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_a_cut_model_is_clipped_and_audited_like_a_whole_one(tmp_path: Path) -> None:
    overrides = {"training": {**SGD, "clip": 0.5}, "audit_images": 4}
    train(tmp_path / "1", **overrides)
    on_ranks(2, train_few, tmp_path / "2", {**overrides, "shard": True})
    assert_same_outcome(tmp_path / "2", tmp_path / "1")
    kept = sorted((tmp_path / "1" / "checkpoints").glob("audit-*"))
    assert len(kept) == 3
    for path in kept:
        for name, tensor in load_file(path).items():
            assert_near(load_file(tmp_path / "2" / "checkpoints" / path.name)[name], tensor, TERMS, name)
    for one, other in zip(audits(tmp_path / "2"), audits(tmp_path / "1"), strict=True):
        assert (
            all(one[key] == other[key] for key in ("task", "images")) and one["drift"].keys() == other["drift"].keys()
        )
        for block, drifts in other["drift"].items():
            for quantity, moved in drifts.items():  # of outputs that agree to rounding
                assert abs(one["drift"][block][quantity] - moved) <= rounding(TERMS), (block, quantity)
    assert max(max(one.values()) for one in audits(tmp_path / "1")[0]["drift"].values()) > 20 * rounding(TERMS)


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
@pytest.mark.parametrize("kind", ["linear", "adc"])
def test_drift_is_corrected_with_a_cut_model(kind: str, tmp_path: Path) -> None:
    """adc needs gradients of the images under the weights from before the task."""
    options = {"classifier": "gaussian", "classifier_options": {"drift": kind}}
    overrides = {"method": "sequential", "training": SGD, **options}
    train(tmp_path / "1", **overrides)
    on_ranks(2, train_few, tmp_path / "2", {**overrides, "shard": True})
    assert_same_outcome(tmp_path / "2", tmp_path / "1")


def step_of_pieces(images: int, accumulate: int) -> tuple[tuple[float, int, int], list[Tensor]]:
    """A step of a cut layer, of a batch whose parts have different numbers of pieces."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    draw = torch.Generator().manual_seed(1)
    x, labels = torch.randn(images, 6, generator=draw).double(), torch.randint(3, (images,), generator=draw)
    of, part = 0, slice(0, images)
    if processes.count() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (processes.count(),)))
        of, own = images, processes.part(images)
        part = own if own.start < own.stop else slice(0, 1)

    class Model:
        def loss(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            scores = model(x)
            return nn.functional.cross_entropy(scores, labels), (scores.argmax(1) == labels).sum()

    groups = [{"params": list(model.parameters()), "lr": 0.1, "base_lr": 0.1}]
    step = TrainingStep(Model(), torch.optim.SGD(groups), torch.device("cpu"), False, False, accumulate=accumulate)
    step(x[part], labels[part], 1.0, of)
    return step.take_sums(), [whole(parameter).detach() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(("images", "accumulate"), [(7, 4), (3, 2), (1, 3)])
def test_all_processes_run_a_cut_model_equally_often(images: int, accumulate: int) -> None:
    (loss, *counts), alone = step_of_pieces(images, 1)
    for (found_loss, *found), parameters in on_ranks(2, step_of_pieces, images, accumulate, timeout=30):
        assert found == counts and found_loss == pytest.approx(loss, rel=rounding(TERMS, torch.float64))
        for one, other in zip(parameters, alone, strict=True):
            assert_near(one, other, TERMS)


def read_at(folder: Path, task: int) -> str:
    """What a process says that has read a run's folder at another moment than the first."""
    here = Checkpoint(Position(task + processes.rank()), {}, {}, {}, {}, "")
    try:
        same_for_all(RunFolder(folder), here)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_checkpoints_of_different_tasks_are_refused_by_all(tmp_path: Path) -> None:
    assert all("finished another task meanwhile" in said for said in on_ranks(2, read_at, tmp_path, 1))
    assert read_at(tmp_path, 1) == ""  # alone


def kept_tasks(folder: Path, room: int) -> list[int]:
    """Tasks of whose test images this process has kept the features."""
    found: list[int] = []

    class Watched(Loop):
        def run(self, *arguments: Any) -> dict[str, Any]:
            self.room = room
            done = super().run(*arguments)
            found.extend(self.kept)
            return done

    train(folder, method="analytic", features={"depths": "final"}, shard=True, loop=Watched)
    return found


@pytest.mark.slow
def test_all_processes_keep_the_features_of_the_same_test_images(tmp_path: Path) -> None:
    """Of 400 images they have 132, 132 and 136, with 128 bytes for each; the room is in between."""
    assert on_ranks(3, kept_tasks, tmp_path / "run", 17000) == [[1], [1], [1]]
