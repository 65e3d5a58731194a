"""Sweeps from Python: `mambacl.sweep`; and what `mambacl.tune` shares with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.options import nested
from mambacl.status import status
from mambacl.sweeps.driver import Sweep
from mambacl.sweeps.engines import EngineName, engine_options, open_engine
from mambacl.sweeps.plan import Plan, read
from mambacl.sweeps.states import FINISHED, Entry
from mambacl.sweeps.view import View, make_view
from mambacl.training.folder import RunFolder


@dataclass(frozen=True)
class Work:
    """How the runs of a sweep are computed."""

    engine: EngineName = "local"
    jobs: int | None = None
    """runs at the same time; None for one per GPU, or one on a CPU"""
    options: Mapping[str, Any] | None = None
    """of the engine: those of `ray.remote`, or of submitit"""
    retries: int = 1
    """how often a failed run is tried again"""
    imports: Sequence[Path] = ()
    """Python files that each run imports first"""
    keep_checkpoints: bool = True
    """whether finished runs keep their checkpoints, which predict and learn need"""


@dataclass(frozen=True)
class SweepResult:
    """What a sweep has made."""

    folder: Path
    runs: dict[str, Path]
    """the folder of each finished run, by the run's name"""
    failed: dict[str, str]
    """why each other run failed"""
    report: Path | None
    """the page that compares the finished runs"""


def sweep(
    source: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    engine: EngineName = "local",
    jobs: int | None = None,
    engine_options: Mapping[str, Any] | None = None,
    retries: int = 1,
    **overrides: Any,
) -> SweepResult:
    """Trains the runs of a sweep's file, or of a mapping with the same entries, and compares them.

        mambacl.sweep({"presets": ["demo"], "methods": ["analytic", "frozen"], "seeds": [0, 1]}, out="runs/mine")

    Finished runs are skipped and interrupted ones continued. Each run is a process of its own. `engine`: local, ray or
    slurm; `engine_options`: what it gets per run, e.g. {"num_gpus": 1}. `jobs`: runs at the same time. `overrides`:
    options of every run.
    """
    plan = read(source, nested(overrides), None if out is None else Path(out))
    work = Work(engine, jobs, engine_options, retries)
    entries = train_all(plan, work, make_view())
    return SweepResult(
        plan.folder,
        {entry.run.key: entry.run.folder for entry in entries if entry.state == FINISHED},
        {entry.run.key: entry.reason for entry in entries if entry.state != FINISHED},
        compare(plan, entries),
    )


def train_all(plan: Plan, work: Work, view: View) -> list[Entry]:
    """Trains what is not finished, after checking all of it."""
    options = dict(work.options or {})
    engine_options(work.engine, {})  # refuses one whose library is missing
    configs = [run.config for run in plan.runs]
    if numbered := next((config.device for config in configs if config.device.startswith("cuda:")), None):
        raise UserError(f"A sweep gives each run its GPU: set device to auto or cuda instead of {numbered}.")
    begun = Sweep(plan, view, work.retries, work.imports, work.keep_checkpoints)
    todo = [entry.run for entry in begun.entries if entry.open]
    finished = len(configs) - len(todo)
    logger.info("%s: %d runs, %d of them finished; to %s", plan.name, len(configs), finished, plan.folder)
    if not todo:
        return begun.entries
    with status("checking the runs"):
        from mambacl.sweeps.checks import check  # late, because it imports PyTorch

        check(todo, here=work.engine == "local")
    with status(f"starting the engine {work.engine}"):
        on_cpu = all(config.device == "cpu" for config in configs)
        engine = open_engine(work.engine, work.jobs, options, plan.folder, on_cpu)
    try:
        begun.run(engine)
    finally:
        engine.close()
    return begun.entries


def compare(plan: Plan, entries: Sequence[Entry]) -> Path | None:
    """Writes the report of all finished runs, which compares them, to `comparison` in the sweep's folder."""
    from mambacl.reports import write_report  # late, because drawing needs further libraries

    folders = [entry.run.folder for entry in entries if entry.state == FINISHED]
    if not folders:
        return None
    with status("writing the comparison"):
        return write_report(folders, plan.folder / "comparison" if len(folders) > 1 else None, overwrite=True)


def table(entries: Sequence[Entry]) -> str:
    """The finished runs, one row per group of seeds."""
    from mambacl.reports import comparison_table, load_run
    from mambacl.reports.rendering import to_text

    return to_text(comparison_table([load_run(entry.run.folder) for entry in entries if entry.state == FINISHED]))


def results_of(entry: Entry) -> dict[str, Any]:
    return RunFolder(entry.run.folder).results()
