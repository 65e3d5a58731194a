"""Runs the study that docs/study.md reports: methods, classifiers, state sizes and numbers of tasks on CIFAR-100.

    python examples/study.py --root FOLDER --out runs/study --json docs/results/study.json

Every run has its own folder. Start it again after an interruption: finished runs are read, the others continue. The
file holds mean and standard deviation over the seeds; each seed has its own class order. Rows of the file that are not
measured again stay.
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mambacl
from mambacl.errors import UserError

COLUMNS = {
    "final accuracy": "final_accuracy_tasks",
    "forgetting": "forgetting",
    "learning accuracy": "learning_accuracy",
}
PROTECTED = {"method": "mamba-cl", "setting": "exact", "nullspace.rank": "energy:0.99"}
MIRRORED = {"features.depths": "all", "features.mirror": "both"}
RIDGE = {**MIRRORED, "classifier": "ridge", "classifier_options": {"state_limit": "1GB", "expected_classes": 100}}

# table -> row -> options
STUDY: dict[str, dict[str, dict[str, Any]]] = {
    "methods": {
        "analytic (the default)": {},
        "analytic, no mirror images at test": {"features.mirror": "learning"},
        "Mamba-CL, exact, energy:0.99, and ridge": {**PROTECTED, **RIDGE},
        "Mamba-CL, public-code": {"method": "mamba-cl"},
        "Mamba-CL, exact, energy:0.99": PROTECTED,
        "fine-tuning": {"method": "sequential"},
        "frozen, separate heads": {"method": "frozen"},
        "shared adapters": {"method": "seq-adapter"},
        "EASE": {"method": "ease"},
        "all classes at once, softmax": {"method": "sequential", "stream.tasks": 1, "training.lr": 1e-3},
    },
    "classifiers": {
        f"{name}, {what}": {**options, "classifier": name, "features.mirror": "both", "classifier_options": own}
        for what, options in (
            ("no training", {"method": "analytic", "features.depths": "final"}),
            ("protected", PROTECTED),
        )
        for name, own in (("nearest-mean", {}), ("lda", {}), ("gaussian", {}), ("ridge", {"state_limit": "1GB"}))
    },
    "state": {
        f"ridge, {limit}": {"classifier_options.state_limit": limit}
        for limit in ("10MB", "30MB", "100MB", "300MB", "1GB")
    },
    "tasks": {f"analytic, {tasks} tasks": {"stream.tasks": tasks} for tasks in (5, 10, 20, 50)},
}


def measured(name: str, options: Mapping[str, Any], seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """The metrics of one run, trained now unless its folder is complete."""
    words = "".join(character if character.isalnum() else "-" for character in name)
    order = {"seed": seed, "stream.order_seed": 2024 + seed}
    root = {"stream.root": arguments.root} if arguments.root else {}
    given = {**root, **options, **order, **arguments.options}
    return mambacl.train(arguments.preset, out=str(Path(arguments.out) / f"{words}-{seed}"), **given).metrics


def over_seeds(metrics: list[dict[str, float]]) -> dict[str, list[float]]:
    """Mean and standard deviation of each column, in per cent."""
    found = {column: [100 * run[name] for run in metrics] for column, name in COLUMNS.items()}
    return {
        column: [round(statistics.mean(values), 2), round(statistics.stdev(values), 2)] if len(values) > 1 else values
        for column, values in found.items()
    }


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with CIFAR-100's files")
    parser.add_argument("--out", default="runs/study", help="parent of the run folders")
    parser.add_argument("--json", default="study.json", help="file for the results")
    parser.add_argument("--preset", default="cifar100-10-nano")
    parser.add_argument("--tables", nargs="+", choices=list(STUDY), default=list(STUDY))
    parser.add_argument("--rows", nargs="+", help="only these rows, by name")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--options", type=json.loads, default={}, help='for every run, as JSON: {"device": "cpu"}')
    arguments = parser.parse_args(given)
    path = Path(arguments.json)
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows, tables = record.get("rows", {}), record.get("tables", {})  # rows that are not measured now stay
    for table in arguments.tables:
        for name, options in STUDY[table].items():
            if arguments.rows and name not in arguments.rows:
                continue
            try:
                runs = [measured(name, options, seed, arguments) for seed in arguments.seeds]
            except UserError as error:
                print(f"{name}: not run ({error})")
                continue
            rows[name] = {"what": name, "options": options, "seeds": arguments.seeds, **over_seeds(runs)}
            listed = tables.setdefault(table, {"columns": list(COLUMNS), "rows": []})["rows"]
            listed += [] if name in listed else [name]
            record |= {"benchmark": arguments.preset, "unit": "per cent", "rows": rows, "tables": tables}
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
