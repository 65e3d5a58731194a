"""Chooses the learning rates of the nano rivals (`mambacl paper main --scale nano`) on held-back training images.

    python examples/tune_rivals.py --root CIFAR --out runs/tune-rivals --part 1/12     # one of twelve processes
    python examples/tune_rivals.py --root CIFAR --out runs/tune-rivals --merge --json docs/results/rivals-tuning.json

Every method that trains has the same budget: three factors of its published rates, one seed, a tenth of the training
images held back, 60 images per class and 5 passes. Processes with different `--part` share the runs. Start them again
after an interruption: finished runs are read, the others continue. `--merge` trains nothing: it writes what was tried
and chosen to the JSON file, and the choice to `src/mambacl/paper/rates.yaml`, from which the main table takes it. A
method with missing runs keeps its rates, and its row if the file has one. One that guesses with each factor has the
published rates: so few steps do not tell.

`--extend` goes on from there: if the best factor of a method is the largest or the smallest one, the next is tried as
well, until it is neither or 64 times more or less; both ends for a method that guesses. What was tried before is read
from the run folders and from the JSON file, so it can be of another day:

    python examples/tune_rivals.py --root CIFAR --extend --json docs/results/rivals-tuning.json --part 1/12
"""

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mambacl.files import write_json
from mambacl.options import nested, read_yaml
from mambacl.paper import rivals
from mambacl.paper.designs import CIFAR, FASHION, NANO_CLASSES, tuning
from mambacl.paper.runner import Job, jobs, part_of, run_jobs, say
from mambacl.training.folder import RunFolder

CHEAP = {"stream.validation": 0.1, "stream.train_per_class": 60, "training.passes": 5}
STEP, MOST = 4.0, 64.0  # between factors, and the largest one
TIMES = " times"
Tried = dict[str, dict[float, float]]  # accuracy in per cent by method and factor


def column(factor: float) -> str:
    return f"{factor:g}{TIMES}"


def guesses(found: Mapping[float, float], classes: int) -> bool:
    """Whether no factor gives more than twice chance."""
    return max(found.values()) <= 2 * 100 / classes


def best(found: Mapping[float, float], classes: int) -> float:
    """The factor with the highest accuracy, in per cent: of equals the nearest to 1, and 1 if all guess."""
    order = sorted(found, key=lambda factor: (abs(math.log(factor)), factor))
    return rivals.FACTORS[0] if guesses(found, classes) else max(order, key=lambda factor: found[factor])


def beyond(found: Mapping[float, float], classes: int) -> list[float]:
    """The factors to try next; none if the best one has a worse one on either side."""
    least, largest = min(found), max(found)
    ends = {least, largest} if guesses(found, classes) else {best(found, classes)}
    wanted = [least / STEP] * (least in ends) + [largest * STEP] * (largest in ends)
    return [factor for factor in wanted if 1 / MOST <= factor <= MOST]


def recorded(path: Path) -> Tried:
    """What the JSON file has."""
    rows = json.loads(path.read_bytes())["rows"] if path.exists() else {}
    return {
        name: {float(key.removesuffix(TIMES)): value for key, value in row.items() if key.endswith(TIMES)}
        for name, row in rows.items()
    }


def record(path: Path, tried: Tried, chosen: Mapping[str, float], given: Mapping[str, Any]) -> Any:
    """The JSON file: by method what was tried, in the form that `mambacl.bench.page` reads. Its other rows stay."""
    rows = json.loads(path.read_bytes())["rows"] if path.exists() else {}
    for name, found in tried.items():
        rows[name] = {"what": f"`{name}`", **{column(factor): value for factor, value in found.items()}}
        rows[name]["chosen"] = f"{chosen[name]:g}"
    columns = {key for row in rows.values() for key in row if key.endswith(TIMES)}
    ordered = sorted(columns, key=lambda key: float(key.removesuffix(TIMES)))
    return {"unit": "per cent", "options": dict(given), "factors": list(rivals.FACTORS), "rows": rows,
            "tables": {"rates": {"columns": [*ordered, "chosen"], "rows": list(rows)}}}  # fmt: skip


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with CIFAR-100's files; without it, the packaged Fashion-MNIST")
    parser.add_argument("--out", default="runs/tune-rivals", help="parent of the run folders")
    parser.add_argument("--part", default="", help="I/N: train every N-th run (--extend: method) from the I-th on")
    parser.add_argument("--only", nargs="+", help="only these methods")
    parser.add_argument("--extend", action="store_true", help="try further factors where the best is at an end")
    parser.add_argument("--merge", action="store_true", help="train nothing, write --json and --rates")
    parser.add_argument("--json", default="rivals-tuning.json", help="file for what was tried and chosen")
    parser.add_argument("--rates", default=str(rivals.RATES), help="file for the choice")
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE", help="for every run: device=cpu")
    arguments = parser.parse_args(given)
    options = {**CHEAP, **{name: read_yaml(value) for name, _, value in (one.partition("=") for one in arguments.set)}}
    dataset = FASHION if arguments.root is None else CIFAR
    root, path = None if arguments.root is None else Path(arguments.root), Path(arguments.json)
    methods = [one.method for one in rivals.rows() if one.tuned and one.method in (arguments.only or [one.method])]

    def planned(factors: Mapping[str, Iterable[float]]) -> list[tuple[str, float, Job]]:
        plan = tuning(dataset, lambda method: list(factors.get(method, ())))
        work = jobs([run for *_, run in plan], Path(arguments.out), root, nested(options), anywhere=arguments.merge)
        return [(rival.method, factor, job) for (rival, factor, _), job in zip(plan, work, strict=True)]

    def finished(factors: Mapping[str, Iterable[float]]) -> Tried:
        """What the file has, and the runs with these factors."""
        found = {name: values for name, values in recorded(path).items() if name in methods}
        for method, factor, job in planned(factors):
            if job.state == "finished":
                metrics = RunFolder(job.config.folder).results()["metrics"]
                found.setdefault(method, {})[factor] = round(100 * metrics["final_accuracy_tasks"], 2)
            elif factor in rivals.FACTORS and factor not in found.get(method, {}):
                say(f"{job.planned.key}: {job.state}")
        return {name: values for name, values in found.items() if set(rivals.FACTORS) <= set(values)}

    if not (arguments.merge or arguments.extend):
        every = planned(dict.fromkeys(methods, rivals.FACTORS))
        return run_jobs([job for *_, job in every], arguments.part, keep_checkpoints=False)
    steps = [STEP**power for power in range(-round(math.log(MOST, STEP)), round(math.log(MOST, STEP)) + 1)]
    if arguments.extend:
        own = part_of(methods, arguments.part)
        while True:
            tried = finished(dict.fromkeys(own, steps))
            more = {name: beyond(tried[name], NANO_CLASSES[dataset]) for name in own if name in tried}
            if not any(more.values()):
                return None
            run_jobs([job for *_, job in planned(more)], keep_checkpoints=False)
    tried = finished(dict.fromkeys(methods, steps))
    chosen = {name: best(found, NANO_CLASSES[dataset]) for name, found in tried.items()}
    write_json(path, record(path, tried, chosen, options))
    rivals.write_chosen(chosen, Path(arguments.rates))
    say(f"Chosen for {len(chosen)} of {len(methods)} methods: {arguments.rates}, {arguments.json}")


if __name__ == "__main__":
    main()
