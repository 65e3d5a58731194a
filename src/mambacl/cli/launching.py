"""`--gpus N`: the same command in N processes of this machine, started and watched by torchrun's own agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Annotated

from mambacl import processes
from mambacl.errors import UserError
from mambacl.lazy import loading_pytorch
from mambacl.options import at_least

Gpus = Annotated[int | None, "train on several GPUs of this machine, with a process for each", at_least(1)]
OPTION = "--gpus"


def without_option(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--gpus N` or `--gpus=N`."""
    kept = [word for word in arguments if not word.startswith(f"{OPTION}=")]
    if OPTION in kept:
        at = kept.index(OPTION)
        del kept[at : at + 2]
    return kept


def launch(command: str, arguments: Sequence[str], number: int) -> int:
    """Runs `mambacl COMMAND ARGUMENTS` in several processes. Returns the exit code of the first that failed, or 0."""
    if processes.launched():
        raise UserError(f"torchrun has started the processes already: leave out {OPTION}.")
    with loading_pytorch():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the processes say what is wrong
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=number,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
    )
    words = ["-m", "mambacl", *command.split(), *without_option(arguments)]
    try:
        elastic_launch(config, sys.executable)(*words)
    except ChildFailedError as error:
        first, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"mambacl: Process {first + 1} of {number} was ended by {name}.", file=sys.stderr)
            return 1
        return failure.exitcode
    except (KeyboardInterrupt, SignalException):  # the first process has said how to continue
        return 130
    return 0
