"""SD-LoRA gives the numbers that were recorded from its public code; its variant `paper` does not jump."""

import pytest
import torch
from adapter_methods_help import accuracy, learn, new_method, task_data
from layer_recordings import LayerRecording, set_head
from prompt_recordings import FIRST
from tolerance import assert_near

from mambacl.errors import UserError
from mambacl.methods import Task

LATER = 1e-8  # as the recording says
PARTS = {"query": "q", "value": "v"}


def test_three_tasks_as_recorded():
    recording = LayerRecording("sd_lora")
    c = recording.config
    method = recording.method("sd-lora", variant="public-code", rank=c["rank"])
    index = {place.name: number for number, place in enumerate(method.changes.places)}
    assert len(index) == 2 * c["depth"]

    def change(block, part):
        return method.changes.at(index[f"blocks.{block}.attn.qkv.{PARTS[part]}"])[-1]

    for task in range(c["tasks"]):
        head, rows = recording.start(method, task), slice(task * recording.classes, None)
        first = f"task{task}"
        set_head(head, recording[f"{first}.head_initial.weight"][rows], recording[f"{first}.head_initial.bias"][rows])
        changes = {(b, part): change(b, part) for b in range(c["depth"]) for part in PARTS}
        with torch.no_grad():
            for (block, part), own in changes.items():
                own.A.copy_(recording[f"{first}.initial.block{block}.{part}_down"])
        magnitudes = method.magnitudes.values
        assert magnitudes.tolist() == [[0.8] * (task + 1)]
        roles = method.named_parameters()
        trained = [parameter for named in roles.values() for _, parameter in named]
        assert len(trained) == 2 * len(changes) + 3
        optimizer = torch.optim.SGD(trained, lr=c["lr"], momentum=0.9)
        losses = []
        for step in range(2 * c["epochs"]):
            images, labels = recording.batch(task, step)
            loss, _ = method.loss(images, labels)
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.detach())
            if step == 0:
                tolerance, at = FIRST if task == 0 else LATER, f"{first}.step0."
                if at + "logits_all" in recording:
                    with torch.no_grad():
                        logits = method.heads.task_logits(method.features(images))
                    recording.near(at + "logits_all", logits, tolerance)
                for (block, part), own in changes.items():
                    recording.near(f"{at}gradient.block{block}.{part}_down", own.A.grad, tolerance)
                    recording.near(f"{at}gradient.block{block}.{part}_up", own.B.grad, tolerance)
                recording.near(f"{at}gradient.magnitude_new", magnitudes.grad[0, -1:], tolerance)
                for old in range(task):
                    recording.near(f"{at}gradient.magnitude_old{old}", magnitudes.grad[0, old : old + 1], tolerance)
                for name, parameter in (("weight", head.weight), ("bias", head.bias)):
                    whole = torch.zeros_like(recording[f"{at}gradient.head.{name}"])  # old rows get no gradient
                    whole[rows] = parameter.grad
                    recording.near(f"{at}gradient.head.{name}", whole, tolerance)
            optimizer.step()
        recording.near(f"{first}.losses", torch.stack(losses), LATER)
        for (block, part), own in changes.items():
            recording.near(f"{first}.final.block{block}.{part}_down", own.A, LATER)
            recording.near(f"{first}.final.block{block}.{part}_up", own.B, LATER)
        recording.near(f"{first}.final.magnitude_new", magnitudes[0, -1:], LATER)
        if task:
            stored = f"{first}.final.magnitudes_old"
            recording.near(stored, magnitudes[0, :-1].view_as(recording[stored]), LATER)
        for part in ("weight", "bias"):
            found = torch.cat([getattr(one, part) for one in method.heads.heads])
            recording.near(f"{first}.head_final.{part}", found, LATER)
        with torch.no_grad():
            recording.near(f"{first}.test.features", method.features(recording["test.images"]), LATER)
            recording.near(f"{first}.test.logits", method.predict(recording["test.images"]), LATER)
    assert not recording.left("gradient", "losses", "final", ".test.", "logits")


@pytest.mark.parametrize("family", ["vit_nano", "defocus_mamba_nano"])
def test_paper_a_new_task_starts_where_the_last_one_ended(family):
    """public-code does not."""
    images, _ = task_data(0, 2, seed=5)
    for variant in ("paper", "public-code"):
        method = new_method("sd-lora", family, rank=4, variant=variant)
        learn(method, range(2), steps=5)
        with torch.no_grad():
            before = method.features(images)
            method.start_task(Task(2, 2, 4, seed=2))
            after = method.features(images)
        if variant == "paper":
            assert_near(after, before, terms=2**14)
            assert method.magnitudes.values.shape == (4, 3)
            assert (method.magnitudes.values[:, -1] == torch.tensor(0.8)).all()
        else:
            assert not torch.allclose(after, before, atol=1e-3)
            assert method.magnitudes.values.shape == (1, 3)


@pytest.mark.parametrize("family", ["vit_nano", "vim_nano"])
def test_it_learns(family):
    method = new_method("sd-lora", family, rank=4)
    learn(method, range(2), steps=15)
    assert accuracy(method, range(2)) > 0.5  # chance is 0.25


def test_a_mistake_gets_one_sentence():
    words = r"sd-lora: options\.rank 33 is too large for blocks\.0\.attn\.qkv\.q with 32 inputs and 32 outputs: set it"
    with pytest.raises(UserError, match=words):
        new_method("sd-lora", "vit_nano", rank=33)
    with pytest.raises(UserError, match=r"no linear layers named x_prj"):
        new_method("sd-lora", "vim_nano", layers=["out_proj", "x_prj"])
    with pytest.raises(UserError, match=r"names the same layer twice"):
        new_method("sd-lora", "vit_nano", layers=["qkv", "v"])
    with pytest.raises(UserError, match=r"sd-lora: options\.layers names no layer"):
        new_method("sd-lora", "vit_nano", layers=[])
