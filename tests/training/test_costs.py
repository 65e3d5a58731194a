"""The formulas of a plan, against sums by hand."""

from dataclasses import replace

import pytest

from mambacl.nullspace.offload import STACK_BYTES
from mambacl.training.costs import (
    BUCKET,
    Load,
    Machine,
    Sizes,
    Switches,
    all_gather,
    all_reduce,
    peak,
    projectors_on_gpu,
    sent_at_task_end,
    sent_bytes,
    step_memory,
    step_seconds,
    task_end_memory,
    task_end_seconds,
    waiting_with_ddp,
    waiting_with_fsdp2,
)

SIZES = Sizes(
    parameters=1000, trained=400, blocks=10, block=90, head=60, head_trained=20, forward=2e3, backward=3e3,
    kept_fixed=500, kept_image=100, again_fixed=50, again_image=10, block_fixed=5, block_image=12,
    matrices={10: 4, 20: 3}, basis_values=160, projected=300, projected_tensors=3,
    projection=8e3, snapshot=1500, gram=700.0, held=2,
)  # fmt: skip
COVARIANCES = 8 * (4 * 100 + 3 * 400)
MACHINE = Machine(speed=1e4, float32=4e3, cube=1e-6, copies=1e5, host=1e3, bandwidth=1e4, latency=1e-4, reserved=7.0)
LOAD = Load(batch=30, gpus=4, covariance_batch=10)  # 8 images for the GPU with the most
DDP, FSDP = Switches(), Switches(shard=True)


def test_the_largest_share_and_piece_count() -> None:
    assert LOAD.own == 8 and LOAD.piece(Switches(accumulate=3)) == 3 and LOAD.piece(Switches(accumulate=8)) == 1


def test_memory_of_a_step() -> None:
    assert step_memory(SIZES, DDP, LOAD) == {
        "parameters": 4000,
        "gradients": 4 * 420,
        "optimizer": 8 * 420,
        "activations": 500 + 8 * 100 + 5 + 8 * 12,
        "projection": 1500 - 1401,
        "projectors": 640,
        "covariances": 2 * COVARIANCES,
        "classifier": 240,
    }


def test_memory_of_a_step_with_everything_switched_on() -> None:
    switches = Switches(4, True, "cpu", "disk", "bfloat16", True)
    assert step_memory(SIZES, switches, LOAD) == {
        "parameters": 1000 + 2 * 4 * 90,
        "gradients": 420,
        "optimizer": 840,
        "activations": 50 + 2 * 10 + 5 + 2 * 12,
        "projection": 1500 / 4 - 99,
        "projectors": 320,
        "covariances": 0,
        "classifier": 240,
    }


def test_projectors_elsewhere_leave_two_stacks() -> None:
    large = replace(SIZES, basis_values=10 * STACK_BYTES)
    assert projectors_on_gpu(large, DDP) == 40 * STACK_BYTES
    assert projectors_on_gpu(large, Switches(storage="float16")) == 20 * STACK_BYTES
    assert projectors_on_gpu(large, Switches(projectors="cpu")) == 2 * STACK_BYTES


def test_memory_at_the_end_of_a_task() -> None:
    found = task_end_memory(SIZES, DDP, LOAD)
    assert found == {
        "parameters": 4000,
        "activations": 5 + 10 * 12,
        "gathering": COVARIANCES,
        "covariances": 2 * COVARIANCES,
        "projectors": 2 * 640,
        "classifier": 240,
    }
    assert peak(SIZES, DDP, LOAD, MACHINE) == 7 + sum(found.values()) > 7 + sum(step_memory(SIZES, DDP, LOAD).values())


def test_a_ring_and_its_messages() -> None:
    assert all_reduce(8e4, 4, MACHINE) == pytest.approx(2 * 0.75 * 8 + 2 * 2 * 1e-4)
    assert all_reduce(8e4, 5, MACHINE, messages=10) == pytest.approx(2 * 0.8 * 8 + 2 * 3 * 10 * 1e-4)
    assert all_gather(8e4, 4, MACHINE) == pytest.approx(0.75 * 8 + 2 * 1e-4)
    assert all_reduce(8e4, 1, MACHINE) == all_gather(8e4, 1, MACHINE) == 0


def test_seconds_of_a_step_with_ddp() -> None:
    """One message of 1680 bytes takes 0.2524 s. It goes when the backward pass is over: nothing hides it."""
    found = step_seconds(SIZES, DDP, LOAD, MACHINE)
    assert found == pytest.approx({
        "forward": 1.6, "backward": 2.4, "recompute": 0, "waiting": 0.2524,
        "optimizer": 420 * 28 / 1e5, "projection": 2.0, "bringing": 0,
    })  # fmt: skip
    slow = replace(MACHINE, bandwidth=100.0)
    found = step_seconds(SIZES, Switches(accumulate=2), LOAD, slow)
    assert found["waiting"] == pytest.approx(all_reduce(1680, 4, slow))
    shared = Switches(share_steps=True)
    assert step_seconds(SIZES, shared, LOAD, MACHINE)["projection"] == 2.0 / 4 + all_gather(1200, 4, MACHINE, 3)
    assert sent_bytes(SIZES, shared, LOAD) == 0.75 * (2 * 1680 + 1200)
    assert sent_bytes(SIZES, DDP, LOAD) == 2 * 0.75 * 1680


