"""Chooses the options of the preset `demo`, for each method on training images that are held back.

    python examples/tune_demo.py --out runs/tune-demo --json docs/results/demo-tuning.json

Every method has a grid of six points and the same seeds; the two methods that train have the same grid. A point's value
is the mean over the seeds of the final accuracy on the held-back images; test images are not read. `best` is the best
point, of equals the first; `choice` is the best of those that leave the demo short. Start it again after an
interruption: finished runs are read, the others continue.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mambacl

HELD_BACK = 0.2  # of the training images of each class
Grid = dict[str, list[Any]]
TRAINING: Grid = {"training.lr": [2e-4, 6e-4, 2e-3], "training.passes": [1, 3]}
GRIDS: dict[str, Grid] = {
    "mamba-cl": TRAINING,
    "sequential": TRAINING,
    "analytic": {
        "features.pool": [["class"], ["class", "mean"], ["class", "mean", "std"]],
        "classifier_options.width": [1000, 2000],
    },
}
MOST = {"training.passes": 1}  # with three, the demo would take almost twice as long


def points(grid: Grid) -> list[dict[str, Any]]:
    """All combinations of a grid's values."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def accuracy(preset: str, out: Path, method: str, point: Mapping[str, Any], seed: int) -> float:
    """The final accuracy of one run on the held-back images, in per cent; trained now unless its folder is complete."""
    folder = out / "-".join([method, *map(_word, point.values()), str(seed)]).replace(",", "-")
    given = {"method": method, "seed": seed, "stream.validation": HELD_BACK, **point}
    return round(100 * mambacl.train(preset, out=str(folder), **given).metrics["final_accuracy_tasks"], 2)


def _word(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else f"{value:g}"


def best(tried: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The point with the highest mean, of equals the first."""
    return max(tried, key=lambda one: statistics.mean(one["final accuracy"]))["point"]


def quick(tried: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that leave the demo short."""
    return [one for one in tried if all(one["point"].get(name, most) <= most for name, most in MOST.items())]


def table(grid: Grid, tried: Sequence[Mapping[str, Any]]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Rows by the grid's first option, and the columns, by its second; as `mambacl.bench.page` reads them."""
    (first, values), (second, others) = grid.items()
    rows: dict[str, dict[str, Any]] = {_word(value): {"what": f"`{first} {_word(value)}`"} for value in values}
    for one in tried:
        column = f"`{second} {_word(one['point'][second])}`"
        rows[_word(one["point"][first])][column] = statistics.mean(one["final accuracy"])
    return rows, [f"`{second} {_word(other)}`" for other in others]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--out", default="runs/tune-demo", help="parent of the run folders")
    parser.add_argument("--json", default="demo-tuning.json", help="file for grids, results and choice")
    parser.add_argument("--methods", nargs="+", choices=list(GRIDS), default=list(GRIDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args(given)
    methods: dict[str, Any] = {}
    for method in arguments.methods:
        tried = []
        for point in points(GRIDS[method]):
            runs = [accuracy(arguments.preset, Path(arguments.out), method, point, seed) for seed in arguments.seeds]
            tried.append({"point": point, "final accuracy": runs})
        methods[method] = {"grid": GRIDS[method], "tried": tried, "best": best(tried), "choice": best(quick(tried))}
    record: dict[str, Any] = {
        "benchmark": f"`{arguments.preset}` with `--stream.validation {HELD_BACK}`",
        "unit": "per cent",
        "seeds": arguments.seeds,
        "at most": MOST,
        "methods": methods,
        "rows": {},
        "tables": {},
    }
    for method, found in methods.items():
        rows, columns = table(found["grid"], found["tried"])
        record["rows"] |= {f"{method} {name}": row for name, row in rows.items()}
        record["tables"][method] = {"columns": columns, "rows": [f"{method} {name}" for name in rows]}
    Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
