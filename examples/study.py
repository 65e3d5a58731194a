"""Runs the study that docs/study.md reports, on CIFAR-100: methods, classifiers, separate heads, settings, state sizes,
numbers of tasks, backbones.

    python examples/study.py --root FOLDER --out runs/study --json docs/results/study.json

Every run has its own folder, which rows with the same options share. Start it again after an interruption: finished
runs are read, the others continue. The file holds mean and standard deviation over the seeds; each seed has its own
class order. Rows of the file that are not measured again stay.

Methods that are compared have the same tuning budget: three values of one option (GRIDS), judged by a tenth of the
training images, with the first seed. The file says what was tried and chosen, and what it has is not tried again.
"""

import argparse
import json
import statistics
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mambacl
from mambacl.backbones.registry import MODELS
from mambacl.errors import UserError

METRICS = {
    "final accuracy": "final_accuracy_tasks",
    "forgetting": "forgetting",
    "learning accuracy": "learning_accuracy",
}
COSTS = ("seconds", "memory in GB", "state in MB")
HELD_BACK = {"stream.validation": 0.1}
PROTECTED = {"method": "mamba-cl", "setting": "exact", "nullspace.rank": "energy:0.99"}
RIDGE = {
    "features.depths": "all",
    "features.mirror": "both",
    "classifier": "ridge",
    "classifier_options": {"state_limit": "1GB", "expected_classes": 100},
}
JOINT = {"method": "sequential", "stream.tasks": 1}
RATES = {"training.lr": [2e-5, 2e-4, 1e-3]}
HEAD_RATES = {"training.head_lr": [1e-3, 1e-2, 3e-2]}
FROM_ZERO = {"classifier": "separate", "classifier_options": {"start": "zero"}, "training.heads": "new"}
SMALL = {"classifier_options.state_limit": "100MB"}

# table -> row -> options
STUDY: dict[str, dict[str, dict[str, Any]]] = {
    "methods": {
        "analytic (the default)": {},
        "analytic, no mirror images at test": {"features.mirror": "learning"},
        "Mamba-CL, exact, energy:0.99, and ridge": {**PROTECTED, **RIDGE},
        "Mamba-CL, public-code": {"method": "mamba-cl"},
        "Mamba-CL, public-code, tuned": {"method": "mamba-cl"},
        "Mamba-CL, exact, energy:0.99": PROTECTED,
        "fine-tuning": {"method": "sequential"},
        "frozen, separate heads": {"method": "frozen"},
        "shared adapters": {"method": "seq-adapter"},
        "EASE": {"method": "ease"},
        "all classes at once, softmax": JOINT,
        "all classes at once, softmax, mirror images at test": {**JOINT, "features.mirror": "both"},
    },
    "classifiers": {
        f"{name}, {what}": {**options, "classifier": name, "features.mirror": "both", "classifier_options": own}
        for what, options in (
            ("no training", {"method": "analytic", "features.depths": "final"}),
            ("protected", PROTECTED),
        )
        for name, own in (("nearest-mean", {}), ("lda", {}), ("gaussian", {}), ("ridge", {"state_limit": "1GB"}))
    },
    "heads": {
        f"{name}, heads from zero, mirror images at test": {**options, **FROM_ZERO, "features.mirror": "both"}
        for name, options in (
            ("Mamba-CL, public-code", {"method": "mamba-cl"}),
            ("Mamba-CL, exact, energy:0.99", PROTECTED),
            ("fine-tuning", {"method": "sequential"}),
            ("frozen", {"method": "frozen"}),
        )
    }
    | {
        # the number of depths and the rate: by heads on a frozen backbone, on held-back images (docs/study.md)
        f"{name}, heads from zero on four depths, mirror images at test": {
            **options,
            **FROM_ZERO,
            "features.mirror": "both",
            "features.depths": 4,
            "training.head_lr": 3e-4,
        }
        for name, options in (
            ("Mamba-CL, public-code", {"method": "mamba-cl"}),
            ("fine-tuning", {"method": "sequential"}),
            ("frozen", {"method": "frozen"}),
        )
    },
    "settings": {
        f"{setting}, {rank}": {"method": "mamba-cl", "setting": setting, "nullspace.rank": rank}
        for setting in ("public-code", "exact")
        for rank in ("smoothed-corner", "energy:0.9", "energy:0.97", "energy:0.99", "energy:0.999")
    },
    "state": {
        f"ridge, {limit}": {"classifier_options.state_limit": limit}
        for limit in ("10MB", "30MB", "100MB", "300MB", "1GB")
    },
    "tasks": {
        f"{name}, {tasks} tasks": {**options, "stream.tasks": tasks}
        for name, options in (("analytic, 100 MB", SMALL), ("Mamba-CL, public-code", {"method": "mamba-cl"}))
        for tasks in (5, 10, 20, 50)
    },
    "backbones": {
        f"{name}, {weights}{what}": {"backbone": name, "pretrained": weights, **options}
        for name in ("defocus_mamba_nano", "vim_mini", "vmamba_mini", "mambavision_mini")
        for weights in MODELS.get(name).weights
        for what, options in ((", 1 GB", {}), (", 100 MB", SMALL))
    },
}
# row -> an option and the values to try
GRIDS: dict[str, dict[str, list[Any]]] = {
    "analytic (the default)": {"classifier_options.bandwidth": [0.1, 0.2, 0.3]},
    "Mamba-CL, exact, energy:0.99, and ridge": RATES,
    "Mamba-CL, public-code, tuned": RATES,
    "Mamba-CL, exact, energy:0.99": RATES,
    "fine-tuning": RATES,
    "frozen, separate heads": HEAD_RATES,
    "shared adapters": RATES,
    "EASE": RATES,
    "all classes at once, softmax": RATES,
    **{row: {"training.head_lr": [1e-3, 3e-3, 1e-2]} for row in STUDY["heads"] if "depths" not in row},
}
# row -> the row whose choice it takes
SAME = {"all classes at once, softmax, mirror images at test": "all classes at once, softmax"}


