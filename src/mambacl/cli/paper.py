"""The command paper: trains the runs of a table or figure of the paper and writes its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mambacl.errors import UserError
from mambacl.options import Must, at_least

if TYPE_CHECKING:
    from mambacl.paper.runner import Job

OWN = {"method": "the design determines it", "name": "the benchmark determines it", "seed": "use --seeds N",
       "stream.tasks": "the benchmark determines them",
       "stream.dataset": "the scale and --root determine it"}  # fmt: skip
DEFAULT_SEEDS = {"paper": 3, "nano": 1}  # by scale; the paper has three
SEEDS = ", ".join(f"{seeds} at the scale {scale}" for scale, seeds in DEFAULT_SEEDS.items())


def is_part(text: str) -> bool:
    """Whether this is a part "i/n" with i from 1 to n; empty for all."""
    first, _, last = text.partition("/")
    return not text or (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last))


def _designs() -> str:
    from mambacl.paper.designs import DESIGNS

    return f"a table or figure of the paper: {', '.join(DESIGNS)}"


def paper(
    design: Annotated[str, _designs] = "",
    *,
    scale: Annotated[Literal["paper", "nano"], "the paper's backbones, or the packaged nano"] = "paper",
    root: Annotated[
        Path | None,
        "folder with a folder per data set (imagenet-r, cifar100, domainnet-s200); at the scale nano, CIFAR-100's "
        "folder, or leave it out for the packaged Fashion-MNIST",
    ] = None,
    out: Annotated[Path, "write runs and results to OUT/SCALE"] = Path("runs/paper"),
    seeds: Annotated[int | None, f"number of seeds (default {SEEDS})", at_least(1)] = None,
    only: Annotated[
        str, "only runs whose names, which --dry-run lists, contain one of these words, separated by commas"
    ] = "",
    dry_run: Annotated[bool, "only print the runs and their states"] = False,
    finished: Annotated[
        bool, "train nothing: write the table from the finished runs, also from another machine"
    ] = False,
    earlier: Annotated[
        Path | None, "a table's .json file, from another day or machine: its runs count as finished"
    ] = None,
    part: Annotated[
        str,
        "I/N: train only every N-th run from the I-th on, and write no table, so that N processes share the runs",
        Must("be I/N with I from 1 to N, e.g. 2/12", is_part),
    ] = "",
    keep: Annotated[
        Literal["all", "results"], "what to keep of a finished run: everything, or no checkpoints, to save disk space"
    ] = "all",
    **overrides: Any,
) -> None:
    """reproduce a table or figure of the paper: `mambacl paper ablation --scale nano`

    Trains the missing runs and prints our values beside the paper's. Also takes any option of `mambacl train`, which
    overrides the preset's."""
    from mambacl.paper.designs import CIFAR, DESIGNS, FASHION, planned

    if not design:
        raise UserError(f"Name a table or figure: {', '.join(DESIGNS)}.")
    planned(design)  # reports a wrong name before anything else
    _check_overrides(design, overrides)
    dataset = FASHION if root is None else CIFAR
    plan = planned(design, scale, dataset, seeds or DEFAULT_SEEDS[scale])
    words = [word.strip() for word in only.split(",") if word.strip()]
    chosen = [run for run in plan if not words or any(word in run.key for word in words)]
    if not chosen:
        keys = ", ".join(dict.fromkeys(run.key for run in plan))
        raise UserError(f"No run's name contains '{only}'. Known: {keys}.")

    from mambacl.paper.runner import jobs, records, say

    folder = out / scale
    work = jobs(chosen, folder, root, overrides, finished, earlier)
    if dry_run:
        return _list(work)
    if not finished:
        _train(work, scale, root, overrides, part, keep)
    if part:
        return say("Without --part, the same command writes the table.")
    if finished or len(chosen) < len(plan):  # with --only, the table also shows the design's earlier runs
        known = jobs(plan, folder, root, overrides, finished, earlier)
        work = [job for job in known if job.state != "not started"]
    from mambacl.paper.rendering import render  # late, because drawing needs further libraries

    text, path = render(design, records(work), folder, scale)
    print(text)
    say(f"Report: {path}")


def _train(
    work: Sequence[Job], scale: str, root: Path | None, overrides: Mapping[str, Any], part: str, keep: str
) -> None:
    from mambacl.paper.runner import run_jobs

    if scale == "paper" and root is None and not (overrides.get("stream") or {}).get("root"):
        datasets = dict.fromkeys(job.planned.benchmark.dataset for job in work)
        needed = ", ".join(f"DIR/{name}" for name in datasets)
        raise UserError(f"Name the folder of the data: --root DIR, with {needed} (see `mambacl data prepare`).")
    run_jobs(work, part, keep == "all")


def _list(work: Sequence[Job]) -> None:
    for job in work:
        print(f"{job.planned.key:58} {job.state}")
    print(f"Runs: {len(work)}, finished: {sum(job.state == 'finished' for job in work)}.")


def _check_overrides(design: str, overrides: Mapping[str, Any]) -> None:
    for key, words in OWN.items():
        group, _, inner = key.rpartition(".")
        if inner in (overrides.get(group, {}) if group else overrides):
            raise UserError(f"mambacl paper sets --{key} itself: {words}.")
    if design == "pretraining" and "pretrained" in overrides:
        raise UserError("mambacl paper pretraining sets --pretrained itself: it compares weights.")
