"""Runs a run's loop to the end, and records in results.json if something stops it early."""

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from mambacl import ops
from mambacl.config import RunConfig
from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.ops.precision import float32_products
from mambacl.training import auditing
from mambacl.training.build import Parts
from mambacl.training.checkpoints import Checkpoint
from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop, TrainingError


def execute(folder: RunFolder, parts: Parts, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Trains from the beginning, or from a checkpoint, to the end. Returns the results."""
    config = parts.config
    done = 0
    if checkpoint is not None:
        position = checkpoint.position
        done = sum(parts.steps(t) for t in range(position.task)) * config.training.epochs
        done += parts.steps(position.task) * position.epoch if position.epoch else 0
    else:
        logger.info("%s: %s; to %s", config.method, parts.method.summary, folder.path)
        logger.info("%s", parts.overview())
    loop = parts.loop(folder, done)
    try:
        with terminable(), arithmetic(config), loop.display:
            loop.run(checkpoint)
            with parts.watch.phase("audit"):
                auditing.audit(folder, parts.model, len(parts.stream.tasks), parts.method.moved())
            return loop.write_results("finished")
    except KeyboardInterrupt:
        _note_end(loop, "interrupted")
        logger.warning("`mambacl resume %s` continues from the last checkpoint.", folder.path)
        raise
    except (UserError, TrainingError) as error:
        _note_end(loop, "failed")
        raise TrainingError(f"{error} (`mambacl resume {folder.path}` continues from the last checkpoint)") from error
    except Exception as error:
        _note_end(loop, "failed")
        log = folder.path / "error.log"
        with suppress(OSError):
            log.write_text(traceback.format_exc(), encoding="utf-8")
        raise TrainingError(
            f"{type(error).__name__}: {error} (the traceback is in {log}; `mambacl resume {folder.path}` continues "
            "from the last checkpoint)"
        ) from error


def _note_end(loop: Loop, status: str) -> None:
    with suppress(OSError):  # a full disk may have stopped the run
        loop.background.wait()
    with suppress(OSError):
        loop.write_results(status)


@contextmanager
def arithmetic(config: RunConfig) -> Iterator[None]:
    """Sets how a run computes: with kernels or their plain twins, with or without TF32. A bf16 run uses TF32 for what
    autocast leaves in float32."""
    with (
        nullcontext() if config.precision == "float32" else float32_products(tf32=True),
        nullcontext() if config.fast else ops.switch.plain(),
    ):
        yield


@contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM, which batch systems send, end a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    own = os.getpid()

    def interrupt(*_: Any) -> None:
        if os.getpid() != own:  # a worker inherits this handler; it must end, so as not to keep the run's lock
            os._exit(128 + signal.SIGTERM)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
