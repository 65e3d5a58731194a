"""Commands that train many runs: sweep, tune."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mambacl.cli.training import Imports, Quiet, import_files
from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.options import at_least, between

if TYPE_CHECKING:
    from mambacl.sweeps.api import Work
    from mambacl.sweeps.plan import Plan
    from mambacl.sweeps.states import Entry

EngineName = Annotated[Literal["local", "ray", "slurm"], "where the runs are computed"]
Jobs = Annotated[int | None, "runs at the same time; default: one per GPU, or one on a CPU", at_least(1)]
Retries = Annotated[int, "how often a failed run is tried again", at_least(0)]
RayOptions = Annotated[list[str] | None, "NAME=VALUE of ray.remote, as in num_gpus=1, or address=...; repeatable"]
SlurmOptions = Annotated[list[str] | None, "NAME=VALUE of submitit, as in partition=gpu; repeatable"]
DryRun = Annotated[bool, "only list the runs and their states"]
Keep = Literal["all", "results"]


def sweep(
    file: Annotated[Path, "a YAML file that names presets, methods, seeds and options, or the folder of a sweep"],
    *,
    engine: EngineName = "local",
    jobs: Jobs = None,
    retries: Retries = 1,
    out: Annotated[Path | None, "folder of the sweep; default: runs/NAME"] = None,
    ray: RayOptions = None,
    slurm: SlurmOptions = None,
    keep: Annotated[Keep, "what finished runs keep: everything, or no checkpoints, to save disk space"] = "all",
    dry_run: DryRun = False,
    quiet: Quiet = False,
    import_: Imports = None,
    **overrides: Any,
) -> int:
    """train many runs: methods x presets x seeds x options: `mambacl sweep sweep.yaml --jobs 2`

    Repeat the command to continue: finished runs are skipped. The file can have `name`, `presets`, `methods`, `seeds`,
    `grid` (options with lists of values), `options` (of every run) and `runs` (further runs). Also takes any option of
    `mambacl train`, for every run. Exits with 1 if a run failed."""
    from mambacl.sweeps.plan import read

    work = _work(engine, jobs, retries, ray, slurm, import_, keep, quiet)
    plan = read(file, overrides, out)
    if dry_run:
        return _list(plan)
    entries = _trained(plan, work, quiet)
    from mambacl.sweeps.api import compare, table
    from mambacl.sweeps.states import FINISHED

    page = compare(plan, entries)
    if any(entry.state == FINISHED for entry in entries):
        print(table(entries))
        print(f"Report: {page}")
    return _say_failed(entries)


def tune(
    preset: Annotated[str, "a preset, or a YAML file with options"],
    *,
    search: Annotated[
        list[str] | None, "OPTION=VALUE,VALUE, or OPTION=LOW:HIGH for a range, with --trials; repeatable"
    ] = None,
    trials: Annotated[int | None, "draw this many points; default: every combination", at_least(1)] = None,
    search_seed: Annotated[int, "seed of the draws", at_least(0)] = 0,
    seeds: Annotated[str, "seeds of each point's runs, as in 0,1,2"] = "0",
    validation: Annotated[float, "share of each class's training images to hold back", between(0.001, 0.999)] = 0.2,
    metric: Annotated[str, "what to judge by: any metric of results.json"] = "final_accuracy_tasks",
    engine: EngineName = "local",
    jobs: Jobs = None,
    retries: Retries = 1,
    out: Annotated[Path | None, "folder of the search; default: runs/tune-NAME-METHOD"] = None,
    ray: RayOptions = None,
    slurm: SlurmOptions = None,
    keep: Annotated[Keep, "what finished runs keep: everything, or no checkpoints"] = "results",
    dry_run: DryRun = False,
    quiet: Quiet = False,
    import_: Imports = None,
    **overrides: Any,
) -> int:
    """search for good options on held-back training images: `mambacl tune demo --search training.lr=2e-4,6e-4,2e-3`

    The test images are not used. Writes what was tried to tune.json, and the best options to best.yaml, which `mambacl
    train` takes. Also takes any option of `mambacl train`, for every run. Repeat the command to continue."""
    from mambacl.sweeps.search import parse
    from mambacl.sweeps.tune import ask, plan_of

    work = _work(engine, jobs, retries, ray, slurm, import_, keep, quiet)
    found_seeds = _seeds(seeds)
    question = ask(preset, parse(search or []), overrides, found_seeds, validation, metric, trials, search_seed)
    plan = plan_of(question, out)
    if dry_run:
        return _list(plan)
    entries = _trained(plan, work, quiet)
    from mambacl.sweeps.tune import EVIDENCE, judge, table

    found = judge(question, plan, entries)
    print(table(question, found))
    for words in found.warnings:
        print(words, file=sys.stderr)
    if found.best is not None:
        print(f"Best options: {found.options}, for `mambacl train {found.options}`")
    else:
        print("No point has all its runs, so there is no choice.", file=sys.stderr)
    print(f"All points: {found.folder / EVIDENCE}")
    return _say_failed(entries)


def _work(
    engine: Any,
    jobs: int | None,
    retries: int,
    ray: list[str] | None,
    slurm: list[str] | None,
    imports: list[Path] | None,
    keep: str,
    quiet: bool,
) -> Work:
    """How to compute the runs; before anything else, as it finds a missing extra."""
    from mambacl.sweeps.api import Work
    from mambacl.sweeps.engines import engine_options

    import_files(imports)
    if quiet:
        logger.setLevel(logging.WARNING)
    options = engine_options(engine, {"ray": ray or [], "slurm": slurm or []})
    return Work(engine, jobs, options, retries, imports or (), keep == "all")


def _list(plan: Plan) -> int:
    from mambacl.sweeps.states import FINISHED, state_of

    states = [state_of(run.config) for run in plan.runs]
    for run, state in zip(plan.runs, states, strict=True):
        print(f"{run.key:58} {state}")
    print(f"Runs: {len(states)}, finished: {states.count(FINISHED)}. Folder: {plan.folder}")
    return 0


def _trained(plan: Plan, work: Work, quiet: bool) -> list[Entry]:
    from mambacl.sweeps.api import train_all
    from mambacl.sweeps.view import make_view

    try:
        return train_all(plan, work, make_view(quiet))
    except KeyboardInterrupt:
        print("mambacl: repeat the command to continue.", file=sys.stderr)
        raise


def _say_failed(entries: list[Entry]) -> int:
    from mambacl.sweeps.states import FAILED

    failed = [entry for entry in entries if entry.state == FAILED]
    for entry in failed:
        tries = f" after {entry.attempts} attempts" if entry.attempts > 1 else ""
        print(f"{entry.run.key} failed{tries}: {entry.reason} Log: {entry.log}", file=sys.stderr)
    if failed:
        print(f"mambacl: {len(failed)} of {len(entries)} runs failed.", file=sys.stderr)
    return int(bool(failed))


def _seeds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise UserError(f"--seeds takes whole numbers, as in 0,1,2, got '{text}'.")
    return list(dict.fromkeys(map(int, words)))
