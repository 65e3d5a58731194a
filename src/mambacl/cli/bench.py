"""The command bench."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mambacl.cli.parsing import Parser
from mambacl.errors import UserError


def bench(arguments: Sequence[str]) -> int:
    """how fast this machine does it, part by part: `mambacl bench scan step --device cpu`"""
    if list(arguments[:1]) == ["against"]:
        return against(arguments[1:])
    parts, names = _names() if {"-h", "--help"} & set(arguments) else ("", "")
    words = (
        "Times the parts named, or all, at sizes that suit the device. Ratios are those of one run. `mambacl bench "
        "against` times the scan beside other implementations."
    )
    parser = Parser(prog="mambacl bench", description=words)
    parser.add_argument("parts", metavar="PART", nargs="*", help=f"of {parts}; all if none is named")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there, with machine and date")
    shapes = f"scans to time: {names}; those that suit the device if left out"
    parser.add_argument("--shape", nargs="+", action="extend", default=[], metavar="NAME", help=shapes)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats, to see that all is well")
    parser.add_argument("--root", type=Path, default=None, help="folder with CIFAR-100's files, for the part run")
    given = parser.parse_intermixed_args(arguments)
    if "against" in given.parts:
        raise UserError("`against` goes by itself, before its options: mambacl bench against --help says which.")

    from mambacl.bench import bench as run_bench

    run_bench(given.parts, given.device, given.json, given.shape, given.quick, given.root)
    return 0


def _names() -> tuple[str, str]:
    """Of the parts and the shapes, which PyTorch must be loaded for."""
    from mambacl.bench import PARTS, SHAPES

    return ", ".join(PARTS), ", ".join(SHAPES)


def against(arguments: Sequence[str]) -> int:
    names = _names()[1] if {"-h", "--help"} & set(arguments) else ""
    words = (
        "Times the selective scan beside whatever other implementations are installed, in one process and in turn, "
        "after checking that their results agree. Install them with pip install 'mambacl[bench]'."
    )
    parser = Parser(prog="mambacl bench against", description=words)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    shapes = f"scans to time: {names}; those that suit the device if left out"
    parser.add_argument("--shape", nargs="+", action="extend", default=[], metavar="NAME", help=shapes)
    parser.add_argument("--threads", type=int, default=1, help="threads on the CPU (1)")
    parser.add_argument("--rounds", type=int, default=15, help="most rounds per shape (15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there, with machine and date")
    parser.add_argument("--commit", help="recorded in the JSON where the package does not run from a git checkout")
    given = parser.parse_args(arguments)

    from mambacl.bench.against import against as run_against

    run_against(given.device, given.shape, given.json, given.threads, given.rounds, given.commit)
    return 0
