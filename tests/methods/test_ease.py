"""EASE: its formulas by hand, what the method keeps, and the numbers recorded from its public code."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from adapter_methods_help import learn, new_method, small, task_data
from adapter_recordings import AdapterRecording
from prompt_recordings import FIRST, LATER
from torch import nn

from mambacl.classifiers.cosine import CosineHead
from mambacl.classifiers.subspaces import (
    class_sums,
    completed,
    completed_by_later,
    ensemble,
    mapped,
    similarities,
    weights_of_subspaces,
)
from mambacl.errors import UserError
from mambacl.methods import METHODS, Method, Setup, Task
from mambacl.training.optimizers import make_optimizer
from mambacl.training.recipe import Recipe

# The formulas


def test_class_sums_by_hand() -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    sums, counts = class_sums(features, torch.tensor([2, 0, 2]), classes=3)
    assert sums.tolist() == [[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]] and counts.tolist() == [1.0, 0.0, 2.0]


def test_the_mapping_by_hand() -> None:
    old = torch.tensor([[2.0, 0.0]])
    new, new_there = torch.tensor([[0.0, 3.0], [5.0, 5.0]]), torch.tensor([[1.0, 1.0], [0.0, 4.0]])
    odds = [math.exp(0.0), math.exp(math.sqrt(0.5))]  # of the cosines 0 and 1 / sqrt 2
    share = [odd / sum(odds) for odd in odds]
    torch.testing.assert_close(similarities(old, new), torch.tensor([share]))
    torch.testing.assert_close(mapped(old, new, new_there), torch.tensor([[share[0], share[0] + 4 * share[1]]]))


def test_only_old_classes_in_the_new_subspace_are_filled_in() -> None:
    generator = torch.Generator().manual_seed(0)
    prototypes, widths = torch.randn(6, 3, 4, generator=generator), [1, 2, 3]
    prototypes[:3, 2] = 0.0
    filled = completed(prototypes, widths)
    assert torch.equal(filled[:, :2], prototypes[:, :2]) and torch.equal(filled[3:], prototypes[3:])
    new = prototypes[3:]
    torch.testing.assert_close(filled[:1, 2], mapped(prototypes[:1, 0], new[:, 0], new[:, 2]))  # by subspace 0
    torch.testing.assert_close(filled[1:3, 2], mapped(prototypes[1:3, 1], new[:, 1], new[:, 2]))  # by subspace 1
    assert torch.equal(completed(prototypes[:2, :1], [2]), prototypes[:2, :1])  # the first task has nothing to fill in


def test_old_classes_can_be_mapped_again_by_all_that_came_later() -> None:
    prototypes = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))  # tasks of 1, 2 and 2 classes
    filled = completed_by_later(prototypes, [1, 2, 2])
    seen = [(slice(0, 1), 0, 1, slice(1, 5)), (slice(0, 1), 0, 2, slice(3, 5)), (slice(1, 3), 1, 2, slice(3, 5))]
    expected = prototypes.clone()
    for classes, own, space, later in seen:
        expected[classes, space] = mapped(prototypes[classes, own], prototypes[later, own], prototypes[later, space])
    torch.testing.assert_close(filled, expected)
    both = (completed(prototypes[:3, :2], [1, 2]), completed_by_later(prototypes[:3, :2], [1, 2]))
    assert torch.equal(*both)  # of two tasks there is nothing later


def test_weights_of_subspaces() -> None:
    a = 0.1
    expected = torch.tensor([[1, a, a], [1, a, a], [a, 1, a], [a, a, 1]])
    torch.testing.assert_close(weights_of_subspaces([2, 1, 1], a), expected)
    torch.testing.assert_close(weights_of_subspaces([1, 1, 1], a, mean=True)[0], torch.tensor([1, a / 2, a / 2]))
    assert weights_of_subspaces([3], a, mean=True).tolist() == [[1.0]] * 3


def test_the_ensemble_by_hand() -> None:
    features = [torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])]
    prototypes = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 2.0], [5.0, 0.0]]])  # (class, subspace, d)
    logits = ensemble(features, prototypes, weights_of_subspaces([1, 1], 0.1))
    torch.testing.assert_close(logits, torch.tensor([[0.6 + 0.1 * 1.0, 0.1 * 0.8 + 0.0]]))


def test_the_cosine_classifier_by_hand() -> None:
    head = CosineHead(2, classes=2, seed=0, scale=4.0)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0, 9.0], [1.0, 1.0]]))
    torch.testing.assert_close(head(torch.tensor([[0.0, 3.0]])), torch.tensor([[4.0, 4.0 * math.sqrt(0.5)]]))
    assert torch.equal(CosineHead(3, 2, seed=1).weight, CosineHead(3, 2, seed=1).weight)


# The method


def test_prototypes_are_the_mean_features_of_each_subspace() -> None:
    method = new_method("ease")
    learn(method, range(2), steps=4)
    prototypes = method.prototypes
    assert prototypes.shape == (4, 2, 32)
    with torch.no_grad():
        for task in range(2):
            images, labels = task_data(task, 2, seed=task)
            for space in range(task + 1):
                with method.adapters.using(space):
                    features = method.model(images)
                for label in (2 * task, 2 * task + 1):
                    expected = features[labels == label].mean(0)
                    torch.testing.assert_close(prototypes[label, space], expected, rtol=1e-4, atol=1e-5)
        there = mapped(prototypes[:2, 0], prototypes[2:, 0], prototypes[2:, 1])
        torch.testing.assert_close(prototypes[:2, 1], there)


def test_prototypes_do_not_depend_on_the_batches() -> None:
    whole, parts = new_method("ease"), new_method("ease")
    images, labels = task_data(0, 3, seed=0)
    for method, size in ((whole, len(images)), (parts, 5)):
        method.start_task(Task(0, 3, 0, seed=0))
        method.finish_task(list(zip(images.split(size), labels.split(size), strict=True)))
    torch.testing.assert_close(whole.prototypes, parts.prototypes)


def test_old_subspaces_and_prototypes_stay_bit_for_bit() -> None:
    method = new_method("ease")
    learn(method, range(1), steps=4)
    before = {key: tensor.clone() for key, tensor in method.task_state_dict().items()}
    learn(method, range(1, 3), steps=4)
    after = method.task_state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items() if key != "prototypes")
    assert torch.equal(after["prototypes"][:2, :1], before["prototypes"])


def test_predictions_are_the_reweighted_cosines() -> None:
    method = new_method("ease", alpha=0.3)
    learn(method, range(2), steps=4)
    images, _ = task_data(0, 2, seed=5)
    with torch.no_grad():
        features = []
        for space in range(2):
            with method.adapters.using(space):
                features.append(method.model(images))
        expected = torch.zeros(len(images), 4)
        for label in range(4):
            for space in range(2):
                cosine = torch.cosine_similarity(features[space], method.prototypes[label, space], dim=1)
                expected[:, label] += cosine if space == label // 2 else 0.3 * cosine
        torch.testing.assert_close(method.predict(images), expected)
        mean = new_method("ease", alpha=0.3, others="mean")
        mean.load_state_dict(method.state_dict())
        mean.load_task_state_dict(method.task_state_dict())
        torch.testing.assert_close(mean.predict(images), expected)  # two tasks: one other subspace


def test_what_is_kept_each_epoch_does_not_grow_with_the_tasks() -> None:
    method = new_method("ease")
    learn(method, range(3), steps=1)
    assert list(method.state_dict()) == ["finished"]
    method.start_task(Task(3, 2, 6, seed=3))
    assert {key.split(".")[1] for key in method.state_dict() if key != "finished"} == {"3"}
    assert {key.split(".")[1] for key in method.task_state_dict() if key != "prototypes"} == {"0", "1", "2"}


def test_prototypes_mapped_by_later_classes_change_with_each_task() -> None:
    kept = {}
    for mapped_by in ("new", "later"):
        method = new_method("ease", mapped_by=mapped_by)
        learn(method, range(2), steps=2)
        before = method.prototypes.clone()
        learn(method, range(2, 3), steps=2)
        assert torch.equal(method.prototypes[2:4, 1], before[2:4, 1])  # in their own subspace
        kept[mapped_by] = torch.equal(method.prototypes[:2, 1], before[:2, 1])
    assert kept == {"new": True, "later": False}


def test_adapters_are_beside_the_mlps_of_a_vit_unless_told_otherwise() -> None:
    images = task_data(0, 2, seed=0)[0]
    for options, reads_normed in (({}, False), ({"place": "mixer"}, True)):
        method = new_method("ease", "vit_nano", **options)
        method.start_task(Task(0, 2, 0, seed=0))
        read: list[torch.Tensor] = []
        method.adapters.adapters[0][0].register_forward_pre_hook(lambda _, given, read=read: read.append(given[0]))
        method.loss(images, torch.zeros(len(images), dtype=torch.int64))
        means = read[0].mean(2)  # of tokens after a norm that has not been trained: 0
        assert (means.abs().max() < 1e-5) == reads_normed


def test_known_classes_have_the_backbones_subspace() -> None:
    """Nothing is trained in the first task: its prototypes are the plain backbone's mean features."""
    model = small("defocus_mamba_nano")
    method = METHODS.get("ease")(model, Setup(known_classifier=nn.Linear(32, 2)))
    method.start_task(Task(0, 2, 0, seed=0))
    images, labels = task_data(0, 2, seed=0)
    assert torch.equal(method.heads.heads[0].weight, method.setup.known_classifier.weight)
    method.finish_task([(images, labels)])
    with torch.no_grad():
        expected = torch.stack([model(images[labels == c]).mean(0) for c in range(2)])
    torch.testing.assert_close(method.prototypes[:, 0], expected, rtol=1e-4, atol=1e-5)


