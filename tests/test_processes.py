"""The helper that runs tests on several ranks: it returns what they return and says what went wrong."""

import os
import signal

import pytest
import torch
from processes import RankError, on_ranks, outcomes

from mambacl import processes
from mambacl.errors import UserError

pytestmark = pytest.mark.slow


def _rank_and_sum(value):
    total = torch.tensor([value + processes.rank()])
    processes.sum_([total])
    return processes.rank(), processes.count(), total


def _one_fails(how):
    if processes.rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise UserError("no data here")
    processes.wait()


def test_ranks_exchange_and_return():
    found = on_ranks(3, _rank_and_sum, 10)
    assert [rank for rank, _, _ in found] == [0, 1, 2]
    assert all(count == 3 and int(total) == 33 for _, count, total in found)


def test_a_rank_that_raises_is_reported_first():
    with pytest.raises(RankError, match="no data here") as caught:
        on_ranks(2, _one_fails, "raises")
    assert caught.value.rank == 1 and isinstance(caught.value.error, UserError)


def test_a_rank_that_dies_or_hangs_is_reported():
    first, second = outcomes(2, _one_fails, "killed", timeout=20)
    assert isinstance(first, RankError) and "exit code -9" in second.text
