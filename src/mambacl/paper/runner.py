"""Trains the runs of a design: skips finished runs, continues interrupted ones and trains the others."""

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mambacl.backbones.vit import timm_module
from mambacl.config import RunConfig, preset_names, resolve
from mambacl.data import open_dataset
from mambacl.errors import UserError
from mambacl.methods import METHODS
from mambacl.options import merge
from mambacl.paper.designs import FIRST_ORDER, Benchmark, PlannedRun
from mambacl.paper.losses import LossLoop
from mambacl.reports.runs import RunRecord, load_run
from mambacl.sweeps.states import state_of
from mambacl.training.api import train
from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop, TrainingError

T = TypeVar("T")
BACKBONE = ("backbone", "backbone_options", "pretrained")


@dataclass(frozen=True)
class Job:
    """A planned run with its complete configuration and the state of its folder."""

    planned: PlannedRun
    config: RunConfig
    state: str
    """finished, interrupted, not started, or what is wrong with the folder"""
    earlier: Mapping[str, Any] | None = None
    """the run's entry in the file of an earlier table, if it is finished there and has no folder here"""

    @property
    def open(self) -> bool:
        return self.state in ("interrupted", "not started")


def jobs(
    plan: Sequence[PlannedRun],
    out: Path,
    root: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    anywhere: bool = False,
    earlier: Path | None = None,
) -> list[Job]:
    """The configuration and state of each run, known before any work starts.

    `root` has a folder per data set at the scale paper, and is CIFAR-100's folder at the scale nano. `overrides`
    override the benchmark's options; what a design varies overrides both. `anywhere`: also accepts runs whose data were
    in another folder, as on another machine. `earlier`: the JSON file of an earlier table, whose runs
    count as finished if they were trained as planned here.
    """
    _check_presets(plan)
    there = earlier_runs(earlier) if earlier else {}
    made = []
    for run in plan:
        config = run_config(run, out, root, overrides or {})
        state, entry = state_of(config, root is not None and not anywhere), there.get(run.key)
        if entry and state == "not started" and _is_of(entry, config):
            made.append(Job(run, config, "finished", entry))
        else:
            made.append(Job(run, config, state))
    return made


def earlier_runs(path: Path) -> dict[str, dict[str, Any]]:
    """The runs in the JSON file of a table, by name."""
    try:
        found = json.loads(path.read_bytes())["runs"]
        for run in found.values():
            _ = run["classes"], run["training"], run["options"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read as a table of `mambacl paper` ({type(error).__name__}): name a paper-NAME.json "
            "that this command has written."
        ) from None
    return dict(found)


def _is_of(entry: Mapping[str, Any], config: RunConfig) -> bool:
    """Whether a run of an earlier table was trained as the run is planned now."""
    given = config.as_dict()
    return all(given["training"].get(key) == value for key, value in entry["training"].items()) and (
        given["options"] == entry["options"]
    )


def run_config(run: PlannedRun, out: Path, root: Path | None, overrides: Mapping[str, Any]) -> RunConfig:
    benchmark = run.benchmark
    own: dict[str, Any] = {"nullspace": {"eta": benchmark.eta}}
    if root is not None:
        own["stream"] = {"root": str(root / benchmark.dataset if isinstance(benchmark.base, str) else root)}
    fixed = {"name": benchmark.name, "method": run.method, "seed": run.seed, "out": str(out / run.key)}
    order = {"stream": {"order_seed": FIRST_ORDER + run.seed}}
    if "backbone" in run.varied:  # options for another backbone do not fit it
        overrides = {key: value for key, value in overrides.items() if key not in BACKBONE}
    for layer in (order, overrides, run.varied, fixed):
        own = merge(own, layer)
    config = resolve(benchmark.base, own)
    if isinstance(benchmark.base, str):
        _check_benchmark(config, run, overrides)
    return config


def _check_presets(plan: Sequence[PlannedRun]) -> None:
    known = preset_names()
    wanted = dict.fromkeys(run.benchmark.base for run in plan if isinstance(run.benchmark.base, str))
    missing = [name for name in wanted if name not in known]
    if missing:
        raise UserError(
            f"This needs presets that do not exist yet: {', '.join(missing)}; leave them out with --only NAME, or use "
            "--scale nano, which needs none."
        )


