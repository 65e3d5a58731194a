"""The command line, one file a group of commands. A mistake of the user's gets one sentence and exit code 2; a failure
in the middle of work 1."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from mambacl.cli.bench import bench
from mambacl.cli.data import data
from mambacl.cli.models import convert, methods, models, plan
from mambacl.cli.paper import paper
from mambacl.cli.reporting import audit, report
from mambacl.cli.training import evaluate, resume, train
from mambacl.errors import UserError
from mambacl.registry import did_you_mean
from mambacl.training.seconds import count_from_the_start_of_the_process

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    command.__name__: command
    for command in (train, resume, evaluate, report, paper, audit, plan, data, bench, models, methods, convert)
}

LONG = (train, resume, evaluate, paper, audit)  # and compute
BUSY = 0.5  # programs that want a core, for each core
SPINS = "2000"  # about as long as Python takes from one operation to the next


def usage() -> str:
    lines = [f"  {name:10} {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: mambacl COMMAND ...", "", "Teaches a Mamba model new classes without forgetting the old ones.", "",
         *lines, "", "`mambacl COMMAND --help` says more."]
    )  # fmt: skip


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"mambacl {version('mambacl')}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        hint = did_you_mean(arguments[0], COMMANDS)
        return _fail(f"There is no command '{arguments[0]}'.{hint} Known: {', '.join(COMMANDS)}.", 2)
    if command in LONG:
        _share_cores()
    return command(arguments[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    _print_any_name()
    if arguments is None:  # the process is there for this command
        count_from_the_start_of_the_process()
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
