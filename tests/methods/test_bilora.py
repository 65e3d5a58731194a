"""BiLoRA gives the numbers that were recorded from its public code."""

import pytest
import torch
from adapter_methods_help import accuracy, learn, new_method
from layer_recordings import LayerRecording, adam_with_recorded_rates, check_answers, set_head
from prompt_recordings import FIRST, LATER

from mambacl.errors import UserError

PARTS = {"key": "k", "value": "v"}


def test_three_tasks_as_recorded():
    recording = LayerRecording("bilora")
    c = recording.config
    method = recording.method("bilora", frequencies=c["frequencies"], alpha=c["alpha"])
    index = {place.name: number for number, place in enumerate(method.changes.places)}
    assert len(index) == 2 * c["depth"]
    for task in range(c["tasks"]):
        head, name = recording.start(method, task), f"task{task}"
        set_head(head, recording[f"{name}.head_initial.weight"], recording[f"{name}.head_initial.bias"])
        changes = {
            (block, part): method.changes.at(index[f"blocks.{block}.attn.qkv.{letter}"])[-1]
            for block in range(c["depth"])
            for part, letter in PARTS.items()
        }
        rows, columns = recording[f"{name}.frequency_positions"]
        for own in changes.values():
            assert torch.equal(own.positions.long(), rows * c["width"] + columns)
        recording.compared.add(f"{name}.frequency_positions")

        def check(changes=changes, head=head, name=name, tolerance=FIRST if task == 0 else LATER):
            for (block, part), own in changes.items():
                stored = f"{name}.step0.gradient.block{block}.{part}_coefficients"
                recording.near(stored, own.coefficients.grad, tolerance)
            recording.near(f"{name}.step0.gradient.head.weight", head.weight.grad, tolerance)

        losses = adam_with_recorded_rates(recording, method, task, check)
        recording.near(f"{name}.losses", losses, LATER)
        for (block, part), own in changes.items():
            recording.near(f"{name}.block{block}.{part}_coefficients_final", own.coefficients, LATER)
            recording.near(f"{name}.block{block}.{part}_delta_weight", own.matrices([own])[0], LATER)
        check_answers(recording, method, task)
    assert not recording.left("gradient", "losses", "final", ".test.", "delta", "rates", "positions")


def test_positions_of_two_tasks_hardly_overlap():
    method = new_method("bilora", "vit_nano")
    learn(method, range(2), steps=1)
    for place in range(len(method.changes.places)):
        one, other = (set(change.positions.tolist()) for change in method.changes.at(place))
        assert len(one) == len(other) == 5 and len(one & other) <= 1  # 0.51% of 1024 weights


@pytest.mark.parametrize("family", ["vit_nano", "vim_nano"])
def test_it_learns(family):
    method = new_method("bilora", family, frequencies=60)
    learn(method, range(2), steps=15)
    assert accuracy(method, range(2)) > 0.5  # chance is 0.25


def test_a_mistake_gets_one_sentence():
    words = (
        r"bilora: options\.frequencies 1025 is more than blocks\.0\.attn\.qkv\.k has weights: set it to 1024 or less"
    )
    with pytest.raises(UserError, match=words):
        new_method("bilora", "vit_nano", frequencies=1025)
    with pytest.raises(UserError, match="alpha must be positive"):
        new_method("bilora", "vit_nano", alpha=0.0)
