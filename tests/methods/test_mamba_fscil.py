"""Mamba-FSCIL: its neck and losses as recorded from public code, its memory, every backbone; and that it learns."""

from pathlib import Path

import pytest
import torch
from block_models import build
from safetensors.torch import load_file
from small_run import CONFIG
from tiny_stream_help import accuracy, images_of, learn, tiny_vit
from torch import Tensor, nn
from training_help import assert_same_run, interrupted_after

import mambacl
from mambacl.classifiers.etf import EtfHeads, simplex
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.tuning.mamba_neck import mean_norm, separation

SMALL = {"states": 4, "rank": 3, "hidden": 10}
FIRST, LATER = 1e-9, 1e-7  # relative to a tensor's largest value: before and after the first update


class Maps(nn.Module):
    """A backbone whose images are its maps."""

    num_features = 8

    def __init__(self) -> None:
        super().__init__()
        self.like = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward_intermediates(self, images: Tensor, *_: object, **__: object) -> list[Tensor]:
        return [images]


def near(found: Tensor, stored: Tensor, tolerance: float) -> None:
    assert found.shape == stored.shape
    assert (found.detach() - stored).abs().max() <= tolerance * stored.abs().max().clamp(min=1e-3)


def test_as_recorded(goldens: Path) -> None:
    """Outputs, gates, dt, B and C, all losses, the gradients and three SGD steps of the new branch, with a batch that
    has base and novel classes: here the base classes are the memory, the others the images."""
    recorded = load_file(goldens / "mamba_fscil.safetensors")
    weights = {"head": 10.0, "suppress": 10.0, "encourage": 1e-3, "separate": 0.1}
    options = {**SMALL, "variant": "public-code", "balance": False, "mix": 0.0, **weights}
    method = METHODS.get("mamba-fscil")(Maps(), Setup(options=options, classes=6))
    for task, classes in enumerate((4, 2)):
        method.start_task(Task(task, classes, 4 * task, seed=0))
        rows = recorded["class_vectors"].T[4 * task : 4 * task + classes]
        method.heads.heads[task].weight = rows.clone()
    with torch.no_grad():
        for branch in ("base", "new"):
            for name, parameter in getattr(method.neck, branch).named_parameters():
                parameter.copy_(recorded[f"initial.{branch}_branch.{name}"])
    maps, labels = recorded["feature_maps"], recorded["labels"]
    is_base = labels < 4
    assert is_base[: is_base.sum()].all()  # so that the recorded order is that of the method
    method.kept_maps, method.base_rows = (maps[is_base], labels[is_base]), int(is_base.sum())
    named = dict(method.named_parameters()["backbone"])
    optimizer = torch.optim.SGD(named.values(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for step in range(4):
        tolerance, prefix = (FIRST if step == 0 else LATER), f"step{step}."
        output, seen = method.neck(maps, True)
        near(output, recorded[prefix + "output"], tolerance)
        near(seen.gates, recorded[prefix + "gate_sum"], tolerance)
        near(output - seen.pooled, recorded[prefix + "base_output"], tolerance)
        if step == 0:
            base = method.neck.base(maps)
            for place, first in (("base_branch", base.first), ("new_branch", seen.first)):
                for name, tensor in (("delta_low_rank", first.dt), ("B", first.B), ("C", first.C)):
                    near(tensor.mT[:, None], recorded[f"{prefix}{place}.{name}"], tolerance)
        shown, groups = seen.gates, (is_base, ~is_base)
        terms = {"head": 10 * method.heads.regression(output, labels)}
        terms["suppression_base"] = 10 * mean_norm(shown[is_base])
        terms["suppression_novel"] = -1e-3 * mean_norm(shown[~is_base])
        for name, part in (("delta", seen.first.dt), ("B", seen.first.B), ("C", seen.first.C)):
            terms[f"separation_{name}"] = 0.1 * separation(*(part[group] for group in groups))
        for name, term in terms.items():
            near(term, recorded[f"{prefix}loss.{name}"], tolerance)
        loss, _ = method.loss(maps[~is_base], labels[~is_base])
        near(loss, sum(recorded[f"{prefix}loss.{name}"] for name in terms), tolerance)
        if step == 3:
            break
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            for name, parameter in named.items():
                near(parameter.grad, recorded[name.replace("prompts.neck.new.", "step0.gradient.new_branch.")], FIRST)
        assert all(parameter.grad is None for parameter in method.neck.base.parameters())
        optimizer.step()
    for name, parameter in named.items():
        near(parameter, recorded[name.replace("prompts.neck.new.", "final.new_branch.")], LATER)


# Fixed heads


@pytest.mark.parametrize("classes", [2, 7, 20])
def test_a_simplex(classes: int) -> None:
    products = simplex(20, classes, seed=1)
    products = products @ products.T
    expected = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1)
    torch.testing.assert_close(products, expected, rtol=0, atol=1e-13)


def test_heads_take_the_vertices_in_turn() -> None:
    heads = EtfHeads(20, total=7, seed=1)
    heads.add_task(4, seed=5)
    heads.add_task(3, seed=6, warm_start=True)
    torch.testing.assert_close(heads.rows(), simplex(20, 7, seed=1).float())
    features = torch.randn(5, 20)
    expected = torch.nn.functional.normalize(features, dim=1) @ heads.rows().T
    torch.testing.assert_close(heads.scores(3 * features), expected)
    assert not list(heads.parameters())
    with pytest.raises(UserError, match="room for 7 classes, but 8 are to be learned"):
        heads.add_task(1)
    with pytest.raises(UserError, match=r"simplex of 30 classes .* 20"):
        EtfHeads(20, total=30)


def test_classes_that_count_alike_and_mixed_rows() -> None:
    heads, labels = EtfHeads(6, total=4), torch.tensor([0, 0, 0, 1])
    heads.add_task(4)
    features = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    each = 0.5 * (heads.scores(features)[range(4), labels] - 1).square()
    torch.testing.assert_close(heads.regression(features, labels), each.mean())
    alike = (each[:3].mean() + each[3]) / 2
    torch.testing.assert_close(heads.regression(features, labels, balance=True), alike)
    found = set()
    for seed in range(6):
        torch.manual_seed(seed)
        other = torch.rand(4).argsort()
        mixed = (features + features[other]) / 2
        both = [0.5 * (heads.scores(mixed)[range(4), chosen] - 1).square().mean() for chosen in (labels, labels[other])]
        torch.manual_seed(seed)
        loss = heads.regression(features, labels, mix=1.0)
        torch.testing.assert_close(loss, sum(both) / 2, rtol=1e-6, atol=1e-6)
        found.add(float(heads.regression(features, labels, mix=0.5)) == float(each.mean()))
    assert found == {True, False}


# The method


def tasks(model: nn.Module, count: int = 2, **options: object):
    method = METHODS.get("mamba-fscil")(model, Setup(options={**SMALL, **options}, classes=6))
    for task in range(count):
        method.start_task(Task(task, 2, 2 * task, seed=task))
        images, labels = images_of(task)
        if task + 1 < count:
            method.finish_task([(images[:5], labels[:5]), (images[5:], labels[5:])])
    return method


def test_the_memory_has_a_mean_map_per_class(tiny_model) -> None:
    method = tasks(tiny_model(), count=3)
    maps, labels = method.kept_maps
    assert labels.tolist() == [0, 1, 2, 3] and maps.shape == (4, 32, 2, 2) and method.base_rows == 2
    images, own = images_of(1)
    expected = torch.stack([method.maps(images[own == c]).mean(0) for c in (2, 3)])
    torch.testing.assert_close(maps[2:].float(), expected, rtol=1e-5, atol=1e-5)
    state = method.task_state_dict()
    other = METHODS.get("mamba-fscil")(tiny_model(), Setup(options=SMALL))  # does not know the number of classes
    other.load_state_dict(method.state_dict())
    other.load_task_state_dict(state)
    assert torch.equal(other.kept_maps[0], maps) and other.base_rows == 2
    assert torch.equal(other.heads.rows(), method.heads.rows())
    with pytest.raises(UserError, match="room for 6 classes"):
        other.start_task(Task(3, 2, 6, seed=0))
    assert method.for_answers(method.state_dict(), state)[1] == {}


def test_the_pooled_map_by_hand(tiny_model) -> None:
    """Of De-focus Mamba: patches in rows after the last norm, without the class token, pooled to 2 x 2."""
    model = tiny_model()
    method = tasks(model, count=1)
    images, _ = images_of(0)
    with torch.no_grad():
        patches = model.forward_features(images)[:, :-1].unflatten(1, (4, 4))  # (b, h, w, c)
        quarters = patches.unflatten(1, (2, 2)).unflatten(3, (2, 2)).mean((2, 4))
        torch.testing.assert_close(method.maps(images), quarters.permute(0, 3, 1, 2))
        closed = method.features(images)
        method.finish_task([images_of(0)])
        method.start_task(Task(1, 2, 2, seed=1))
        assert torch.equal(method.features(images), closed)  # the new branch begins closed


def test_what_trains() -> None:
    method = tasks(tiny_vit(), count=2)
    names = {name for name, _ in method.named_parameters()["backbone"]}
    assert names == {f"prompts.neck.new.{name}" for name, _ in method.neck.new.named_parameters()}
    first = tasks(tiny_vit(), count=1)
    assert all(name.startswith("prompts.neck.base.") for name, _ in first.named_parameters()["backbone"])
    assert first.named_parameters()["classifier"] == []


@pytest.mark.parametrize("variant", ["paper", "public-code"])
@pytest.mark.parametrize("name", ["defocus", "vim", "vmamba", "vanilla_vmamba", "mambavision", "vit"])
def test_every_backbone(name: str, variant: str) -> None:
    model = tiny_vit() if name == "vit" else build(name)[0]
    method = tasks(model, variant=variant)
    images, labels = images_of(1)
    loss, _ = method.loss(images, labels)
    loss.backward()
    grads = [parameter.grad for _, parameter in method.named_parameters()["backbone"]]
    assert all(grad is not None and torch.isfinite(grad).all() for grad in grads)
    assert any(grad.abs().max() > 0 for grad in grads)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert method.predict(images).shape == (16, 4)


def test_the_paper_suppresses_the_output() -> None:
    """Against the public code's loss of the same branch, only that term differs."""
    both = {}
    for variant in ("paper", "public-code"):
        method = tasks(tiny_vit(), variant=variant, mix=0.0)
        with torch.no_grad():
            method.neck.new.ssm.in_proj.weight.normal_(generator=torch.Generator().manual_seed(3))
            images, labels = images_of(1)
            _, seen = method.neck(torch.cat((method.kept_maps[0].float(), method.maps(images))), True)
            shown = seen.pooled if variant == "paper" else seen.gates
            term = 100 * mean_norm(shown[:2]) - 1e-5 * mean_norm(shown[2:])
            both[variant] = method.loss(images, labels)[0] - term
    torch.testing.assert_close(both["paper"], both["public-code"], rtol=1e-4, atol=1e-4)


def test_it_learns() -> None:
    """Suppression divides by the number of values, 32 here and 38,400 as published: its weight is smaller."""
    method, losses = learn("mamba-fscil", {**SMALL, "suppress": 1.0}, epochs=80, lr=0.02, classes=4)
    for task in range(2):
        assert losses[task][-1][1] < losses[task][0][1]
        assert accuracy(method, task) >= 0.9  # among all four classes


@pytest.mark.usefixtures("few_test_images")
def test_a_few_shot_run(tmp_path: Path) -> None:
    """Two sessions of 2-way 3-shot; it resumes in the middle of a session bit for bit."""
    stream = {"scenario": "few-shot", "first_task": 6, "way": 2, "shot": 3, "tasks": 3, "order": "natural"}
    chosen = {"method": "mamba-fscil", "options": SMALL, "stream": stream, "training.head_lr": 5e-3}
    run = mambacl.train(CONFIG, out=str(tmp_path / "whole"), **chosen)
    with interrupted_after(6):
        mambacl.train(CONFIG, out=str(tmp_path / "broken"), **chosen)
    mambacl.resume(tmp_path / "broken")
    assert_same_run(run.folder, tmp_path / "broken")
    assert mambacl.evaluate(run.folder).counted == run.results["correct"][-1]
    assert run.results["tasks"][1:] == [[6, 7], [8, 9]]


@pytest.mark.parametrize(
    "setup, words",
    [
        (Setup(classifier="lda"), "mamba-fscil predicts by its fixed vertices"),
        (Setup(known_classifier=nn.Linear(16, 2)), "set known_classes to false"),
        (Setup(options={"side": 0}), "side must be at least 1"),
        (Setup(classes=100), "simplex of 100 classes"),
    ],
)
def test_a_mistake_gets_one_sentence(setup: Setup, words: str) -> None:
    with pytest.raises(UserError, match=words):
        METHODS.get("mamba-fscil")(tiny_vit(), setup)
