"""The command paper: a table or figure of the paper, from its runs to the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mambacl.errors import UserError
from mambacl.options import at_least

if TYPE_CHECKING:
    from mambacl.paper.runner import Job

OWN = {"method": "the design says which", "name": "the benchmark gives it", "seed": "give --seeds N",
       "stream.tasks": "the benchmark has them", "stream.dataset": "the scale and --root say which"}  # fmt: skip
DEFAULT_SEEDS = {"paper": 3, "nano": 1}  # by scale; the paper has three
SEEDS = ", ".join(f"{seeds} at the scale {scale}" for scale, seeds in DEFAULT_SEEDS.items())


def _designs() -> str:
    from mambacl.paper.designs import DESIGNS

    return f"a table or figure of the paper: {', '.join(DESIGNS)}"


def paper(
    design: Annotated[str, _designs] = "",
    *,
    scale: Annotated[Literal["paper", "nano"], "the paper's backbones, or the nano in the package"] = "paper",
    root: Annotated[
        Path | None,
        "a folder with a folder for each data set (imagenet-r, cifar100, domainnet-s200); at the scale nano "
        "CIFAR-100's, the packaged Fashion-MNIST without it",
    ] = None,
    out: Annotated[Path, "runs and results go to OUT/SCALE"] = Path("runs/paper"),
    seeds: Annotated[int | None, f"runs of each kind (default {SEEDS})", at_least(1)] = None,
    only: Annotated[str, "only runs whose name contains one of these words, with commas"] = "",
    dry_run: Annotated[bool, "print the runs and whether each is finished"] = False,
    **overrides: Any,
) -> int:
    """train and show a table or figure of the paper: `mambacl paper ablation --scale nano`

    Trains the runs that are not there yet and prints our values beside the paper's. Any option of `mambacl train` may
    be given, too, and wins over the preset's."""
    from mambacl.paper.designs import CIFAR, DESIGNS, FASHION, planned

    if not design:
        raise UserError(f"Say first which table or figure: {', '.join(DESIGNS)}.")
    planned(design)  # a wrong name is said before anything else
    _check_overrides(design, overrides)
    dataset = FASHION if root is None else CIFAR
    plan = planned(design, scale, dataset, seeds or DEFAULT_SEEDS[scale])
    words = [word.strip() for word in only.split(",") if word.strip()]
    chosen = [run for run in plan if not words or any(word in run.key for word in words)]
    if not chosen:
        keys = ", ".join(dict.fromkeys(run.key for run in plan))
        raise UserError(f"No run's name contains '{only}'. The runs: {keys}.")

    from mambacl.paper.rendering import render
    from mambacl.paper.runner import carry_out, jobs, records, say

    folder = out / scale
    work = jobs(chosen, folder, root, overrides)
    if dry_run:
        return _list(work)
    if scale == "paper" and root is None and not (overrides.get("stream") or {}).get("root"):
        needed = ", ".join(f"DIR/{name}" for name in dict.fromkeys(run.benchmark.dataset for run in chosen))
        raise UserError(f"Say where the data are: --root DIR, with {needed} (`mambacl data prepare` makes them).")
    carry_out(work)
    everything = work if len(chosen) == len(plan) else _all_there(plan, folder, root, overrides)
    text, path = render(design, records(everything), folder, scale)
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


def _check_overrides(design: str, overrides: Mapping[str, Any]) -> None:
    for key, words in OWN.items():
        group, _, inner = key.rpartition(".")
        if inner in (overrides.get(group, {}) if group else overrides):
            raise UserError(f"mambacl paper sets --{key} itself: {words}.")
    if design == "pretraining" and "pretrained" in overrides:
        raise UserError("mambacl paper pretraining sets --pretrained itself: it compares weights.")
