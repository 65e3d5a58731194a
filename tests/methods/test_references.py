"""SimpleCIL, APER, RanPAC and SLCA: numbers recorded from their public code, and what each may and may not change."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_methods_help import FAMILIES, learn, new_method, small, task_data
from recorded_vit_help import RecordedViT, first_task, images_of, recorded_method
from safetensors.torch import load_file
from torch import Tensor, nn

from mambacl.classifiers import AlignedHeads, NearestMean, Ridge
from mambacl.classifiers.aligned import SLCA, align
from mambacl.errors import UserError
from mambacl.methods import METHODS, Method, Setup, Task
from mambacl.methods.slca import final_norm
from mambacl.training.optimizers import make_optimizer
from mambacl.training.recipe import Recipe
from mambacl.tuning.adapters import AdapterOptions, AdapterSets, usual_place
from mambacl.tuning.scale_shift import ScaleShiftSets, scaled

FIRST_TASK = ["aper", "ranpac"]
FORWARD, STEPS = 1e-9, 1e-7  # relative to the largest value: see the recordings' table


def assert_recorded(found: Tensor, expected: Tensor, tolerance: float = STEPS) -> None:
    assert found.shape == expected.shape
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error <= tolerance, f"off by {error:.3g}"


def learn_recorded(method: Method, recorded: dict[str, Tensor], task: int) -> None:
    """What follows the steps of a task."""
    if task:
        method.start_task(Task(task, classes=3, first_label=3 * task, seed=task))
    method.finish_task([images_of(recorded, task)])
    method.fit_classifier([images_of(recorded, task)])


def assert_tuned(method: Method, losses: list[Tensor], recorded: dict[str, Tensor], prefix: str = "") -> None:
    assert_recorded(losses[0], recorded[f"{prefix}task0.step1.loss"], FORWARD)
    for step, loss in enumerate(losses, start=1):
        assert_recorded(loss, recorded[f"{prefix}task0.step{step}.loss"])
    for key, parameter in method.tuning.trained():
        _, _, block, layer, kind = key.split(".")
        assert_recorded(parameter.detach(), recorded[f"{prefix}tuned.block{block}.adapter.{layer}.{kind}"])
    head = method.heads.heads[0]
    assert_recorded(head.weight.detach(), recorded[f"{prefix}tuned.head.weight"])  # type: ignore[operator]
    assert_recorded(head.scale.detach()[None], recorded[f"{prefix}tuned.head.sigma"])  # type: ignore[index, operator]


# The recordings: github.com/LAMDA-CL/LAMDA-PILOT at 5240714, github.com/RanPAC/RanPAC at 012927f


@torch.no_grad()
def test_simplecil_as_recorded(goldens: Path) -> None:
    recorded = load_file(goldens / "simplecil_aper.safetensors")
    method = METHODS.get("simplecil")(RecordedViT(recorded), Setup())
    for task in range(3):
        method.start_task(Task(task, classes=3, first_label=3 * task, seed=task))
        features = method.classifier_input(images_of(recorded, task)[0])
        assert_recorded(features, recorded[f"simplecil.task{task}.features"], FORWARD)
        method.fit_classifier([images_of(recorded, task)])
        assert_recorded(method.classifier.means(), recorded[f"simplecil.task{task}.prototypes"], FORWARD)
        scores = method.predict(recorded["test.images"].double())
        assert_recorded(scores, recorded[f"simplecil.task{task}.test_logits"], FORWARD)


def test_aper_as_recorded(goldens: Path) -> None:
    recorded = load_file(goldens / "simplecil_aper.safetensors")
    method = recorded_method("aper", recorded)
    assert_tuned(method, first_task(method, recorded), recorded, "aper.")
    with torch.no_grad():
        for task in range(3):
            learn_recorded(method, recorded, task)
            features = method.classifier_input(images_of(recorded, task)[0])
            assert_recorded(features, recorded[f"aper.task{task}.features"])
            assert_recorded(method.classifier.means(), recorded[f"aper.task{task}.prototypes"])
            scores = method.predict(recorded["test.images"].double())
            assert_recorded(scores, recorded[f"aper.task{task}.test_logits"])


def test_ranpac_as_recorded(goldens: Path) -> None:
    recorded = load_file(goldens / "ranpac.safetensors")
    method = recorded_method("ranpac", recorded, width=40, storage="float64")
    classifier = method.classifier
    assert isinstance(classifier, Ridge)
    classifier.projection = recorded["random_projection"].double()
    assert_tuned(method, first_task(method, recorded), recorded)
    classifier.add_task(6)  # the recording's targets have a column for every class of all tasks
    with torch.no_grad():
        for task in range(3):
            features, labels = method.classifier_input(images_of(recorded, task)[0]), recorded[f"task{task}.labels"]
            assert_recorded(features, recorded[f"task{task}.features"])
            classifier.update(features, labels)
            classifier.finish_task()
            assert classifier.ridge == recorded[f"task{task}.ridge"]
            assert_recorded(classifier.sums.T, recorded[f"task{task}.class_sums"])
            seen = 3 * (task + 1)
            assert_recorded(classifier.weights[:seen], recorded[f"task{task}.weight"])
            scores = method.predict(recorded["test.images"].double())[:, :seen]
            assert_recorded(scores, recorded[f"task{task}.test_logits"])


class Encoder(nn.Module):
    """The stand-in for the backbone in SLCA's recording."""

    num_features = 12

    def __init__(self, recorded: dict[str, Tensor]) -> None:
        super().__init__()
        self.encoder = nn.Linear(12, 12)
        self.encoder.load_state_dict({name: recorded[f"encoder.{name}"] for name in ("weight", "bias")})
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.encoder(inputs))


