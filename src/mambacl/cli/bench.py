"""The command bench."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from mambacl.cli.parsing import Parser
from mambacl.errors import UserError


def bench(arguments: Sequence[str]) -> int:
    """how fast this machine does it, part by part: `mambacl bench scan step --device cpu`"""
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]](arguments[1:])
    helping = bool({"-h", "--help"} & set(arguments))
    parser = Parser(
        prog="mambacl bench",
        description="Times the parts named, or all, at sizes that suit the device. Ratios are those of one run.",
        epilog=_overview() if helping else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", metavar="PART", nargs="*", help="see below; all if none is named")
    _add_device(parser)
    _add_json(parser)
    _add_shapes(parser, helping)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats, to see that all is well")
    parser.add_argument("--root", type=Path, default=None, help="folder with CIFAR-100's files, for the part run")
    given = parser.parse_intermixed_args(arguments)
    for name in given.parts:
        if name in COMMANDS:
            raise UserError(f"`{name}` goes by itself, before its options: mambacl bench {name} --help says which.")

    from mambacl.bench import bench as run_bench

    run_bench(given.parts, given.device, given.json, given.shape, given.quick, given.root)
    return 0


def _overview() -> str:
    """Every part and command with a sentence."""
    from mambacl.bench import PARTS

    commands = {name: str(command.__doc__) for name, command in COMMANDS.items()}
    groups = {"parts:": PARTS, "commands, each with options (`mambacl bench COMMAND --help`):": commands}
    lines = []
    for title, entries in groups.items():
        lines += [title, *(f"  {name:14} {sentence}" for name, sentence in entries.items()), ""]
    return "\n".join(lines)


def against(arguments: Sequence[str]) -> int:
    """the scan beside whatever other implementations are installed, after a check that they agree"""
    parser = _parser(against, "Install the others with pip install 'mambacl[bench]'. All take turns in one process.")
    _add_device(parser)
    _add_shapes(parser, bool({"-h", "--help"} & set(arguments)))
    parser.add_argument("--threads", type=int, default=1, help="threads on the CPU (1)")
    parser.add_argument("--rounds", type=int, default=15, help="most rounds per shape (15)")
    _add_json(parser)
    parser.add_argument("--commit", help="recorded in the JSON where the package does not run from a git checkout")
    given = parser.parse_args(arguments)

    from mambacl.bench.against import against as run_against

    run_against(given.device, given.shape, given.json, given.threads, given.rounds, given.commit)
    return 0


def settings(arguments: Sequence[str]) -> int:
    """a training step after consolidated tasks, by setting: sequential, public-code, exact"""
    parser = _parser(settings, "Covariances come from the packaged images, so that ranks are those of a run.")
    _add_device(parser)
    parser.add_argument("--batch", type=int, default=200, help="images per step (200)")
    parser.add_argument("--precision", choices=("float32", "tf32", "bf16"), default="bf16", help="(bf16)")
    parser.add_argument("--tasks", type=int, default=3, help="tasks that are consolidated first, up to 5 (3)")
    parser.add_argument("--images", type=int, default=500, help="images per task, for the covariances (500)")
    _add_json(parser)
    given = parser.parse_args(arguments)

    from mambacl.bench.settings import settings as run_settings

    run_settings(given.device, given.batch, given.precision, given.tasks, given.images, given.json)
    return 0


def precision(arguments: Sequence[str]) -> int:
    """whole runs in float32, tf32 and bf16: accuracy, forgetting and seconds over several seeds"""
    parser = _parser(precision, "Finished runs in the folder are not trained again.")
    parser.add_argument("--preset", default="cifar100-10-nano", help="what to train (cifar100-10-nano)")
    parser.add_argument("--root", type=Path, default=None, help="folder with the data set's files")
    parser.add_argument("--out", type=Path, default=Path("runs/precision"), help="folder of the runs (runs/precision)")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (3)")
    _add_device(parser)
    _add_json(parser)
    given = parser.parse_args(arguments)

    from mambacl.bench.runs import precision as run_precision

    run_precision(given.preset, given.root, given.out, given.seeds, given.device, given.json)
    return 0


def busy(arguments: Sequence[str]) -> int:
    """a training step on the CPU beside other programs, by how OpenMP's threads wait for each other"""
    parser = _parser(busy, "About a minute on two cores.")
    parser.add_argument("--long", action="store_true", help="more ways of waiting, more rounds: about five minutes")
    parser.add_argument("--others", type=int, default=1, help="programs beside it, each with a thread per core (1)")
    _add_json(parser)
    given = parser.parse_args(arguments)

    from mambacl.bench.busy import busy as run_busy

    run_busy(given.long, given.others, given.json)
    return 0


def relaxation(arguments: Sequence[str]) -> int:
    """what letting A move gains, at equal drift of the old features"""
    parser = _parser(relaxation, "docs/exact.md explains it. About 4 minutes on two cores, one on an H200.")
    _add_device(parser)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (3)")
    parser.add_argument("--passes", type=int, default=3, help="passes over each task's images (3)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (0.002)")
    _add_json(parser)
    given = parser.parse_args(arguments)

    from mambacl.bench.relaxation import relaxation as run_relaxation

    run_relaxation(given.device, given.seeds, given.passes, given.lr, given.json)
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    command.__name__: command for command in (against, settings, precision, busy, relaxation)
}


def _parser(command: Callable[[Sequence[str]], int], words: str) -> Parser:
    sentence = str(command.__doc__)
    return Parser(prog=f"mambacl bench {command.__name__}", description=f"{sentence[0].upper()}{sentence[1:]}. {words}")


def _add_device(parser: Parser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def _add_json(parser: Parser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there, with machine and date")


def _add_shapes(parser: Parser, helping: bool) -> None:
    """Their names are known once PyTorch is loaded, which only help waits for."""
    names = ""
    if helping:
        from mambacl.bench import SHAPES

        names = f" ({', '.join(SHAPES)})"
    words = f"scans to time{names}; those that suit the device if left out"
    parser.add_argument("--shape", nargs="+", action="extend", default=[], metavar="NAME", help=words)
