"""Memory that is freed and used again."""

import resource
import sys
from dataclasses import replace

import pytest
import torch

from mambacl import heap
from mambacl.bench import freed
from mambacl.bench.sizes import CPU, Case
from mambacl.bench.timing import Clock
from mambacl.heap import keep_freed_memory

glibc = pytest.mark.skipif(sys.platform != "linux", reason="Linux's C library only")


@glibc
def test_freed_memory_is_used_again() -> None:
    """A model that answers asks the system for hardly any new pages. What it would ask for without is up to the C
    library, which sometimes keeps blocks of this size by itself."""
    clock = Clock(torch.device("cpu"), 1, 0.1)
    [row] = freed.measure(clock, replace(CPU, inference=(Case("defocus_mamba_nano", (32,)),))).rows
    assert row["kept_page_faults"] * resource.getpagesize() < row["kept_peak_bytes"] / 100
    assert row["kept_peak_bytes"] < 1.2 * row["returned_peak_bytes"]


def test_the_users_choice_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    for name in heap.OWN_CHOICES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(heap.sys, "platform", "win32")
    assert not keep_freed_memory()
