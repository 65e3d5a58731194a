"""The helper that runs tests on several ranks: it returns what they return and says what went wrong."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from processes import RankError, on_ranks, outcomes

from mambacl import processes
from mambacl.errors import UserError
from mambacl.processes import _meet

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


def test_restarted_processes_meet_under_a_new_name(monkeypatch):
    """Some machines do not count a restart, and dead processes have left their words."""
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    store, names = torch.distributed.HashStore(), set()
    for start in range(3):
        with ThreadPoolExecutor(3) as pool:
            found = set(pool.map(lambda number: _meet(store, number, 3), range(3)))
        [(name, again)] = found
        assert again == (start > 0) and name not in names
        names.add(name)
        store.set("here-2", "0-dead")  # one that has come and died before it was answered


def test_a_process_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.1)
    with pytest.raises(UserError, match="Process 1 of 2 has not come"):
        _meet(torch.distributed.HashStore(), 0, 2)


def test_a_mistake_on_another_machine_is_told_there():
    """The first process of each machine speaks."""
    words = [sys.executable, "-m", "mambacl", "train", "demo", "--device", "cuda:99"]
    for number, told in (("0", True), ("1", False)):
        ours = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": "2"}
        done = subprocess.run(
            words, env={**os.environ, "TORCHELASTIC_RUN_ID": "x", **ours}, capture_output=True, text=True
        )
        assert done.returncode == 2 and ("no device 'cuda:99'" in done.stderr) == told, done.stderr
