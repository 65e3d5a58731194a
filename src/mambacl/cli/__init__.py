"""The command line, one file per group of commands. A user's mistake prints one sentence and exits with 2; a failure
during the work exits with 1."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mambacl import processes
from mambacl.cli.bench import (
    bench,
    bench_against,
    bench_busy,
    bench_exports,
    bench_methods,
    bench_precision,
    bench_relaxation,
    bench_settings,
)
from mambacl.cli.command import Command
from mambacl.cli.completion import COMPLETE, candidates, completion
from mambacl.cli.data import data_check, data_list, data_prepare, data_show
from mambacl.cli.deploy import compare, export, predict
from mambacl.cli.doctor import doctor
from mambacl.cli.hub import pull, push
from mambacl.cli.learning import learn, rollback
from mambacl.cli.models import convert, methods, models
from mambacl.cli.paper import paper
from mambacl.cli.planning import plan
from mambacl.cli.pretraining import pretrain
from mambacl.cli.reporting import audit, report
from mambacl.cli.serving import serve
from mambacl.cli.sweeping import sweep, tune
from mambacl.cli.training import evaluate, resume, train
from mambacl.cli.watching import watch
from mambacl.config import RunConfig
from mambacl.errors import UserError
from mambacl.files import full_disk
from mambacl.heap import keep_freed_memory
from mambacl.lazy import own_version
from mambacl.log import logger
from mambacl.pretraining.options import PretrainConfig
from mambacl.registry import unknown
from mambacl.training.seconds import count_from_process_start

FUNCTIONS = (
    train, sweep, tune, resume, watch, evaluate, predict, learn, rollback, compare, export, serve, push, pull, report,
    audit, pretrain, paper, plan, data_list, data_prepare, data_check, data_show, bench, bench_against, bench_settings,
    bench_methods, bench_precision, bench_exports, bench_busy, bench_relaxation, models, methods,
    convert, doctor, completion,
)  # fmt: skip
CONFIGS: dict[Any, type] = {pretrain: PretrainConfig}  # of commands with options other than a run's
COMMANDS = {
    name: Command(name, function, CONFIGS.get(function, RunConfig))
    for function in FUNCTIONS
    for name in [function.__name__.replace("_", " ")]
}
# commands that compute for a long time; those of a sweep are processes of `train`
LONG = ("train", "resume", "evaluate", "predict", "learn", "compare", "serve", "pretrain", "paper", "audit")
BUSY = 0.5  # load per core above which the machine counts as busy
SPINS = "2000"  # about as long as Python takes between two operations


FIRST_STEPS = """\
mambacl teaches a pre-trained Mamba model new classes without forgetting. To begin:

  mambacl doctor
      says what works on this machine, what is slow, and what to do about it
  mambacl train demo
      learns ten classes in five tasks from packaged images, in about 20 seconds
  mambacl train images --stream.root photos --stream.tasks 5
      learns your own images, in photos/train/CLASS/ and photos/test/CLASS/
  mambacl report runs/*
      compares the runs so far

`mambacl --help` lists all commands, `mambacl COMMAND --help` explains one."""


def usage(first: str = "") -> str:
    """All commands, without those that the help of another lists, such as `bench against`; or the commands that begin
    with the word `first`."""
    from mambacl.cli.help import rows

    inner = [name for name in COMMANDS if " " in name and name.split()[0] in COMMANDS]
    chosen = [COMMANDS[name] for name in COMMANDS if (name.split()[0] == first if first else name not in inner)]
    lines = rows([(command.name, command.summary) for command in chosen])
    head = [f"usage: mambacl {first or 'COMMAND'} ...", f"example: {chosen[0].example}"]
    about = [] if first else ["", "Teaches a pre-trained Mamba model new classes without forgetting."]
    return "\n".join([*head, *about, "", *lines, "", "For details: `mambacl COMMAND --help`."])


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage() if arguments else FIRST_STEPS)
        return 0
    if arguments[0] == COMPLETE:
        print("\n".join(candidates(COMMANDS, arguments[1:])))
        return 0
    if arguments[0] == "--version":
        print(f"mambacl {own_version()}")
        return 0
    first, second = arguments[0], " ".join(arguments[:2])
    if second in COMMANDS:  # such as `data check`
        return _run(COMMANDS[second], arguments[2:])
    below = [name for name in COMMANDS if name.startswith(f"{first} ")]
    if first not in COMMANDS and not below:
        raise unknown("command", first, dict.fromkeys(name.split()[0] for name in COMMANDS))
    if first not in COMMANDS and len(arguments) == 1:
        *actions, last = (name.split()[1] for name in below)
        raise UserError(f"`mambacl {first}` needs another word: {', '.join(actions)} or {last}.")
    if first not in COMMANDS and arguments[1] not in ("-h", "--help"):
        raise unknown("command", second, below)
    if first not in COMMANDS:
        print(usage(first))
        return 0
    if first in LONG:
        _share_cores()
        keep_freed_memory()
    return _run(COMMANDS[first], arguments[1:])


def _run(command: Command, arguments: Sequence[str]) -> int:
    if not any(word in ("-h", "--help") for word in arguments):
        return command(arguments)
    from mambacl.cli.help import command_help

    below = [other for name, other in COMMANDS.items() if name.startswith(f"{command.name} ")]
    print(command_help(command, arguments, below))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    _print_any_name()
    level = logger.level
    if processes.launched():  # before PyTorch is imported: no warning from each process that all parameters are used
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not processes.is_first():  # the first process of a run speaks for all
        logger.setLevel(logging.ERROR)
    if arguments is None:  # this process exists only for the command
        count_from_process_start()
    try:
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # here, where a closed pipe is no error
        return code
    except UserError as error:  # all processes of a run meet it, or those of one machine
        return _fail(str(error), 2) if processes.on_machine()[0] == 0 else 2
    except KeyboardInterrupt:
        return _fail("Interrupted.", 130) if processes.is_first() else 130
    except BrokenPipeError:  # the reader of our output has stopped
        sys.stderr.close()
        return 1
    except OSError as error:
        _drop_output()
        sentence = full_disk(error, error.filename) or f"{error.strerror or error}: {error.filename or 'unknown file'}."
        return _fail(str(sentence), 2)
    except Exception as error:
        from mambacl.training.loop import TrainingError

        if processes.is_loss(error):
            return _fail(f"{processes.LOST} ({str(error).splitlines()[0]}).", 1) if processes.is_first() else 1
        if isinstance(error, TrainingError):
            return _fail(str(error), 1) if processes.is_first() or not error.everywhere else 1
        raise
    finally:
        logger.setLevel(level)  # --quiet is for this command only


def _drop_output() -> None:
    """Drops what standard output can no longer take, or Python would complain about it again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _print_any_name() -> None:
    """Prints characters that the terminal's encoding lacks as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _share_cores() -> None:
    """Shortens the time that OpenMP's threads spin, by default for milliseconds, while they wait for each other. On a
    shared machine, spinning threads take the cores from the threads that they wait for. On a busy machine they do not
    spin at all. This must be set before PyTorch, which starts the threads, is imported."""
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return
    busy = False
    with suppress(AttributeError, OSError):  # some systems do not know their load
        busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
    if busy:
        os.environ["OMP_WAIT_POLICY"] = "passive"
    else:
        os.environ["GOMP_SPINCOUNT"] = SPINS


def _fail(sentence: str, code: int) -> int:
    processes.leave_at_once()
    print(f"mambacl: {sentence}", file=sys.stderr)
    return code