def test_messages_go_while_the_pass_goes_on() -> None:
    """100 MB in four messages of a second each, and ten blocks: they are full after blocks 3, 5, 8 and 10."""
    machine = replace(MACHINE, bandwidth=2 * 0.75 * BUCKET, latency=0.0)
    for backward, waiting in (
        (100.0, 1.0),  # the last message alone
        (10.0, 1.0),  # they leave at 3, 5, 8 and 10 and arrive at 4, 6, 9 and 11
        (4.0, 1.2),  # they leave at 1.2, 2.2, 3.2 and 4.2
        (1.0, 3.3),  # at 0.3, 1.3, 2.3 and 3.3
        (0.0, 4.0),
    ):
        assert waiting_with_ddp(backward, 10, 4 * BUCKET, 4, machine) == pytest.approx(waiting)
    assert waiting_with_ddp(10.0, 10, 4 * BUCKET, 1, machine) == waiting_with_ddp(10.0, 10, 0, 4, machine) == 0


@pytest.mark.parametrize("gather, scatter", [(3.0, 1.0), (1.0, 0.5)])
def test_one_block_cannot_hide_its_first_message_and_its_last(gather: float, scatter: float) -> None:
    """Forward 2 s, backward 4 s. The second gathering goes while the forward pass runs."""
    machine = replace(MACHINE, bandwidth=0.75, latency=0.0)
    waiting = waiting_with_fsdp2(2.0, 4.0, 1, 1, gather, scatter, 4, machine)
    assert waiting == pytest.approx(gather + max(0.0, gather - 2.0) + scatter)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("seconds", [0.01, 1.0, 100.0])
def test_what_waits_is_between_all_messages_and_what_passes_cannot_hide(pieces: int, seconds: float) -> None:
    machine = replace(MACHINE, bandwidth=0.75, latency=0.0)
    sent = pieces * (2 * 8.0 + 2.0)
    waiting = waiting_with_fsdp2(seconds, 2 * seconds, 16, pieces, 8.0, 2.0, 4, machine)
    assert max(0.0, sent - pieces * 3 * seconds) <= waiting <= sent
    ends = pieces * (8.0 + 2.0) / 16  # of a piece, the first message and the last
    assert seconds < 100 or waiting == pytest.approx(ends)


def test_seconds_of_a_step_with_fsdp2() -> None:
    slow, twice = replace(MACHINE, bandwidth=500.0), Switches(accumulate=2, recompute=True, shard=True)
    found = step_seconds(SIZES, twice, LOAD, slow)
    passes = 2 * all_gather(4000, 4, slow, 10) + all_gather(1680, 4, slow, 10)
    assert found["recompute"] == 1.6 and 2 * passes - 5.6 <= found["waiting"] <= 2 * passes
    assert found["projection"] == 0.5 and found["optimizer"] == pytest.approx(420 * 28 / 1e5 / 4)
    assert sent_bytes(SIZES, twice, LOAD) == 2 * 0.75 * (2 * 4000 + 1680)


def test_bringing_projectors_hides_behind_projecting() -> None:
    slow = replace(MACHINE, host=200.0)
    assert step_seconds(SIZES, Switches(projectors="cpu"), LOAD, slow)["bringing"] == pytest.approx(640 / 200 - 2.0)
    assert step_seconds(SIZES, Switches(projectors="cpu"), LOAD, MACHINE)["bringing"] == 0


def test_the_end_of_a_task() -> None:
    found = task_end_seconds(SIZES, Switches(covariances="cpu"), LOAD, MACHINE, images=100)
    assert found == pytest.approx({
        "covariances": 25 * (0.2 + 0.175),
        "sum": all_reduce(COVARIANCES, 4, MACHINE, 7),
        "decomposition": 1e-6 * (1000 * 1 + 8000 * 1),  # of 4 and of 3 matrices, on 4 GPUs
        "bases": all_gather(640, 4, MACHINE, 4),
        "moving": 2 * COVARIANCES / 1e3,
    })  # fmt: skip
    assert task_end_seconds(SIZES, DDP, replace(LOAD, gpus=3), MACHINE, 0)["decomposition"] == pytest.approx(0.010)
    assert sent_at_task_end(SIZES, DDP, LOAD) == 0.75 * (2 * COVARIANCES + 640)
    assert task_end_seconds(replace(SIZES, matrices={}), DDP, LOAD, MACHINE, 100) == {}


def test_the_assumptions_are_those_measured() -> None:
    """De-focus-L in bf16: 93.6 and 126.3 GFLOP for an image; 242 ms for a step of 200 on an H200. A decomposition of
    2048 x 2048 took 27 ms."""
    machine = Machine()
    assert 200 * (93.6e9 + 126.3e9) / machine.speed == pytest.approx(0.242, rel=0.02)
    assert machine.cube * 2048**3 == pytest.approx(0.027, rel=0.02)
