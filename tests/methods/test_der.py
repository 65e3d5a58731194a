"""DER gives the numbers that were recorded from PyCIL: three tasks with losses, gradients, heads and answers."""

import torch
from tiny_stream_help import accuracy, images_of, learn, tiny_vit
from toolbox_recordings import TOLERANCE, Network, Recording, copy
from torch import Tensor, nn

from mambacl.methods import METHODS, Method, Setup, Task


def recorded_method() -> Method:
    model = Network(l1=nn.Linear(6, 7), act1=nn.Tanh(), l2=nn.Linear(7, 5), act2=nn.Tanh())
    return METHODS.get("der")(model, Setup(options={"train": "all", "variant": "public-code"}, classes=9))


def parts(method: Method, task: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the recording's names: the newest backbone, the head of all tasks, the auxiliary head."""
    found = {f"backbone{task}.{name}": tensor for name, tensor in values.items() if name.startswith("l")}
    for kind in ("weight", "bias"):
        found[f"head.{kind}"] = torch.cat([values[f"heads.{own}.{kind}"] for own in range(task + 1)])
        if values.get(f"auxiliary.{kind}") is not None:
            found[f"auxiliary_head.{kind}"] = values[f"auxiliary.{kind}"]
    return found


def values_of(method: Method) -> dict[str, nn.Parameter]:
    return {name: parameter for named in method.named_parameters().values() for name, parameter in named}


@torch.no_grad()
def set_heads(method: Method, recording: Recording, task: int) -> None:
    """What is drawn at random: the whole head, whose old block must be there already, and the auxiliary one."""
    for kind in ("weight", "bias"):
        rows = recording[f"task{task}.initial.head.{kind}"].split(3)
        for own, (head, row) in enumerate(zip(method.heads.heads, rows, strict=True)):
            parameter = getattr(head, kind)
            if own < task:
                old = (slice(None), slice(5 * task)) if kind == "weight" else (slice(None),)
                torch.testing.assert_close(parameter[old], row[old], rtol=TOLERANCE, atol=TOLERANCE)
            parameter.copy_(row)
        getattr(method.auxiliary, kind).copy_(recording[f"task{task}.initial.auxiliary_head.{kind}"])


def test_three_tasks_as_recorded() -> None:
    recording, method = Recording("der"), recorded_method()
    for name in ("l1", "l2"):
        layer = getattr(method.model, name)
        copy(layer, {kind: recording[f"task0.initial.backbone0.{name}.{kind}"] for kind in ("weight", "bias")})
    for task in range(3):
        method.start_task(Task(task, 3, 3 * task, seed=task))
        method.heads.double()
        set_heads(method, recording, task)
        for name, value in parts(method, task, values_of(method)).items():
            recording.near(f"task{task}.initial.{name}", value, TOLERANCE)
        optimizer = torch.optim.SGD(values_of(method).values(), lr=0.1, momentum=0.9, weight_decay=2e-4)
        losses = []
        for index in range(4):
            batch = [recording[f"task{task}.batch{index % 2}.{kind}"] for kind in ("inputs", "labels")]
            loss, auxiliary, _ = method.losses(*batch)
            losses.append((loss.detach(), torch.as_tensor(auxiliary).detach()))
            optimizer.zero_grad()
            method.loss(*batch)[0].backward()
            if index == 0:
                gradients = {name: p.grad for name, p in values_of(method).items()}
                for name, gradient in parts(method, task, gradients).items():
                    recording.near(f"task{task}.step0.gradient.{name}", gradient, TOLERANCE)
            optimizer.step()
        recording.near(f"task{task}.classification_losses", torch.stack([pair[0] for pair in losses]), TOLERANCE)
        if task:
            recording.near(f"task{task}.auxiliary_losses", torch.stack([pair[1] for pair in losses]), TOLERANCE)
        method.finish_task([batch_of_new(recording, task)])
        for name, value in parts(method, task, values_of(method)).items():
            recording.near(f"task{task}.final.{name}", value, TOLERANCE)
        with torch.no_grad():
            features = method.features(recording["test.inputs"])
            recording.near(f"task{task}.test.logits", method.predict(recording["test.inputs"]), TOLERANCE)
            recording.near(f"task{task}.test.auxiliary_logits", method.auxiliary(features[:, -5:]), TOLERANCE)
    recording.check_all(*(name for name in recording.tensors if ".batch" not in name and name != "test.inputs"))


def batch_of_new(recording: Recording, task: int) -> tuple[Tensor, Tensor]:
    """The images of the task's own classes in its batches."""
    inputs, labels = (
        torch.cat([recording[f"task{task}.batch{index}.{kind}"] for index in range(2)]) for kind in ("inputs", "labels")
    )
    return inputs[labels >= 3 * task], labels[labels >= 3 * task]


def test_alignment_is_of_the_public_code_only() -> None:
    for variant in ("paper", "public-code"):
        method, _ = learn("der", {"train": "all", "variant": variant}, tasks=1, epochs=2)
        method.start_task(Task(1, 2, 2, seed=1))
        with torch.no_grad():
            method.heads.heads[1].weight *= 3
        method.finish_task([images_of(1)])
        old, new = (head.weight.detach().norm(dim=1).mean() for head in method.heads.heads)
        assert torch.isclose(old, new) == (variant == "public-code")


def test_earlier_copies_stay_and_old_rows_see_new_features() -> None:
    """The logits do not change when a task starts but for the new columns; old features never do."""
    method, _ = learn("der", {"train": "all"}, tasks=1, epochs=5)
    images = images_of(0)[0]
    with torch.no_grad():
        before, logits = method.features(images), method.predict(images)
        method.start_task(Task(1, 2, 2, seed=1))
        torch.testing.assert_close(method.features(images), torch.cat((before, before), dim=1))
        for head in method.heads.heads:
            head.weight[:, 16:] = 0
        torch.testing.assert_close(method.predict(images)[:, :2], logits)
    optimizer = torch.optim.Adam(values_of(method).values(), lr=1e-2)
    loss, _ = method.loss(*images_of(1))
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        after = method.features(images)
    torch.testing.assert_close(after[:, :16], before)
    assert not torch.allclose(after[:, 16:], before, rtol=1e-3)


def test_it_learns_and_what_answers_has_neither_images_nor_the_auxiliary_head() -> None:
    method, losses = learn("der", {"train": "all"}, tasks=3, epochs=20)
    assert losses[0][-1][1] < losses[0][0][1] / 2 and accuracy(method, 2) >= 0.9
    state, rest = method.for_answers(method.state_dict(), method.task_state_dict())
    assert {name.split("/")[1] for name in rest if name.startswith("copy/")} == {"0", "1"}
    assert {name.split("/")[0] for name in rest} == {"copy"} and not any("auxiliary" in name for name in state)
    other = METHODS.get("der")(tiny_vit(), Setup(options={"train": "all"}))
    other.load_state_dict(state)
    other.load_task_state_dict(rest)
    images = images_of(0)[0]
    assert torch.equal(other.predict(images), method.predict(images))


def test_only_what_trains_is_copied(tiny_model) -> None:
    """With the null-space setting's parameters, a copy has these and no others."""
    method = METHODS.get("der")(tiny_model(), Setup())
    for task in range(2):
        method.start_task(Task(task, 2, 2 * task, seed=task))
    assert set(method.copies[0]) == {name for name, _ in method.tuning.trained()}
    assert sum(t.numel() for t in method.copies[0].values()) < sum(p.numel() for p in method.model.parameters())