def run(options: Mapping[str, Any], seed: int, arguments: argparse.Namespace) -> mambacl.Run:
    """One run, trained now unless its folder is complete."""
    order = {"seed": seed, "stream.order_seed": 2024 + seed}
    root = {"stream.root": arguments.root} if arguments.root else {}
    given = {**options, **order, **arguments.options}
    name = f"{zlib.crc32(json.dumps(given, sort_keys=True).encode()):08x}"
    return mambacl.train(arguments.preset, out=str(Path(arguments.out) / name), **root, **given)


def tuned(
    row: str, options: Mapping[str, Any], arguments: argparse.Namespace, known: dict[str, dict[str, float]]
) -> tuple[dict[str, Any], dict[str, float]]:
    """The options with the best value of the row's grid, and the accuracy of each value on images held back. What was
    tried before is `known` by row, and grows."""
    judged = SAME.get(row, row)
    if judged not in GRIDS:
        return dict(options), {}
    ((option, values),) = GRIDS[judged].items()
    judged_options = options if judged == row else STUDY["methods"][judged]
    tried = known.setdefault(judged, {})
    for value in values:
        if f"{option} {value}" not in tried:
            made = run({**judged_options, option: value, **HELD_BACK}, arguments.seeds[0], arguments)
            tried[f"{option} {value}"] = round(100 * made.metrics["final_accuracy_tasks"], 2)
    best = max(values, key=lambda value: tried[f"{option} {value}"])
    return {**options, option: best}, tried


def rates_tried(known: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """A row for each row of the study that has tried learning rates, the best first."""
    found = {
        f"{row}, rates": {"what": row, **{label.split()[1]: value for label, value in tried.items()}}
        for row, tried in known.items()
        if GRIDS.get(row) == RATES
    }
    return dict(sorted(found.items(), key=lambda item: -max(known[item[1]["what"]].values())))


def measures(made: mambacl.Run) -> dict[str, float]:
    """A row's columns for one run: per cent, seconds, GB and MB."""
    found = {column: 100 * made.metrics[name] for column, name in METRICS.items() if name in made.metrics}
    results = made.results
    costs = (sum(results["seconds"].values()), results["peak_memory_bytes"] / 1e9,
             results.get("classifier_bytes", 0) / 1e6)  # fmt: skip
    return found | dict(zip(COSTS, costs, strict=True))


def over_seeds(runs: list[dict[str, float]]) -> dict[str, list[float]]:
    """Mean and standard deviation of each column."""
    return {
        column: [round(statistics.mean(values), 2), round(statistics.stdev(values), 2)] if len(values) > 1 else values
        for column in runs[0]
        if (values := [each[column] for each in runs])
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
    parser.add_argument("--tune", action="store_true", help="only the runs on held-back images, which choose")
    parser.add_argument("--options", type=json.loads, default={}, help='for every run, as JSON: {"device": "cpu"}')
    arguments = parser.parse_args(given)
    path = Path(arguments.json)
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows, tables = record.get("rows", {}), record.get("tables", {})  # rows that are not measured now stay
    known = record.get("tried", {})
    for table in arguments.tables:
        for name, options in STUDY[table].items():
            if arguments.rows and name not in arguments.rows:
                continue
            try:
                chosen, tried = tuned(name, options, arguments, known)
                runs = [measures(run(chosen, seed, arguments)) for seed in arguments.seeds if not arguments.tune]
            except UserError as error:
                print(f"{name}: not run ({error})")
                continue
            if runs:
                rows[name] = {"what": name, "options": chosen, "seeds": arguments.seeds, **over_seeds(runs)}
                rows[name] |= {"tried on held-back images": tried} if tried else {}
                listed = tables.setdefault(table, {"columns": [*METRICS, *COSTS], "rows": []})["rows"]
                listed += [] if name in listed else [name]
            if rates := rates_tried(known):
                rows |= rates
                tables["rates"] = {"columns": [f"{rate}" for rate in RATES["training.lr"]], "rows": list(rates)}
            record |= {"benchmark": arguments.preset, "unit": "per cent", "rows": rows, "tables": tables}
            path.write_text(json.dumps(record | {"tried": known}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
