"""The command line, one file per group of commands. A mistake of the user's gets one sentence and exit code 2, a
failure in the middle of work 1."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from mambacl.cli.bench import bench, bench_against, bench_busy, bench_precision, bench_relaxation, bench_settings
from mambacl.cli.command import Command
from mambacl.cli.data import data_check, data_list, data_prepare, data_show
from mambacl.cli.models import convert, methods, models, plan
from mambacl.cli.paper import paper
from mambacl.cli.reporting import audit, report
from mambacl.cli.training import evaluate, resume, train
from mambacl.errors import UserError
from mambacl.registry import unknown
from mambacl.training.seconds import count_from_process_start

FUNCTIONS = (
    train, resume, evaluate, report, audit, paper, plan, data_list, data_prepare, data_check, data_show, bench,
    bench_against, bench_settings, bench_precision, bench_busy, bench_relaxation, models, methods, convert,
)  # fmt: skip
COMMANDS = {name: Command(name, function) for function in FUNCTIONS for name in [function.__name__.replace("_", " ")]}
LONG = ("train", "resume", "evaluate", "paper", "audit")  # and compute
BUSY = 0.5  # programs that want a core, for each core
SPINS = "2000"  # about as long as Python takes from one operation to the next


def usage(first: str = "") -> str:
    """All commands, or those that begin with a word."""
    chosen = [command for name, command in COMMANDS.items() if not first or name.split()[0] == first]
    lines = [f"  {command.name:14} {command.summary}" for command in chosen]
    return "\n".join(
        [f"usage: mambacl {first or 'COMMAND'} ...", "", "Teaches a Mamba model new classes without forgetting.",
         "", *lines, "", "`mambacl COMMAND --help` says more."]
    )  # fmt: skip


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"mambacl {version('mambacl')}")
        return 0
    first, second = arguments[0], " ".join(arguments[:2])
    if second in COMMANDS:  # such as `data check`
        return COMMANDS[second](arguments[2:])
    actions = [name.split()[1] for name in COMMANDS if name.startswith(f"{first} ")]
    if first not in COMMANDS and actions:
        return _without_action(first, actions, arguments[1:])
    if first not in COMMANDS:
        raise unknown("command", first, dict.fromkeys(name.split()[0] for name in COMMANDS))
    if first in LONG:
        _share_cores()
    return COMMANDS[first](arguments[1:])


def _without_action(first: str, actions: Sequence[str], rest: Sequence[str]) -> int:
    if not rest:
        raise UserError(f"Say what to do: mambacl {first} {', '.join(actions[:-1])} or {actions[-1]}.")
    if rest[0] not in ("-h", "--help"):
        raise unknown("command", f"{first} {rest[0]}", [f"{first} {action}" for action in actions])
    print(usage(first))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    _print_any_name()
    if arguments is None:  # the process is there for this command
        count_from_process_start()
    try:
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # here, where a reader that has gone is no mistake
        return code
    except UserError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("Interrupted.", 130)
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 1
    except OSError as error:
        return _fail(f"{error.strerror or error}: {error.filename or 'no file named'}.", 2)
    except Exception as error:
        from mambacl.training.loop import TrainingError

        if isinstance(error, TrainingError):
            return _fail(str(error), 1)
        raise


def _print_any_name() -> None:
    """Names of files and classes that the terminal's encoding lacks are printed with escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _share_cores() -> None:
    """OpenMP's threads wait for each other by spinning, for milliseconds. Where other programs want the cores too, it
    keeps them from the very threads that are waited for: they spin for a moment only, and not at all where the machine
    is busy already. It counts where PyTorch, which starts them, is not loaded yet."""
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return
    busy = False
    with suppress(AttributeError, OSError):  # not every system knows its load
        busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
    if busy:
        os.environ["OMP_WAIT_POLICY"] = "passive"
    else:
        os.environ["GOMP_SPINCOUNT"] = SPINS


def _fail(sentence: str, code: int) -> int:
    print(f"mambacl: {sentence}", file=sys.stderr)
    return code