@pytest.mark.slow
def test_slca_as_recorded(goldens: Path) -> None:
    """github.com/GengDavid/SLCA at 169d4e6. Samples are the recorded ones."""
    recorded = load_file(goldens / "slca.safetensors")
    method = METHODS.get("slca")(Encoder(recorded), Setup(classifier_options={"accumulate": False}))
    classifier = method.classifier
    assert isinstance(classifier, AlignedHeads)
    recipe = Recipe(optimizer="sgd", lr=0.005, head_lr=0.05, weight_decay=5e-4, passes=3, decay_after=[2])
    options = dataclasses.replace(classifier.options, epochs=2, samples=6, lr=0.05)
    for task in range(3):
        at = f"task{task}."
        inputs, labels = recorded[at + "inputs"].double(), recorded[at + "labels"]
        method.start_task(Task(task, classes=3, first_label=3 * task, seed=task))
        classifier.heads.double()
        head = {name: recorded[f"{at}init.head.{name}"] for name in ("weight", "bias")}
        classifier.heads[-1].load_state_dict(head)
        roles = method.named_parameters()
        rates = {"backbone": recipe.lr, "classifier": recipe.head_lr}
        optimizer = make_optimizer(
            recipe, [{"params": [p for _, p in roles[role]], "lr": rates[role]} for role in roles]
        )
        for epoch in range(recipe.epochs):
            for group, rate in zip(optimizer.param_groups, rates.values(), strict=True):
                group["lr"] = rate * recipe.lr_factor(epoch)
            loss, _ = method.loss(inputs, labels)
            assert_recorded(
                loss.detach(), recorded[f"{at}train.step{epoch + 1}.loss"], STEPS if task + epoch else FORWARD
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for name, parameter in method.tuning.trained():
            assert_recorded(parameter.detach(), recorded[f"{at}trained.{name}"])
        with torch.no_grad():
            classifier.update(method.classifier_input(inputs), labels)
            weight, bias = classifier._start()
            assert_recorded(weight, recorded[f"{at}trained.head.weight"])
            assert_recorded(bias, recorded[f"{at}trained.head.bias"])
            assert_recorded(classifier.statistics.means(), recorded[f"{at}class_means"])
            features = method.classifier_input(recorded["test.inputs"].double())
        if task:
            steps = [(recorded[f"{at}align.iter{i}.features"], recorded[f"{at}align.iter{i}.labels"])
                     for i in range(6 * (task + 1))]  # fmt: skip
            epochs = [steps[: len(steps) // 2], steps[len(steps) // 2 :]]
            weight, bias = align(weight, bias, epochs, classifier.widths, options)
            assert_recorded(weight, recorded[f"{at}aligned.head.weight"])
        assert_recorded(nn.functional.linear(features, weight, bias), recorded[f"{at}test_logits"])


# Tuning in the first task


@pytest.mark.parametrize("name", FIRST_TASK)
@pytest.mark.parametrize("family", [FAMILIES[0], pytest.param(FAMILIES[3], marks=pytest.mark.slow)])
def test_adapters_train_in_the_first_task_and_then_stay(name: str, family: str) -> None:
    method = METHODS.get(name)(small(family), Setup(classifier_options={"width": 50} if name == "ranpac" else {}))
    assert [method.trains_in(task) for task in range(3)] == [True, False, False] and method.features_stay
    weights = {key: tensor.clone() for key, tensor in method.model.state_dict().items()}
    start = {key: tensor.clone() for key, tensor in method.tuning.state_dict().items()}
    learn(method, range(1), steps=5)
    tuned = {key: tensor.clone() for key, tensor in method.tuning.state_dict().items()}
    assert any(not torch.equal(tuned[key], tensor) for key, tensor in start.items())
    method.fit_classifier([task_data(0, 2, seed=0)])
    method.start_task(Task(1, 2, 2, seed=1))
    method.finish_task([task_data(1, 2, seed=1)])
    method.fit_classifier([task_data(1, 2, seed=1)])
    assert len(method.heads.heads) == 1 and method.classifier.classes == 4
    assert all(torch.equal(method.tuning.state_dict()[key], tensor) for key, tensor in tuned.items())
    assert all(torch.equal(method.model.state_dict()[key], tensor) for key, tensor in weights.items())
    images, labels = (torch.cat(parts) for parts in zip(*(task_data(t, 2, seed=7) for t in range(2)), strict=True))
    with torch.no_grad():
        assert (method.predict(images).argmax(1) == labels).float().mean() > 0.7  # chance is 0.25
        state, task_state = method.for_answers(method.state_dict(), method.task_state_dict())
        assert not any(key.startswith("heads.") for key in state)
        other = METHODS.get(name)(small(family), method.setup)
        other.load_state_dict(state)
        other.load_task_state_dict(task_state)
        assert torch.equal(other.predict(images), method.predict(images))


def test_aper_sees_the_feature_without_adapters_first() -> None:
    method = new_method("aper")
    learn(method, range(1), steps=3)
    images, plain = task_data(0, 2, seed=7)[0], small("defocus_mamba_nano")
    with torch.no_grad():
        seen = method.classifier_input(images)
        assert torch.equal(seen[:, :32], plain(images)) and torch.equal(seen[:, 32:], method.model(images))
    assert not torch.equal(seen[:, :32], seen[:, 32:]) and method.classifier.num_features == 64


@pytest.mark.parametrize("name", FIRST_TASK)
def test_a_classifier_that_trains_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"'{name}' trains only in the first task, but the classifier 'separate'"):
        METHODS.get(name)(small(FAMILIES[0]), Setup(classifier="separate"))


def test_defaults_belong_to_the_methods_own_classifier() -> None:
    """A classifier that the user names has its own defaults; options of the user come first."""
    own, named = (METHODS.get("simplecil")(small(FAMILIES[0]), Setup(classifier=c)) for c in ("auto", "nearest-mean"))
    assert isinstance(own.classifier, NearestMean) and own.classifier.options.by == "angle"
    assert named.classifier.options.by == "distance"
    given = METHODS.get("ranpac")(small(FAMILIES[0]), Setup(classifier_options={"width": 20}))
    assert (given.classifier.options.rule, given.classifier.units) == ("ranpac", 20)
    assert new_method("aper").options.bottleneck == 64


def test_known_classes_train_nothing(tiny_model: Callable[..., nn.Module]) -> None:
    for name in FIRST_TASK:
        method = METHODS.get(name)(tiny_model(), Setup(known_classifier=nn.Linear(32, 2)))
        assert not method.trains_in(0) and not method.trains_in(1)
        method.start_task(Task(0, 2, 0, seed=0))
        assert not len(method.heads.heads) and method.classifier.classes == 2


# Adapters beside the MLP


@pytest.mark.parametrize("family", ["vmamba_nano", "mambavision_nano"])
def test_an_adapter_beside_the_mlp_reads_what_the_norm_reads(family: str) -> None:
    model, images = small(family), torch.randn(2, 3, 32, 32)
    sets = AdapterSets(model, AdapterOptions(bottleneck=3), place="mlp")
    sets.add(seed=0)
    before = model(images)
    with sets.using(0):
        assert torch.equal(model(images), before)
    block = next(module for module in model.modules() if hasattr(module, "norm2") and hasattr(module, "mlp"))
    read: list[Tensor] = []
    handle = block.norm2.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))  # type: ignore[union-attr]
    adapter: Any = sets.adapters[0][0]  # type: ignore[index]
    nn.init.normal_(adapter.up.weight)
    tokens = torch.randn(2, *((8, 8) if family == "vmamba_nano" else (16,)), adapter.down.in_features)
    plain = block(tokens)
    with sets.using(0):
        torch.testing.assert_close(block(tokens), plain + adapter(read[0]))
    handle.remove()
    assert not sets._inputs


