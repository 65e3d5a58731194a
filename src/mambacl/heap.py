"""How the C library keeps memory that is freed.

Linux's (glibc) returns large freed blocks to the system at once, and the system clears the pages of the next ones: when
a model answers on a CPU, this takes as long as half of the computation. If the process keeps what it has freed, its
peak is the same. Training hardly differs, because what a step keeps for its backward pass lies above what it frees.
"""

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's numbers, from malloc.h
ALL = -1  # no limit
LARGE = 1 << 30  # bytes; a block from here on is returned when it is freed
OWN_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Makes this process keep freed blocks of less than 1 GB for its next ones. Returns whether it does: other systems'
    libraries are left as they are, and so are the user's own choices, in the environment variables of glibc."""
    if sys.platform != "linux" or any(name in os.environ for name in OWN_CHOICES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all((mallopt(MMAP_THRESHOLD, LARGE), mallopt(TRIM_THRESHOLD, ALL)))
