"""InfLoRA gives the numbers that were recorded from its public code."""

import pytest
import torch
from adapter_methods_help import accuracy, learn, new_method, task_data
from layer_recordings import LayerRecording, adam_with_recorded_rates, check_answers, set_head
from prompt_recordings import FIRST, LATER

from mambacl.errors import UserError
from mambacl.methods import Task
from mambacl.nullspace.subspaces import Subspace

BLOCK = "blocks.{}.attn.qkv"


def test_three_tasks_as_recorded():
    recording = LayerRecording("inflora")
    c = recording.config
    method = recording.method("inflora", variant="public-code", rank=c["rank"], share=c["lamb"])
    width, blocks, kinds = c["width"], range(c["depth"]), {}
    names = [BLOCK.format(block) for block in blocks]
    assert [place.name for place in method.changes.places] == names
    tokens = 10 * (1 + (c["image"] // c["patch"]) ** 2)
    for task in range(c["tasks"]):
        head, name = recording.start(method, task), f"task{task}"
        tolerance = FIRST if task == 0 else LATER
        set_head(head, recording[f"{name}.head_initial.weight"], recording[f"{name}.head_initial.bias"])
        moments = method.moments(recording.batches(task))
        method.start_epoch(0, lambda task=task: recording.batches(task))
        changes, signs = [method.changes.at(block)[-1] for block in blocks], {}
        for block, change in enumerate(changes):
            stored = f"{name}.block{block}."
            moment = moments[names[block]]
            recording.near(stored + "input_covariance_before_training", moment / tokens, tolerance)
            signs[block] = (change.A * recording[stored + "down_projection"]).sum(1).sign()
            recording.near(stored + "down_projection", signs[block][:, None] * change.A, tolerance)

        def check(changes=changes, signs=signs, head=head, name=name, tolerance=tolerance):
            for block, change in enumerate(changes):
                for rows, part in ((slice(0, width), "key"), (slice(width, None), "value")):
                    stored = f"{name}.step0.gradient.block{block}.{part}_up"
                    recording.near(stored, signs[block] * change.B.grad[rows], tolerance)
            recording.near(f"{name}.step0.gradient.head.weight", head.weight.grad, tolerance)
            recording.near(f"{name}.step0.gradient.head.bias", head.bias.grad, tolerance)

        losses = adam_with_recorded_rates(recording, method, task, check)
        recording.near(f"{name}.losses", losses, LATER)
        for block, change in enumerate(changes):
            for rows, part in ((slice(0, width), "key"), (slice(width, None), "value")):
                up = change.B[rows]
                recording.near(f"{name}.block{block}.{part}_delta_weight", up @ change.A, LATER)
                recording.near(f"{name}.block{block}.{part}_up_final", signs[block] * up, LATER)
        after = method.moments(recording.batches(task))
        method.finish_task(recording.batches(task))
        eps = torch.tensor(c["lamb"] + (c["lame"] - c["lamb"]) * task / c["tasks"], dtype=torch.float64)
        recording.near(f"{name}.energy_threshold", eps, FIRST)
        for block, place in enumerate(method.changes.places):
            stored, memory = f"{name}.block{block}.", method.memory[place.name]
            recording.near(stored + "input_covariance_after_training", after[place.name] / tokens, LATER)
            assert memory.retain == bool(recording[stored + "memory_is_retain"])
            assert memory.basis.shape == recording[stored + "memory_basis"].shape
            recording.near(stored + "memory_projector", memory.basis @ memory.basis.T, LATER)
            kinds.setdefault(block, []).append(memory.retain)
        check_answers(recording, method, task)
    assert any(len(set(own)) > 1 for own in kinds.values())  # from remove to retain
    assert not recording.left("gradient", "losses", "final", ".test.", "delta", "rates", "covariance", "projector")


@pytest.mark.parametrize("variant", ["paper", "public-code"])
@pytest.mark.parametrize("family", ["vit_nano", "defocus_mamba_nano"])
def test_a_new_change_leaves_the_memory_alone(family, variant):
    """A has orthogonal rows, which the memory does not hold; only the first epoch designs them."""
    method = new_method("inflora", family, rank=4, variant=variant, share=0.9)
    learn(method, [0], steps=5)
    free = method.free()
    assert set(free) == {place.name for place in method.changes.places} and all(
        0 < share < 1 for share in free.values()
    )
    method.start_task(Task(1, 2, 2, seed=1))
    method.start_epoch(0, lambda: [task_data(1, 2, seed=3)])
    for place, change in zip(method.changes.places, method.changes.tasks[-1], strict=True):
        A = change.A.double() * 3**0.5
        torch.testing.assert_close(A @ A.T, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-6)
        assert method.memory[place.name].inside(A).abs().max() < 1e-6
    drawn = [change.A.clone() for change in method.changes.tasks[-1]]
    method.start_epoch(1, lambda: [task_data(1, 2, seed=4)])
    assert all(torch.equal(one, change.A) for one, change in zip(drawn, method.changes.tasks[-1], strict=True))


def test_without_free_directions_nothing_changes():
    method = new_method("inflora", "vit_nano", rank=4, share=1.0)
    learn(method, [0], steps=1)
    for name, memory in method.memory.items():
        method.memory[name] = Subspace(memory.basis[:, :0], retain=True)
    method.start_task(Task(1, 2, 2, seed=1))
    method.start_epoch(0, lambda: [task_data(1, 2, seed=3)])
    assert all(change.A.abs().max() < 1e-12 for change in method.changes.tasks[-1])


def test_the_paper_protects_more_directions():
    free = {}
    for variant in ("paper", "public-code"):
        method = new_method("inflora", "vit_nano", rank=4, variant=variant, share=0.95)
        learn(method, [0], steps=1)
        free[variant] = sum(method.free().values())
    assert free["paper"] < free["public-code"]


@pytest.mark.parametrize("family", ["vit_nano", "vim_nano"])
def test_it_learns(family):
    method = new_method("inflora", family, rank=4)
    for task in range(2):
        learn_with_design(method, task)
    assert accuracy(method, range(2)) > 0.5  # chance is 0.25


def learn_with_design(method, task):
    start = method.start_task

    def started(given):
        start(given)
        method.start_epoch(0, lambda: [task_data(task, 2, seed=task)])

    method.start_task = started
    learn(method, [task], steps=15)
    method.start_task = start


def test_a_mistake_gets_one_sentence():
    with pytest.raises(
        UserError, match=r"inflora: options\.rank 33 is too large for blocks\.0\.attn\.qkv with 32 inputs"
    ):
        new_method("inflora", "vit_nano", rank=33)
    with pytest.raises(UserError, match="share must be at least 0 and at most 1"):
        new_method("inflora", "vit_nano", share=1.5)
