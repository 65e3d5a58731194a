"""Several processes that train the same parameters: they share out decompositions and, if asked, the projections of a
step; results have the same bits on all of them, and are those of one process."""

import os
import signal

import pytest
import torch
from processes import RankError, on_ranks, outcomes
from test_fsdp import LIMIT, images, own, same, small_model
from torch import nn

from mambacl import processes
from mambacl.errors import UserError
from mambacl.nullspace import NullSpace, projectors
from mambacl.nullspace.sharing import shared_out

CASES = {
    "paper": ({"setting": "paper", "rank": "energy:0.9"}, torch.optim.Adam),
    "together": ({"setting": "exact", "rank": "energy:0.9", "rank_over": "all", "layers": "all"}, torch.optim.SGD),
    "gpm": ({"rule": "gpm", "rank": "energy:0.9"}, torch.optim.SGD),
    "osf": ({"rule": "osf"}, torch.optim.SGD),
    "owm": ({"rule": "owm"}, torch.optim.SGD),
}


def summed_gradients(model):
    """Gradients of the mean over all images, with the same bits on all ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            processes.sum_([parameter.grad])
            parameter.grad /= processes.count()


def two_tasks(name, shared=False, wrapped=False):
    overrides, kind = CASES[name]
    model = small_model()
    given = nn.parallel.DistributedDataParallel(model) if wrapped else model
    space = NullSpace(given, share_steps=shared, **overrides)
    found = {}
    for task in range(3):
        optimizer = space.wrap(kind(space.parameters(), lr=0.01, weight_decay=0.01), steps=3)
        for step in range(3):
            optimizer.zero_grad()
            given(own(images(10 * task + step))).square().mean().backward()
            if not wrapped:
                summed_gradients(model)
            optimizer.step()
        found[f"energy {task}"] = space.update_energy()
        found[f"again {task}"] = space.update_energy()
        if task < 2:
            space.consolidate([own(images(task))])
    found["step"] = dict(space.projected_step.state_dict())
    found["model"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    found["space"] = space.state_dict()
    return found


def all_cases():
    return {
        (name, shared): two_tasks(name, shared, wrapped=shared and name == "paper")
        for name in CASES
        for shared in (False, True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.long)])
def test_as_one_process_with_the_same_bits_everywhere(processes):
    first, *others = on_ranks(processes, all_cases)
    for (name, shared), found in first.items():
        same(found, two_tasks(name))
        for other in others:
            same_bits(other[name, shared], found)


def same_bits(actual, expected):
    for name, tensor in expected.items():
        if isinstance(tensor, dict):
            same_bits(actual[name], tensor)
        else:
            assert torch.equal(actual[name], tensor), name


# Decompositions


def counted_decompositions(rule, over):
    """How many matrices this rank has decomposed, of how many."""
    counts, eigh = [], torch.linalg.eigh

    def counting(matrices, *rest):
        counts.append(matrices.shape[:-2].numel())
        return eigh(matrices, *rest)

    projectors.torch.linalg.eigh = counting
    space = NullSpace(small_model(), "exact", layers="all", rank=rule, rank_over=over)
    space.consolidate([own(images(0))])
    everything = {p.key: space.covariances()[p.name].shape[:-2].numel() for p in space.selection.projected()}
    return sum(counts), sum(everything.values()), space.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("over", ["block", "all"])
def test_each_matrix_is_decomposed_once(over):
    found = on_ranks(2, counted_decompositions, "energy:0.95", over)
    assert sum(count for count, *_ in found) == found[0][1] and all(count > 0 for count, *_ in found)
    same_bits(found[1][2], found[0][2])


def test_work_is_shared_out_evenly_and_the_same_everywhere():
    sizes = {f"matrix {number}": float(number % 7 + 1) ** 3 for number in range(40)}
    for count in (1, 2, 3, 8):
        owners = shared_out(sizes, count)
        loads = [sum(size for key, size in sizes.items() if owners[key] == rank) for rank in range(count)]
        assert list(owners) == list(sizes) and max(loads) - min(loads) <= max(sizes.values())
        assert owners == shared_out(dict(sizes), count)


# When one process has nothing, or fails


def unequal_shares():
    """The second of two processes has no image of the first task, and the first none of the second."""
    space = NullSpace(small_model(), "exact", rank="energy:0.9", relax=0.01)
    for task in range(2):
        space.consolidate([images(task)] if processes.rank() == task else [])
    return space.covariances(), space.projected_step.boxes()


@pytest.mark.slow
def test_a_process_without_images_takes_part():
    space = NullSpace(small_model(), "exact", rank="energy:0.9", relax=0.01)
    for task in range(2):
        space.consolidate([images(task)])
    for covariances, boxes in on_ranks(2, unequal_shares):
        same(covariances, space.covariances())
        for name, box in space.projected_step.boxes().items():
            torch.testing.assert_close(boxes[name].lower, box.lower, rtol=LIMIT, atol=0)


def failing(how):
    model = small_model()
    space = NullSpace(model, "exact", rank="energy:0.9")

    def batches():
        yield own(images(0))
        if processes.rank() == 1 and how == "loader":
            raise OSError("the disk is gone")
        if processes.rank() == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    eigh = torch.linalg.eigh

    def broken(matrix, *rest):
        raise torch.linalg.LinAlgError("no convergence") if processes.rank() == 1 else eigh(matrix, *rest)

    if how == "decomposition" and processes.rank() == 1:
        projectors.torch.linalg.eigh = broken
    try:
        space.consolidate([] if how == "empty" else batches())
    except (UserError, OSError, torch.linalg.LinAlgError) as error:
        assert space.tasks == 0 and not space.covariances()
        projectors.torch.linalg.eigh = eigh
        space.consolidate([own(images(0))])  # and it works afterwards
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


@pytest.mark.slow
def test_what_fails_in_one_process_fails_in_all():
    for how, message in (("loader", "the disk is gone"), ("decomposition", "no convergence")):
        first, second = on_ranks(2, failing, how, timeout=60)
        assert first == f"UserError: Process 1 failed: {message}" and second.endswith(message)
    first, second = on_ranks(2, failing, "empty")
    assert first == second and "the loader is empty" in first


@pytest.mark.slow
def test_a_killed_process_ends_the_others_too():
    first, second = outcomes(2, failing, "killed", timeout=30)
    assert isinstance(first, RankError) and isinstance(second, RankError) and "-9" in second.text


# Resuming on another number of processes


def trained_on(state, steps, shared):
    """Continues from a state, or starts: the state afterwards."""
    model = small_model()
    space = NullSpace(model, "exact", rank="energy:0.9", share_steps=shared)
    optimizer = torch.optim.Adam(space.parameters(), lr=0.01)
    if state is None:
        space.consolidate([own(images(0))])
        space.wrap(optimizer)
        done = 0
    else:
        model.load_state_dict(state["model"])
        space.load_state_dict(state["space"])
        space.wrap(optimizer)
        optimizer.load_state_dict(state["optimizer"])
        space.projected_step.load_state_dict(state["step"])
        done = state["done"]
    for step in range(done, done + steps):
        optimizer.zero_grad()
        model(own(images(step))).square().mean().backward()
        summed_gradients(model)
        optimizer.step()
    return {"model": model.state_dict(), "space": space.state_dict(), "optimizer": optimizer.state_dict(),
            "step": dict(space.projected_step.state_dict()), "done": done + steps}  # fmt: skip


@pytest.mark.slow
def test_resuming_on_another_number_of_processes():
    expected = trained_on(None, 4, False)
    half = on_ranks(3, trained_on, None, 2, True)[0]
    first, second = on_ranks(2, trained_on, half, 2, True)
    for found in (first, second):
        same(found["model"], expected["model"])
        same(found["step"], expected["step"])
