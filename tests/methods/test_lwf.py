"""LwF gives the losses that were recorded from PyCIL, Avalanche and mammoth; and what its options say."""

import pytest
import torch
from adapter_methods_help import FAMILIES, new_method, optimizer_of, step, task_data
from tiny_stream_help import accuracy, images_of, learn, task_labels, tiny_vit
from toolbox_recordings import TOLERANCE, Recording
from torch import Tensor

from mambacl.classifiers.distillation import distillation
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task


@pytest.mark.parametrize(
    "form, options",
    [
        ("ce_form", {"strength": 3.0}),
        ("kl_form", {"distance": "kl"}),
        ("power_form", {"strength": 0.5, "over": "seen"}),
    ],
)
def test_losses_as_recorded(form: str, options: dict) -> None:
    """mammoth's powers of probabilities are the softmax at the temperature."""
    recording, method = Recording("lwf"), METHODS.get("lwf")(tiny_vit(), Setup(options={"train": "all", **options}))
    logits, teacher = recording["student_logits"].requires_grad_(), recording["teacher_logits"]
    far = distillation(logits[:, :6], teacher, method.options.temperature, method.options.distance)
    recording.near(f"{form}.distillation", far, TOLERANCE)
    recording.near(f"{form}.distillation_gradient", torch.autograd.grad(far, logits)[0], TOLERANCE)
    if form != "kl_form":  # no total was recorded
        loss, correct = method.loss_of(logits, recording["labels"], teacher)
        recording.near(f"{form}.total", loss, TOLERANCE)
        recording.near(f"{form}.total_gradient", torch.autograd.grad(loss, logits)[0], TOLERANCE)
        first = 0 if options.get("over") == "seen" else 6
        assert int(correct) == int((logits[:, first:].argmax(1) + first == recording["labels"]).sum())
    recording.check_all(form)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_teacher_is_the_model_before_the_task(family: str) -> None:
    method, batch = new_method("lwf", family, train="all"), task_data(1, 2, seed=1)
    method.start_task(Task(0, 2, 0, seed=0))
    assert not method.teacher
    step(method, optimizer_of(method), task_data(0, 2, seed=0))
    with torch.no_grad():
        before = method.predict(batch[0])
    method.start_task(Task(1, 2, 2, seed=1))
    optimizer = optimizer_of(method)
    for _ in range(2):
        step(method, optimizer, batch)
    torch.testing.assert_close(method.teacher_logits(batch[0]), before, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert not torch.allclose(method.predict(batch[0])[:, :2], before, rtol=1e-3, atol=1e-3)


def change_of_old_logits(strength: float) -> Tensor:
    method, _ = learn("lwf", {"train": "all", "strength": strength}, tasks=1, epochs=15)
    images, labels = images_of(1)
    method.start_task(Task(1, 2, 2, seed=1))
    with torch.no_grad():
        before = method.predict(images)[:, :2]
    optimizer = torch.optim.Adam([p for named in method.named_parameters().values() for _, p in named], lr=1e-3)
    for _ in range(10):
        step(method, optimizer, (images, labels))
    with torch.no_grad():
        return (method.predict(images)[:, :2] - before).abs().mean()


def test_old_logits_stay_closer_with_more_strength() -> None:
    assert change_of_old_logits(30.0) < 0.5 * change_of_old_logits(0.0)


def test_it_learns() -> None:
    method, losses = learn("lwf", {"train": "all"}, epochs=25)
    assert losses[0][-1][1] < losses[0][0][1] / 2
    assert accuracy(method, 1, task_labels(1)) >= 0.9


def test_what_answers_needs_no_teacher() -> None:
    method, _ = learn("lwf", {"train": "all"}, epochs=2)
    state, rest = method.for_answers(method.state_dict(), method.task_state_dict())
    assert not rest and len(method.task_state_dict()) == len(state)
    other = METHODS.get("lwf")(tiny_vit(), Setup(options={"train": "all"}))
    other.load_state_dict(state)
    images = images_of(0)[0]
    assert torch.equal(other.predict(images), method.predict(images))


@pytest.mark.parametrize("name", ["ewc", "lwf", "icarl", "der"])
def test_known_classes(name: str) -> None:
    """Nothing trains in the first task, whose head comes with the model; what it leaves counts in the second."""
    known = torch.nn.Linear(16, 2)
    method = METHODS.get(name)(tiny_vit(), Setup(options={"train": "all"}, known_classifier=known, classes=4))
    images, labels = images_of(0)
    before = method.model(images).detach()
    method.start_task(Task(0, 2, 0, seed=0))
    assert not method.trains_in(0)
    torch.testing.assert_close(method.predict(images), known(before))
    method.finish_task([(images, labels)])
    method.start_task(Task(1, 2, 2, seed=1))
    optimizer = optimizer_of(method)
    method.enter(method.phase(0, 1))
    for _ in range(2):
        step(method, optimizer, images_of(1))
    method.finish_task([images_of(1)])
    assert method.predict(images).shape == (16, 4)
    assert not torch.allclose(method.model(images), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options, words", [({"temperature": 0.0}, "temperature must be positive and finite"),
                                            ({"train": "setting"}, r"set options\.train to all")])  # fmt: skip
def test_a_mistake_gets_one_sentence(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        METHODS.get("lwf")(tiny_vit(), Setup(options={"train": "all", **options}))