def test_between_tasks_the_model_is_the_backbone() -> None:
    method, plain = new_method("ease"), small("defocus_mamba_nano")
    learn(method, range(1), steps=3)
    images, _ = task_data(0, 2, seed=0)
    assert torch.equal(method.model(images), plain(images))


def test_logits_are_in_full_precision_under_autocast() -> None:
    method = new_method("ease")
    learn(method, range(2), steps=1)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert method.predict(task_data(0, 2, seed=5)[0]).dtype == torch.float32
        loss, _ = method.loss(*task_data(1, 2, seed=5))
        assert loss.dtype == torch.float32 and loss.isfinite()


def test_wrong_options() -> None:
    for wrong in ({"alpha": -0.1}, {"others": "max"}, {"mapped_by": "old"}, {"cosine_scale": 0.0}):
        with pytest.raises(UserError, match=rf"^(options\.|ease: ){next(iter(wrong))} "):
            new_method("ease", **wrong)


# As recorded


def recorded_parameters(method: Method) -> dict[str, nn.Parameter]:
    """The current task's, by their recorded names."""
    adapters = {name.split(".", 2)[2]: p for name, p in method.adapters.trained()}
    head = method.heads.heads[-1]
    return {
        **{re.sub(r"^(\d+)", r"block\1", name): parameter for name, parameter in adapters.items()},
        "head_weight": head.weight,
        "head_scale": head.scale,
    }


