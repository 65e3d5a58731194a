"""Methods: the contract, and a method that another package brings."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_run import OPTIONS
from torch import nn

from mambacl.classifiers import CLASSIFIERS
from mambacl.errors import UserError
from mambacl.features import FeatureOptions
from mambacl.methods import METHODS, Method, Setup, Task
from mambacl.nullspace import SETTINGS
from mambacl.registry import Registry

TRAINING = [name for name in METHODS.names() if METHODS.get(name).trains]
SMALL = {"ridge": {"width": 100}}  # options of classifiers, for speed
COMPUTED = [name for name in CLASSIFIERS.names() if not CLASSIFIERS.get(name).trains]
ONCE = [name for name in METHODS.names() if METHODS.get(name).first_task_only]


@pytest.mark.parametrize("name", TRAINING)
def test_the_contract(name: str, tiny_model_for: Callable[[str], nn.Module]) -> None:
    setup = Setup(options=OPTIONS.get(name, {}))
    method = METHODS.get(name)(tiny_model_for(name), setup)
    assert method.name == name and method.summary
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([2, 3, 4, 2])
    for task, classes in enumerate([5] if name in ONCE else [2, 3]):
        assert method.trains_in(task)
        method.start_task(Task(task, classes, first_label=2 * task, seed=task))
    roles = method.named_parameters()
    assert set(roles) == {"backbone", "classifier", *method.rate_factors()}
    assert len(roles["classifier"]) >= 2 or not list(method.heads.parameters())  # heads can be fixed
    loss, correct = method.loss(images, labels)
    loss.backward()
    assert 0 <= int(correct) <= 4
    assert all(parameter.grad is not None for named in roles.values() for _, parameter in named)
    assert method.predict(images).shape == (4, 5)

    state = {key: value.clone() for key, value in method.state_dict().items()}
    other = METHODS.get(name)(tiny_model_for(name), setup)
    other.load_state_dict(state)
    if method.needs_task_state:
        other.load_task_state_dict(method.task_state_dict())
    torch.testing.assert_close(other.predict(images), method.predict(images), rtol=0, atol=0)


def test_analytic_trains_nothing(tiny_model: Callable[..., nn.Module]) -> None:
    """No heads, no parameters that change with a step; all it learns is in the classifier, which sees every depth."""
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    setup = Setup(classifier_options=SMALL["ridge"])
    method, other = (METHODS.get("analytic")(m, setup) for m in (model, tiny_model()))
    assert not method.trains and method.summary and method.classifier.name == "ridge"
    assert method.reader.indices == [0, 1] and method.classifier.num_features > 2 * method.num_features
    images, labels = torch.randn(10, 3, 16, 16), torch.arange(10) % 5
    for task, classes in enumerate((2, 3)):
        method.start_task(Task(task, classes, first_label=2 * task, seed=task))
        assert method.predict(images).shape == (10, 2 + 3 * task)
        chosen = labels < 2 if task == 0 else labels >= 2
        assert method.finish_task([(images[chosen], labels[chosen])]) == {}
        method.fit_classifier([(images[chosen], labels[chosen])])
    assert not len(method.heads.heads) and not method.state_dict() and method.needs_task_state
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    by_hand = CLASSIFIERS.get("ridge")(method.reader.num_features, width=100)
    for chosen in (labels < 2, labels >= 2):
        by_hand.update(method.reader(images[chosen]), labels[chosen])
        by_hand.finish_task()
    assert torch.equal(method.predict(images), by_hand.scores(method.reader(images)))
    other.load_state_dict(method.state_dict())
    other.load_task_state_dict(method.task_state_dict())
    assert torch.equal(other.predict(images), method.predict(images))


@pytest.mark.parametrize("classifier", [name for name in CLASSIFIERS.names() if name not in COMPUTED])
def test_analytic_takes_no_classifier_that_trains(classifier: str, tiny_model: Callable[..., nn.Module]) -> None:
    with pytest.raises(
        UserError, match=f"'analytic' trains nothing, but the classifier '{classifier}'.* frozen.* ridge"
    ):
        METHODS.get("analytic")(tiny_model(), Setup(classifier=classifier))


@pytest.mark.parametrize("name", METHODS.names())
def test_predictions_do_not_depend_on_the_batch(name: str, tiny_model_for: Callable[[str], nn.Module]) -> None:
    options = SMALL.get(METHODS.get(name).own_classifier, {})
    setup = Setup(options=OPTIONS.get(name, {}), classifier_options=options)
    method = METHODS.get(name)(tiny_model_for(name), setup)
    method.start_task(Task(0, classes=5, first_label=0, seed=0))
    images = torch.randn(6, 3, 16, 16)
    if method.classifier.updates:
        method.fit_classifier([(torch.randn(20, 3, 16, 16), torch.arange(20) % 5)])
    with torch.no_grad():
        together = method.answer(images)
        alone = torch.cat([method.answer(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    assert torch.equal(together.argmax(1), alone.argmax(1))


def test_logits_are_in_full_precision_under_autocast(tiny_model: Callable[..., nn.Module]) -> None:
    method = METHODS.get("frozen")(tiny_model(), Setup())
    method.start_task(Task(0, classes=5, first_label=0, seed=0))
    with torch.autocast("cpu", torch.bfloat16):
        assert method.predict(torch.randn(2, 3, 16, 16)).dtype == torch.float32


def test_only_what_the_setting_names_is_trained(tiny_model: Callable[..., nn.Module]) -> None:
    setting = SETTINGS["paper"].override(A={"trains": False}, blocks=[1])
    method = METHODS.get("mamba-cl")(tiny_model(), Setup(setting))
    trained = [name for name, parameter in method.model.named_parameters() if parameter.requires_grad]
    assert trained == ["blocks.1.mixer.x_proj.weight", "blocks.1.mixer.out_proj.weight"]


def combinations() -> list[tuple[str, str]]:
    """Methods with classifiers. Some answer in a way of their own. A method that trains nothing, or only in the first
    task, takes no classifier that trains."""
    methods = [method for method in METHODS.names() if not METHODS.get(method).own_answer]
    every = [method for method in TRAINING if method not in ONCE]
    return [(m, name) for m in methods for name in (CLASSIFIERS.names() if m in every else COMPUTED)]


@pytest.mark.parametrize("name, classifier", combinations())
def test_every_method_with_every_classifier(
    name: str, classifier: str, tiny_model_for: Callable[[str], nn.Module]
) -> None:
    """Two tasks; the answers are the classifier's, and a state taken up in the middle of a task gives the same."""
    images, labels = torch.randn(10, 3, 16, 16), torch.arange(10) % 5
    own = OPTIONS.get(name, {})
    setup = Setup(classifier=classifier, classifier_options=SMALL.get(classifier, {}), options=own)
    method, other = (METHODS.get(name)(tiny_model_for(name), setup) for _ in range(2))
    for task, classes in enumerate((2, 3)):
        method.start_task(Task(task, classes, first_label=2 * task, seed=task))
        chosen = labels < 2 if task == 0 else labels >= 2
        if method.trains_in(task):
            roles = method.named_parameters()
            optimizer = method.wrap(torch.optim.Adam([p for named in roles.values() for _, p in named], lr=1e-3))
            loss, _ = method.loss(images[chosen], labels[chosen])
            loss.backward()
            optimizer.step()
        if task == 1:  # in the middle of a task
            assert method.predict(images).shape == (10, 5)
            other.load_state_dict(method.state_dict())
            if state := method.task_state_dict():
                other.load_task_state_dict(state)
            if not method.trains_in(task):  # a checkpoint is never in the middle of a task
                other.start_task(Task(task, classes, first_label=2, seed=task))
            assert torch.equal(other.predict(images), method.predict(images))
        for one in (method, other) if task == 1 else (method,):
            one.finish_task([(images[chosen], labels[chosen])])
            if one.classifier.updates:
                one.fit_classifier([(images[chosen], labels[chosen])])
    assert method.classifier.name == classifier and method.heads.trains
    assert torch.equal(other.predict(images), method.predict(images))
    prompted = type(method).features is not Method.features
    seen = method.reader(images) if method.reader.indices else method.model(images)
    seen = method.features(images) if prompted else seen
    if name == "aper":
        with method.adapters.using(None):
            seen = torch.cat((method.model(images), seen), dim=1)
    assert torch.equal(method.predict(images), method.classifier.scores(seen))
    if classifier == "nearest-mean":
        assert method.classifier.counts.tolist() == [2] * 5
        nearest = torch.cdist(seen, method.classifier.means().float()).argmin(1)
        assert torch.equal(method.predict(images).argmax(1), nearest)