def _check_benchmark(config: RunConfig, run: PlannedRun, overrides: Mapping[str, Any]) -> None:
    """Refuses a preset whose name is right but whose benchmark is not the paper's."""
    benchmark: Benchmark = run.benchmark
    found = (config.stream.dataset, config.stream.tasks)
    if found != (benchmark.dataset, benchmark.tasks):
        raise UserError(
            f"The preset {benchmark.base} is not {benchmark.dataset} in {benchmark.tasks} tasks (it is {found[0]} in "
            f"{found[1]}): fix the preset."
        )
    if config.backbone != run.backbone and "backbone" not in overrides:
        raise UserError(
            f"The preset {benchmark.base} uses {config.backbone}, but the paper uses {run.backbone}: add --backbone "
            f"{run.backbone}, or --scale nano."
        )


def run_jobs(work: Sequence[Job], part: str = "", keep_checkpoints: bool = True) -> None:
    """Trains all runs that are not finished, in order. Finds mistakes before it trains the first.

    `part`: "i/n" trains only every n-th run from the i-th on, so that n processes share them. A run that fails does not
    stop the others; at the end they are named. `keep_checkpoints`: whether finished runs keep theirs.
    """
    for job in work:
        METHODS.get(job.config.method)
        if not job.open and job.state != "finished":
            raise UserError(f"{job.config.folder} holds {job.state}: choose another --out.")
    own = part_of(work, part)
    todo = [job for job in own if job.open]
    if any(job.config.backbone.startswith("vit") for job in todo):
        timm_module()  # says how to install it
    for dataset, root in dict.fromkeys((job.config.stream.dataset, job.config.stream.root) for job in todo):
        open_dataset(dataset, root)  # checks the data of all benchmarks before spending days on the first
    say(f"Runs: {len(own)}, finished: {len(own) - len(todo)}.")
    failed: dict[str, Exception] = {}
    for number, job in enumerate(todo, start=1):
        verb = "continuing" if job.state == "interrupted" else "training"
        say(f"[{number}/{len(todo)}] {verb} {job.planned.key}")
        try:
            train(job.config, loop=LossLoop if job.planned.losses else Loop)
            if not keep_checkpoints:
                RunFolder(job.config.folder).clear_checkpoints()
        except KeyboardInterrupt:
            say("mambacl: repeat the command to continue.")
            raise
        except Exception as error:
            failed[job.planned.key] = error
            if len(failed) == len(todo):  # none works, so this is no single run's fault
                raise
            say(f"{job.planned.key} failed: {error}")
    if failed:
        raise TrainingError(f"{len(failed)} of {len(todo)} runs failed: {', '.join(failed)}; the others are finished.")


def part_of(items: Sequence[T], part: str) -> list[T]:
    """Every n-th item from the i-th on, for the part "i/n"; all if it is empty."""
    index, _, count = part.partition("/")
    return list(items)[int(index) - 1 :: int(count)] if part else list(items)


def records(work: Sequence[Job]) -> list[tuple[PlannedRun, RunRecord]]:
    """The records of all runs with results, finished or not. Finished ones have the options of the plan, so that runs
    of several days and machines, which name data and precision differently, share a row."""
    found = []
    for job in work:
        if job.earlier is not None:
            found.append((job.planned, _record(job, job.earlier)))
        elif RunFolder(job.config.folder).has_results() and not job.state.startswith("another"):
            record = load_run(job.config.folder)
            config = job.config.as_dict() if job.state == "finished" else record.config
            found.append((job.planned, replace(record, config=config)))
    return found


def _record(job: Job, entry: Mapping[str, Any]) -> RunRecord:
    """A run of an earlier table, of which only the last counts are known."""
    ends = list(itertools.accumulate(entry["classes"], initial=0))
    tasks = [list(range(first, end)) for first, end in itertools.pairwise(ends)]
    results = {**entry, "correct": [entry["correct"]], "tasks": tasks, "status": "finished"}
    return RunRecord(Path(job.config.folder), results, job.config.as_dict())


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
