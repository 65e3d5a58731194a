"""Which options make two runs different: the same for a run that is continued and for runs that are grouped by seed."""

from pathlib import Path
from typing import Any

import pytest
from reports_help import make_run
from small_run import CONFIG

from mambacl.config import resolve
from mambacl.reports.groups import STORES, group_runs
from mambacl.reports.runs import load_run
from mambacl.training.identity import EXECUTION, SEEDS, differences

ELSEWHERE: dict[str, Any] = {  # the same run on another machine
    "out": "elsewhere", "track": ["tensorboard"], "device": "cpu", "fast": False, "training.workers": 3,
    "training.eval_batch_size": 7, "shard": True, "share_steps": True,
}  # fmt: skip


def test_where_a_run_is_computed_does_not_make_it_another() -> None:
    assert set(ELSEWHERE) == set(EXECUTION)
    config = resolve(CONFIG, {})
    assert differences(config, resolve(CONFIG, ELSEWHERE)) == []
    changed = resolve(CONFIG, {"seed": 1, "precision": "bf16", "training.lr": 1.0, "options": {}})
    assert differences(config, changed) == ["training.lr", "seed", "precision"]


def stored(folder: Path, seed: int, **overrides: Any) -> Any:
    config = resolve(CONFIG, {**overrides, "seed": seed}).as_dict()
    return load_run(make_run(folder, [[90]], [100], seed=seed, config=config))


def test_seeds_computed_elsewhere_fall_into_one_group(tmp_path: Path) -> None:
    runs = [stored(tmp_path / "0", 0), stored(tmp_path / "1", 1, **ELSEWHERE)]
    runs.append(stored(tmp_path / "2", 2, **{"stream.order_seed": 7}))
    (group,) = group_runs(runs)
    assert group.seeds == "0, 1, 2" and set(SEEDS) == {"seed", "stream.order_seed"}


@pytest.mark.parametrize("option", [{"training.lr": 1.0}, {"nullspace.eta": 0.5}, {"precision": "bf16"}])
def test_what_changes_the_outcome_makes_two_groups(tmp_path: Path, option: dict[str, Any]) -> None:
    runs = [stored(tmp_path / "0", 0), stored(tmp_path / "1", 1, **option)]
    groups = group_runs(runs)
    name = next(iter(option)).rpartition(".")[2]
    assert len(groups) == 2 and f"{name}={option[next(iter(option))]}" in groups[1].name


def test_a_row_is_marked_if_one_of_its_runs_says_that_it_stores_images(tmp_path: Path) -> None:
    """The others can be of an earlier table, which did not say it."""
    runs = [stored(tmp_path / "0", 0), stored(tmp_path / "1", 1)]
    assert [group.name for group in group_runs(runs)] == [runs[0].method]
    runs[1].results["stored_images"] = 20
    assert [group.name for group in group_runs(runs)] == [f"{runs[0].method}{STORES}"]
