"""The command paper: a table or figure of the paper, from its runs to the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mambacl.cli.parsing import Parser, check_options, with_underscores
from mambacl.errors import UserError

if TYPE_CHECKING:
    from mambacl.paper.runner import Job

OWN = {"method": "the design says which", "name": "the benchmark gives it", "seed": "give --seeds N",
       "stream.tasks": "the benchmark has them", "stream.dataset": "the scale and --root say which"}  # fmt: skip
DEFAULT_SEEDS = {"paper": 3, "nano": 1}


def paper(arguments: Sequence[str]) -> int:
    """a table or figure of the paper, from its runs to the page: `mambacl paper ablation --scale nano`"""
    from mambacl.paper.designs import DESIGNS, SCALES, planned

    words = "Trains the runs of a table or figure of the paper, as far as they are not there, and shows both's values."
    parser = Parser(prog="mambacl paper", description=words)
    parser.usage = "mambacl paper NAME [--scale paper|nano] [--root DIR] [--out DIR] [--key value ...]"
    parser.epilog = "Any option of `mambacl train` goes before the preset's: --training.passes 1, --device cuda."
    parser.allow_abbrev = False
    parser.add_argument("--scale", choices=SCALES, default="paper", help="the paper's backbones, or the nano in the "
                        "package")  # fmt: skip
    parser.add_argument("--root", type=Path, default=None, help="a folder with a folder for each data set (imagenet-r, "
                        "cifar100, domainnet-s200); at the scale nano CIFAR-100's own, the packaged Fashion-MNIST "
                        "without it")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), help="runs and results go to OUT/SCALE")
    parser.add_argument("--seeds", type=int, default=None, help="runs of each kind; 3 as in the paper, 1 at nano")
    parser.add_argument("--only", default="", metavar="WORDS", help="only runs whose name contains one of these, "
                        "with commas")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the runs and whether each is finished")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{parser.format_help()}\nNAME: {', '.join(DESIGNS)}")
        return 0 if arguments else 2
    if arguments[0].startswith("-"):
        raise UserError(f"Say first which table or figure: {', '.join(DESIGNS)}.")
    name = arguments[0]
    planned(name)  # a wrong name is said before anything else
    given, rest = parser.parse_known_args(arguments[1:])
    overrides = _overrides(rest)
    if name == "pretraining" and "pretrained" in overrides:
        raise UserError("mambacl paper pretraining sets --pretrained itself: it compares weights.")
    return _do(name, given, overrides)


def _do(name: str, given: Any, overrides: dict[str, Any]) -> int:
    from mambacl.paper.designs import CIFAR, FASHION, planned

    dataset = FASHION if given.root is None else CIFAR
    seeds = DEFAULT_SEEDS[given.scale] if given.seeds is None else given.seeds
    plan = planned(name, given.scale, dataset, seeds)
    words = [word.strip() for word in given.only.split(",") if word.strip()]
    chosen = [run for run in plan if not words or any(word in run.key for word in words)]
    if not chosen:
        keys = ", ".join(dict.fromkeys(run.key for run in plan))
        raise UserError(f"No run's name contains '{given.only}'. The runs: {keys}.")

    from mambacl.paper.rendering import render
    from mambacl.paper.runner import carry_out, jobs, records, say

    out = given.out / given.scale
    work = jobs(chosen, out, given.root, overrides)
    if given.dry_run:
        return _list(work)
    if given.scale == "paper" and given.root is None and not (overrides.get("stream") or {}).get("root"):
        needed = ", ".join(f"DIR/{name}" for name in dict.fromkeys(run.benchmark.dataset for run in chosen))
        raise UserError(f"Say where the data are: --root DIR, with {needed} (`mambacl data prepare` makes them).")
    carry_out(work)
    everything = work if len(chosen) == len(plan) else _all_there(plan, out, given.root, overrides)
    text, path = render(name, records(everything), out, given.scale)
    print(text)
    say(f"Report: {path}")
    return 0


def _all_there(plan: Any, out: Path, root: Path | None, overrides: dict[str, Any]) -> list[Job]:
    """With --only, earlier runs of the design stand in the table as well; those without a preset cannot be there."""
    from mambacl.paper.runner import jobs

    return jobs([run for run in plan if (out / run.key / "config.yaml").is_file()], out, root, overrides)


def _list(work: Sequence[Job]) -> int:
    for job in work:
        print(f"{job.planned.key:58} {job.state}")
    print(f"Runs: {len(work)}, of which {sum(job.state == 'finished' for job in work)} are finished.")
    return 0


def _overrides(rest: list[str]) -> dict[str, Any]:
    """Options of `mambacl train`, read as it reads them."""
    if not rest:
        return {}
    from jsonargparse import ArgumentError

    from mambacl.config import build_parser, readable

    parser = build_parser("mambacl paper")
    rest = with_underscores(rest, parser)
    check_options(rest, parser)
    try:
        given: dict[str, Any] = parser.parse_args(rest, defaults=False).as_dict()
    except ArgumentError as error:
        raise readable(error) from None
    for key, words in OWN.items():
        group, _, inner = key.rpartition(".")
        if inner in ((given.get(group) or {}) if group else given):
            raise UserError(f"mambacl paper sets --{key} itself: {words}.")
    return given
