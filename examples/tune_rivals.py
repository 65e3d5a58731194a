"""Chooses the learning rates of the nano rivals (`mambacl paper main --scale nano`) on held-back training images.

    python examples/tune_rivals.py --root CIFAR --out runs/tune-rivals --part 1/12     # one of twelve processes
    python examples/tune_rivals.py --root CIFAR --out runs/tune-rivals --merge --json docs/results/rivals-tuning.json

Every method that trains has the same budget: three factors of its published rates, one seed, a tenth of the training
images held back, 60 images per class and 5 passes. Processes with different `--part` share the runs. Start them again
after an interruption: finished runs are read, the others continue. `--merge` trains nothing: it writes what was tried
and chosen to the JSON file, and the choice to `src/mambacl/paper/rates.yaml`, from which the main table takes it. A
method with missing runs keeps its rates, and its row if the file has one. One that guesses with each factor has the
published rates: so few steps do not tell.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mambacl.files import write_json
from mambacl.options import nested, read_yaml
from mambacl.paper import rivals
from mambacl.paper.designs import CIFAR, FASHION, NANO_CLASSES, tuning
from mambacl.paper.runner import jobs, run_jobs, say
from mambacl.training.folder import RunFolder

CHEAP = {"stream.validation": 0.1, "stream.train_per_class": 60, "training.passes": 5}


def column(factor: float) -> str:
    return f"{factor:g} times"


def best(found: Mapping[float, float], classes: int) -> float:
    """The factor with the highest accuracy, in per cent; the first, of equals or if none is above twice chance."""
    factor = max(rivals.FACTORS, key=lambda factor: found[factor])
    return factor if found[factor] > 2 * 100 / classes else rivals.FACTORS[0]


def record(tried: Mapping[str, Mapping[float, float]], chosen: Mapping[str, float], given: Mapping[str, Any]) -> Any:
    """The JSON file: by method what was tried, in the form that `mambacl.bench.page` reads."""
    rows = {
        name: {"what": f"`{name}`", **{column(f): value for f, value in found.items()}, "chosen": f"{chosen[name]:g}"}
        for name, found in tried.items()
    }
    columns = [*map(column, sorted(rivals.FACTORS)), "chosen"]
    return {"unit": "per cent", "options": dict(given), "factors": list(rivals.FACTORS), "rows": rows,
            "tables": {"rates": {"columns": columns, "rows": list(rows)}}}  # fmt: skip


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with CIFAR-100's files; without it, the packaged Fashion-MNIST")
    parser.add_argument("--out", default="runs/tune-rivals", help="parent of the run folders")
    parser.add_argument("--part", default="", help="I/N: train every N-th run from the I-th on")
    parser.add_argument("--only", nargs="+", help="only these methods")
    parser.add_argument("--merge", action="store_true", help="train nothing, write --json and --rates")
    parser.add_argument("--json", default="rivals-tuning.json", help="file for what was tried and chosen")
    parser.add_argument("--rates", default=str(rivals.RATES), help="file for the choice")
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE", help="for every run: device=cpu")
    arguments = parser.parse_args(given)
    options = {**CHEAP, **{name: read_yaml(value) for name, _, value in (one.partition("=") for one in arguments.set)}}
    dataset = FASHION if arguments.root is None else CIFAR
    planned = [one for one in tuning(dataset) if not arguments.only or one[0].method in arguments.only]
    root = None if arguments.root is None else Path(arguments.root)
    work = jobs([run for *_, run in planned], Path(arguments.out), root, nested(options), anywhere=arguments.merge)
    if not arguments.merge:
        return run_jobs(work, arguments.part, keep_checkpoints=False)
    tried: dict[str, dict[float, float]] = {}
    for (rival, factor, _), job in zip(planned, work, strict=True):
        found = tried.setdefault(rival.method, {})
        if job.state == "finished":
            metrics = RunFolder(job.config.folder).results()["metrics"]
            found[factor] = round(100 * metrics["final_accuracy_tasks"], 2)
        else:
            say(f"{job.planned.key}: {job.state}")
    complete = {name: found for name, found in tried.items() if len(found) == len(rivals.FACTORS)}
    chosen = {name: best(found, NANO_CLASSES[dataset]) for name, found in complete.items()}
    path, made = Path(arguments.json), record(complete, chosen, options)
    if path.exists():
        made["rows"] = json.loads(path.read_bytes())["rows"] | made["rows"]
        made["tables"]["rates"]["rows"] = list(made["rows"])
    write_json(path, made)
    rivals.write_chosen(chosen, Path(arguments.rates))
    say(f"Chosen for {len(chosen)} of {len(tried)} methods: {arguments.rates}, {arguments.json}")


if __name__ == "__main__":
    main()