def test_three_tasks_as_recorded() -> None:
    """github.com/sun-hailong/CVPR24-Ease at 6d67508, on its ViT: adapters beside the MLPs."""
    recording = AdapterRecording("ease")
    c, classes = recording.config, recording.classes
    options = {"variant": "public-code", "bottleneck": c["bottleneck"], "alpha": c["alpha"]}
    method = METHODS.get("ease")(recording.model(), Setup(options=options))
    recipe = Recipe(optimizer="sgd", weight_decay=c["weight_decay"], schedule="epoch-cosine", passes=c["epochs"])
    for task in range(c["tasks"]):
        method.start_task(Task(task, classes, task * classes, seed=task))
        method.heads.double()
        parameters = recorded_parameters(method)
        with torch.no_grad():
            for name, tensor in recording.under(f"task{task}.initial.").items():
                parameters[name].copy_(tensor)
        optimizer = make_optimizer(recipe, [{"params": [*parameters.values()], "lr": c["lr"]}])
        losses, rates = [], []
        for step in range(c["epochs"] * c["batches"]):
            (group,) = optimizer.param_groups
            group["lr"] = c["lr"] * recipe.lr_factor(step // c["batches"])
            loss, _ = method.loss(*recording.batch(task, step))
            optimizer.zero_grad()
            loss.backward()
            for name, parameter in parameters.items() if step == 0 else ():
                grad = parameter.grad.reshape(recording[f"task{task}.step0.gradient.{name}"].shape)
                recording.near(f"task{task}.step0.gradient.{name}", grad, FIRST)
            optimizer.step()
            losses.append(loss.detach())
            rates.append(torch.tensor(group["lr"], dtype=torch.float64))
        recording.near(f"task{task}.losses", torch.stack(losses), FIRST if task == 0 else LATER)
        recording.near(f"task{task}.learning_rates", torch.stack(rates), FIRST)
        for name, parameter in parameters.items():
            found = parameter.reshape(recording[f"task{task}.final.{name}"].shape)
            recording.near(f"task{task}.final.{name}", found, LATER)
        before = F.pad(method.prototypes, (0, 0, 0, 1))
        method.finish_task(recording.batches(task))
        before = torch.cat((before, method.prototypes[task * classes :]))  # the task's own classes stay as they are
        recording.near(f"task{task}.prototypes_before_completion", before.flatten(1), LATER)
        recording.near(f"task{task}.prototypes", method.prototypes.flatten(1), LATER)
        with torch.no_grad():
            features = torch.cat(method._subspaces(recording["test.images"]), dim=1)
            recording.near(f"task{task}.test.features_all_subspaces", features, LATER)
            recording.near(f"task{task}.test.logits", method.predict(recording["test.images"]), LATER)
    recording.assert_all_compared()
