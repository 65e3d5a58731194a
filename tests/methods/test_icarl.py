"""iCaRL gives what was recorded from PyCIL: herding, the memory of two tasks, class means, answers and the loss."""

import pytest
import torch
import torch.nn.functional as F
from tiny_stream_help import accuracy, images_of, learn, tiny_vit
from toolbox_recordings import TOLERANCE, Network, Recording
from torch import nn

from mambacl.errors import UserError
from mambacl.methods import METHODS, Method, Setup, Task


def recorded_method(**options: object) -> Method:
    model = Network(features=nn.Linear(6, 5, bias=False), act=nn.Tanh())
    return METHODS.get("icarl")(model, Setup(options={"train": "all", "images": 24, **options}, classes=6))


def test_two_tasks_as_recorded() -> None:
    recording, method = Recording("icarl"), recorded_method()
    held, labels = torch.zeros(0, 6, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    for task in range(2):
        method.start_task(Task(task, 3, 3 * task, seed=task))
        with torch.no_grad():
            method.model.features.weight.copy_(recording[f"task{task}.feature_weight"].T)
        new = range(3 * task, 3 * task + 3)
        own = torch.cat([recording[f"class{c}.data"] for c in new])
        own_labels = torch.tensor(new).repeat_interleave(14)
        images, every = torch.cat((own, held)), torch.cat((own_labels, labels))
        method.finish_task(zip(images.split(9), every.split(9), strict=True))
        stored = method.stored()
        assert method.options.room(3 * task + 3) == int(recording[f"task{task}.exemplars_per_class"])
        assert torch.equal(stored.labels, recording[f"task{task}.memory.labels"])
        in_class = recording[f"task{task}.memory.sample_index_in_class"]
        assert torch.equal(stored.positions, in_class + 14 * (stored.labels % 3))
        assert torch.equal(stored.tasks, stored.labels // 3)
        held = torch.stack(
            [recording[f"class{c}.data"][p % 14] for c, p in zip(stored.labels.tolist(), stored.positions, strict=True)]
        )
        labels = stored.labels
        assert torch.equal(held, recording[f"task{task}.memory.data"])
        recording.near(f"task{task}.class_means", F.normalize(method.means.means(), dim=1), TOLERANCE)
        with torch.no_grad():
            cosines = method.predict(recording["test.data"])
            norms = method.features(recording["test.data"]).norm(dim=1, keepdim=True)
        size = norms / (norms + 1e-8)  # PyCIL's vectors are shorter than 1 by this
        recording.near(f"task{task}.test.squared_distances", size**2 + 1 - 2 * size * cosines, TOLERANCE)
        assert torch.equal(cosines.argmax(1), recording[f"task{task}.test.prediction"])


def test_the_loss_as_recorded() -> None:
    recording, method = Recording("icarl"), recorded_method(variant="public-code")
    logits = recording["loss.student_logits"].requires_grad_()
    loss, _ = method.loss_of(logits, recording["loss.labels"], recording["loss.teacher_logits"])
    recording.near("loss.value", loss, TOLERANCE)
    recording.near("loss.gradient", torch.autograd.grad(loss, logits)[0], TOLERANCE)


def test_the_papers_loss_by_hand() -> None:
    """Every class is a question of its own: new ones ask for the label, old ones for what the old model says."""
    logits, teacher, labels = torch.randn(3, 4), torch.randn(3, 2), torch.tensor([3, 0, 2])
    loss, correct = recorded_method().loss_of(logits, labels, teacher)
    expected = 0.0
    for i in range(3):
        for c in range(4):
            target = float(teacher[i, c].sigmoid()) if c < 2 else float(c == labels[i])
            p = float(logits[i, c].double().sigmoid())
            expected -= target * torch.tensor(p).log().item() + (1 - target) * torch.tensor(1 - p).log().item()
    assert loss.item() == pytest.approx(expected / 3, rel=1e-5)
    assert int(correct) == int((logits.argmax(1) == labels).sum())
    first, _ = recorded_method().loss_of(logits, labels, None)
    one_hot = F.one_hot(labels, 4).float()
    assert first.item() == pytest.approx(4 * F.binary_cross_entropy_with_logits(logits, one_hot).item(), rel=1e-5)


@pytest.mark.parametrize("variant", ["paper", "public-code"])
def test_it_learns_and_what_answers_has_no_images(variant: str) -> None:
    options = {"train": "all", "variant": variant, "images": 8}
    method, losses = learn("icarl", options, epochs=25)
    assert losses[0][-1][1] < losses[0][0][1] / 2 and accuracy(method, 1) >= 0.9
    state, rest = method.for_answers(method.state_dict(), method.task_state_dict())
    assert {name.split("/")[0] for name in rest} == {"means"}
    other = METHODS.get("icarl")(tiny_vit(), Setup(options=options))
    other.load_state_dict(state)
    other.load_task_state_dict(rest)
    images = images_of(0)[0]
    assert torch.equal(other.predict(images), method.predict(images)) and other.stored() is None


def test_the_start_of_a_run_says_what_is_stored() -> None:
    lines = METHODS.get("icarl")(tiny_vit(), Setup(options={"train": "all"}, classes=20)).overview().splitlines()
    assert lines[-1] == (
        "This method stores training images: up to 2,000 images of earlier tasks, as positions in the data set "
        "(options.memory)."
    )
    options = {"train": "all", "memory": "pixels", "per_class": 7}
    words = METHODS.get("icarl")(tiny_vit(), Setup(options=options, classes=20)).overview()
    assert "up to 140 images of earlier tasks, with their pixels in the checkpoints" in words
    assert "7 images per class" in METHODS.get("icarl")(tiny_vit(), Setup(options=options)).overview()


def test_a_memory_that_is_too_small() -> None:
    with pytest.raises(UserError, match=r"options\.images = 5 is too few for 6 classes.*options\.images to 6 or more"):
        recorded_method(images=5)
    with pytest.raises(UserError, match="'icarl' answers with the heads that it trains"):
        METHODS.get("icarl")(tiny_vit(), Setup(options={"train": "all"}, classifier="ridge"))