def test_a_method_with_an_answer_of_its_own_takes_no_classifier(tiny_model: Callable[..., nn.Module]) -> None:
    with pytest.raises(UserError, match="'ease' predicts by its prototypes"):
        METHODS.get("ease")(tiny_model(), Setup(classifier="separate"))


# What a classifier sees


@pytest.mark.parametrize("mirror", ["none", "learning", "both"])
@pytest.mark.parametrize("name, classifier", [("analytic", "ridge"), ("frozen", "lda"), ("frozen", "separate")])
def test_mirror_images(name: str, classifier: str, mirror: str, tiny_model: Callable[..., nn.Module]) -> None:
    """Statistics include them in learning; the answer is the sum over both views if they are used at test too."""
    images, labels = torch.randn(10, 3, 16, 16), torch.arange(10) % 5
    options = {"width": 100, "ridge": 10.0} if classifier == "ridge" else {}
    setup = Setup(classifier=classifier, classifier_options=options, features=FeatureOptions(mirror=mirror))
    method = METHODS.get(name)(tiny_model(), setup)
    method.start_task(Task(0, classes=5, first_label=0, seed=0))
    if method.classifier.updates:
        method.fit_classifier([(images[:4], labels[:4]), (images[4:], labels[4:])])
        by_hand = CLASSIFIERS.get(classifier)(method.reader.num_features, **options)
        for part in (images,) if mirror == "none" else (images, images.flip(3)):
            by_hand.update(method.reader(part), labels)
        by_hand.finish_task()
        # other batches of the same images: rounding, times the condition of the matrix
        torch.testing.assert_close(method.predict(images), by_hand.scores(method.reader(images)), rtol=1e-3, atol=1e-3)
        counts = next(t for key, t in method.classifier.state_dict().items() if key.endswith("counts"))
        assert counts.sum() == 10 + 10 * (mirror != "none")
    with torch.no_grad():
        views = [images, images.flip(3)] if mirror == "both" else [images]
        expected = torch.stack([method.predict(view) for view in views]).sum(0)
        assert torch.equal(method.answer(images), expected)
        assert torch.equal(method.scores([method.classifier_input(view) for view in method.views(images)]), expected)
        if mirror == "both":
            assert not torch.allclose(expected, 2 * method.predict(images))
            torch.testing.assert_close(method.answer(images.flip(3)), expected)