def test_where_adapters_go(goldens: Path) -> None:
    assert usual_place(RecordedViT(load_file(goldens / "simplecil_aper.safetensors"))) == "mlp"
    assert {usual_place(small(family)) for family in FAMILIES if not family.startswith("vit")} == {"mixer"}
    with pytest.raises(UserError, match=r"no block with norm2 and mlp.*options\.place to mixer"):
        new_method("aper", place="mlp")
    with pytest.raises(UserError, match="place takes"):
        new_method("ranpac", place="attention")


# Factors and offsets per channel


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_and_shifts_act_on_what_enters_and_what_leaves(family: str) -> None:
    model, images = small(family), torch.randn(2, 3, 32, 32)
    before, names = model(images), list(model.state_dict())
    sets = ScaleShiftSets(model)
    sets.add(seed=0)
    assert torch.equal(model(images), before) and list(model.state_dict()) == names
    (module, width), part = next(iter(scaled(model).values())), sets.adapters[0][0]  # type: ignore[index]
    tokens = torch.randn(2, *((8, 8) if family == "vmamba_nano" else (16,)), width)
    wanted = module(tokens * part.factor[0] + part.offset[0]) * part.factor[1] + part.offset[1]
    with sets.using(0):
        torch.testing.assert_close(module(tokens), wanted)
        for index, one in enumerate(sets.adapters[0]):  # each has its say
            nn.init.ones_(one.factor)
            nn.init.zeros_(one.offset)
            assert sets.widths[index] == one.factor.shape[1]
        torch.testing.assert_close(model(images), before)
        for one in sets.adapters[0]:
            nn.init.constant_(one.offset, 0.1)
            assert not torch.allclose(model(images), before)
            nn.init.zeros_(one.offset)
    sets.remove()
    assert torch.equal(model(images), before)