@pytest.mark.parametrize("name", ["frozen", "sequential", "mamba-cl"])
def test_heads_train_on_several_depths(name: str, tiny_model: Callable[..., nn.Module]) -> None:
    """They are those of a linear layer on what the reader reads, and every depth has a gradient."""
    features, images, labels = FeatureOptions(depths=[0]), torch.randn(6, 3, 16, 16), torch.tensor([0, 1, 2, 0, 1, 2])
    method = METHODS.get(name)(tiny_model(), Setup(features=features))
    method.start_task(Task(0, 3, first_label=0, seed=0))
    head = method.heads.heads[0]
    assert head.weight.shape == (3, 3 * 32)  # class token and mean of the first block, and the final feature
    rows = method.reader(images)
    loss, _ = method.loss(images, labels)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(head(rows), labels))
    loss.backward()
    assert all(part.abs().max() > 0 for part in head.weight.grad.split(32, dim=1))
    assert name == "frozen" or all(p.grad is not None for _, p in method.named_parameters()["backbone"])
    with torch.no_grad():
        torch.testing.assert_close(method.answer(images), head(rows))


def test_a_method_with_a_loss_of_its_own_trains_on_the_final_feature(tiny_model: Callable[..., nn.Module]) -> None:
    with pytest.raises(UserError, match=r"'lwf' train on the final feature: set features\.depths .* such as ridge"):
        METHODS.get("lwf")(tiny_model(), Setup(features=FeatureOptions(depths="all")))
    with pytest.raises(UserError, match=r"'ease' .* final feature.* features\.depths"):
        METHODS.get("ease")(tiny_model(), Setup(features=FeatureOptions(depths=1)))
    METHODS.get("lwf")(tiny_model(), Setup(classifier="lda", features=FeatureOptions(depths="all")))


def test_depths_and_pools_by_name(tiny_model: Callable[..., nn.Module]) -> None:
    images = torch.randn(4, 3, 16, 16)
    for options, name, width in (
        (FeatureOptions(depths="final"), "analytic", 32),
        (FeatureOptions(depths=[1], pool=["std"]), "frozen", 64),
        (FeatureOptions(depths=2, pool=["quadrants", "mean"]), "analytic", 11 * 32),
    ):
        method = METHODS.get(name)(tiny_model(), Setup(classifier="nearest-mean", features=options))
        assert method.classifier.num_features == width == method.classifier_input(images).shape[1]


def test_options_of_a_classifier(tiny_model: Callable[..., nn.Module]) -> None:
    method = METHODS.get("frozen")(tiny_model(), Setup(classifier="cosine", classifier_options={"scale": 8.0}))
    method.start_task(Task(0, classes=2, first_label=0, seed=0))
    assert method.heads.heads[0].scale.item() == 8.0
    for options, message in (
        ({"scael": 8.0}, "Did you mean 'scale'"),
        ({"scale": -1.0}, "positive"),
    ):
        with pytest.raises(UserError, match=message):
            METHODS.get("frozen")(tiny_model(), Setup(classifier="cosine", classifier_options=options))


def test_a_method_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point is loaded at the first look-up; what it holds registers itself."""
    registry: Registry[type] = Registry("method", "some.group")

    class Theirs(Method):
        name, summary = "theirs", "a method from elsewhere"

    def points(group: str) -> list[SimpleNamespace]:
        assert group == "some.group"
        return [SimpleNamespace(load=lambda: registry.add("theirs", Theirs))]

    monkeypatch.setattr("importlib.metadata.entry_points", points)
    assert registry.names() == ["theirs"] and registry.get("theirs") is Theirs
    with pytest.raises(UserError, match=r"no method 'their'\. Did you mean 'theirs'\?"):
        registry.get("their")


def test_a_method_is_one_file() -> None:
    """No other module of the package names a method of the folder."""
    package = Path(__import__("mambacl").__file__).parent
    for path in package.rglob("*.py"):
        if path.parent.name != "methods":
            assert "methods.mamba_cl" not in path.read_text(), path