@pytest.mark.parametrize("name", FIRST_TASK)
def test_the_first_task_can_tune_scales_and_shifts(name: str) -> None:
    options = {"classifier_options": {"width": 50}} if name == "ranpac" else {}
    method, other = (METHODS.get(name)(small(FAMILIES[0]), Setup(options={"tune": "ssf"}, **options)) for _ in range(2))
    losses = learn(method, range(1), steps=5)
    assert losses[-1] < losses[0] and {key.rpartition(".")[2] for key, _ in method.tuning.trained()} == {
        "factor",
        "offset",
    }
    method.fit_classifier([task_data(0, 2, seed=0)])
    other.load_state_dict(method.state_dict())
    other.load_task_state_dict(method.task_state_dict())
    images = task_data(0, 2, seed=7)[0]
    assert torch.equal(other.predict(images), method.predict(images))
    with pytest.raises((KeyError, RuntimeError)):
        new_method(name).load_state_dict(method.state_dict())
    with pytest.raises(UserError, match="tune takes"):
        new_method(name, tune="lora")


# SLCA


@pytest.mark.parametrize("family", FAMILIES)
def test_slca_trains_all_and_its_variants_differ_in_norm_and_alignment(family: str) -> None:
    model = small(family)
    norm: Any = final_norm(model)
    names = {id(module): name for name, module in model.named_modules()}
    assert names[id(norm)] in ("norm", "norm_f", "classifier.norm")
    nn.init.constant_(norm.weight, 2.0)
    paper = METHODS.get("slca")(model, Setup())
    assert [name for name, _ in paper.tuning.trained()] == [name for name, _ in model.named_parameters()]
    assert bool((norm.weight == 2).all()) and paper.classifier.options == dataclasses.replace(SLCA, accumulate=True)
    public = METHODS.get("slca")(model, Setup(options={"variant": "public-code"}))
    assert bool((norm.weight == 1).all()) and public.classifier.options == SLCA


def test_slca_cannot_renew_a_norm_that_is_not_there_or_that_a_classifier_needs(tiny_model: Any, goldens: Path) -> None:
    encoder = Encoder(load_file(goldens / "slca.safetensors"))
    with pytest.raises(UserError, match=r"Encoder has no norm.*options\.variant to paper"):
        METHODS.get("slca")(encoder, Setup(options={"variant": "public-code"}))
    with pytest.raises(UserError, match="known_classes to false"):
        METHODS.get("slca")(tiny_model(), Setup(options={"variant": "public-code"}, known_classifier=nn.Linear(32, 2)))
    with pytest.raises(UserError, match="variant takes"):
        METHODS.get("slca")(tiny_model(), Setup(options={"variant": "code"}))
