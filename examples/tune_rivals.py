"""Chooses the learning rates of the nano rivals (`mambacl paper main --scale nano`) on held-back training images.

    python examples/tune_rivals.py --root CIFAR --part 1/12             # one of twelve processes; then
    python examples/tune_rivals.py --root CIFAR --extend --part 1/12
    python examples/tune_rivals.py --root CIFAR --confirm --part 1/12
    python examples/tune_rivals.py --root CIFAR --merge --json docs/results/rivals-tuning.json

Every method that trains has the same budget: one seed, a tenth of the training images held back, 5 passes. The first
command tries three factors of its published rates with 60 images per class. `--extend` goes on where the best factor is
the largest or the smallest one, until it is neither or 64 times more or less; at both ends for a method that guesses.
60 images per class are few steps, which favours large rates, so `--confirm` trains the two best factors on all images
that are not held back, and the better one is chosen. A run whose loss is not finite counts as 0.

Processes with different `--part` share the runs. Start them again after an interruption: finished runs are read, the
others continue. What was tried before is also read from the JSON file (`--json`), so it can be of another day.
`--merge` trains nothing: it writes what was tried and chosen to the JSON file, and the choice to
`src/mambacl/paper/rates.yaml`, from which the main table takes it. A method with missing runs keeps its rates, and its
row if the file has one. One that guesses with each factor has the published rates: so few steps do not tell.
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
from mambacl.training.loop import Diverged, TrainingError

CHEAP: dict[str, Any] = {"stream.validation": 0.1, "training.passes": 5}
FEWER = {"stream.train_per_class": 60}  # of the search; not of the two best
STEP, MOST = 4.0, 64.0  # between factors, and the largest one
TIMES = " times"
DIVERGED = "diverged"  # a file in the folder of a run whose loss was not finite
FULL = "full"  # a row's runs on all images, and the folder of all such runs
Tried = dict[str, dict[float, float]]  # accuracy in per cent by method and factor


def column(factor: float) -> str:
    return f"{factor:g}{TIMES}"


def guesses(found: Mapping[float, float], classes: int) -> bool:
    """Whether no factor gives more than twice chance."""
    return max(found.values()) <= 2 * 100 / classes


def best(found: Mapping[float, float], classes: int | None = None) -> float:
    """The factor with the highest accuracy, in per cent: of equals the nearest to 1, and 1 if all guess."""
    order = sorted(found, key=lambda factor: (abs(math.log(factor)), factor))
    if classes is not None and guesses(found, classes):
        return rivals.FACTORS[0]
    return max(order, key=lambda factor: found[factor])


def finalists(found: Mapping[float, float], classes: int) -> list[float]:
    """The best and the second-best factor."""
    first = best(found, classes)
    return [first, best({factor: value for factor, value in found.items() if factor != first})]


def beyond(found: Mapping[float, float], classes: int) -> list[float]:
    """The factors to try next; none if the best one has a worse one on either side."""
    least, largest = min(found), max(found)
    ends = {least, largest} if guesses(found, classes) else {best(found, classes)}
    wanted = [least / STEP] * (least in ends) + [largest * STEP] * (largest in ends)
    return [factor for factor in wanted if 1 / MOST <= factor <= MOST]


def train(job: Job) -> None:
    """Trains one run; marks its folder if the loss is not finite."""
    try:
        run_jobs([job], keep_checkpoints=False)
    except TrainingError as error:
        if not isinstance(error.__cause__, Diverged):
            raise
        say(f"{job.planned.key}: {error.__cause__}")
        (Path(job.config.folder) / DIVERGED).touch()


def rows_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes())["rows"]) if path.exists() else {}


def recorded(path: Path, full: bool) -> Tried:
    """What the JSON file has."""
    if full:
        return {name: {float(key): value for key, value in row.get(FULL, {}).items()}
                for name, row in rows_of(path).items()}  # fmt: skip
    return {
        name: {float(key.removesuffix(TIMES)): value for key, value in row.items() if key.endswith(TIMES)}
        for name, row in rows_of(path).items()
    }


def record(path: Path, tried: Tried, full: Tried, chosen: Mapping[str, float], given: Mapping[str, Any]) -> Any:
    """The JSON file: by method what was tried, in the form that `mambacl.bench.page` reads. Its other rows stay."""
    rows = rows_of(path)
    for name, found in tried.items():
        rows[name] = {"what": f"`{name}`", **{column(factor): value for factor, value in found.items()}}
        rows[name] |= {FULL: {f"{factor:g}": value for factor, value in full[name].items()}} if full.get(name) else {}
        rows[name]["chosen"] = f"{chosen.get(name, 1.0):g}"
    columns = {key for row in rows.values() for key in row if key.endswith(TIMES)}
    ordered = sorted(columns, key=lambda key: float(key.removesuffix(TIMES)))
    return {"unit": "per cent", "options": dict(given), "factors": list(rivals.FACTORS), "rows": rows,
            "tables": {"rates": {"columns": [*ordered, "chosen"], "rows": list(rows)}}}  # fmt: skip


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with CIFAR-100's files; without it, the packaged Fashion-MNIST")
    parser.add_argument("--out", default="runs/tune-rivals", help="parent of the run folders")
    parser.add_argument("--part", default="", help="I/N: every N-th run (--extend, --confirm: method) from the I-th on")
    parser.add_argument("--only", nargs="+", help="only these methods")
    parser.add_argument("--extend", action="store_true", help="try further factors where the best is at an end")
    parser.add_argument("--confirm", action="store_true", help="train the two best factors on all images")
    parser.add_argument("--merge", action="store_true", help="train nothing, write --json and --rates")
    parser.add_argument("--json", default="rivals-tuning.json", help="file for what was tried and chosen")
    parser.add_argument("--rates", default=str(rivals.RATES), help="file for the choice")
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE", help="for every run: device=cpu")
    arguments = parser.parse_args(given)
    own = {name: read_yaml(value) for name, _, value in (one.partition("=") for one in arguments.set)}
    cheap, all_images = {**CHEAP, **FEWER, **own}, {**CHEAP, **own}
    dataset = FASHION if arguments.root is None else CIFAR
    root, path = None if arguments.root is None else Path(arguments.root), Path(arguments.json)
    methods = [one.method for one in rivals.rows() if one.tuned and one.method in (arguments.only or [one.method])]

    def planned(factors: Mapping[str, Iterable[float]], full: bool = False) -> list[tuple[str, float, Job]]:
        plan = tuning(dataset, lambda method: list(factors.get(method, ())))
        out = Path(arguments.out) / FULL if full else Path(arguments.out)
        options = nested(all_images if full else cheap)
        work = jobs([run for *_, run in plan], out, root, options, anywhere=arguments.merge)
        return [(rival.method, factor, job) for (rival, factor, _), job in zip(plan, work, strict=True)]

    def finished(factors: Mapping[str, Iterable[float]], full: bool = False) -> Tried:
        """What the file has, and the runs with these factors."""
        found = {name: values for name, values in recorded(path, full).items() if name in factors}
        for method, factor, job in planned(factors, full):
            if job.state == "finished":
                metrics = RunFolder(job.config.folder).results()["metrics"]
                found.setdefault(method, {})[factor] = round(100 * metrics["final_accuracy_tasks"], 2)
            elif (Path(job.config.folder) / DIVERGED).exists():
                found.setdefault(method, {})[factor] = 0.0
            elif (full or factor in rivals.FACTORS) and factor not in found.get(method, {}):
                say(f"{job.planned.key}{' on all images' * full}: {job.state}")
        return found

    if not (arguments.merge or arguments.extend or arguments.confirm):
        every = planned(dict.fromkeys(methods, rivals.FACTORS))
        return run_jobs([job for *_, job in every], arguments.part, keep_checkpoints=False)
    steps = [STEP**power for power in range(-round(math.log(MOST, STEP)), round(math.log(MOST, STEP)) + 1)]

    def searched(names: Iterable[str]) -> Tried:
        """Of the methods whose first factors have all been tried."""
        tried = finished(dict.fromkeys(names, steps))
        return {name: values for name, values in tried.items() if set(rivals.FACTORS) <= set(values)}

    def wanted(tried: Tried) -> dict[str, list[float]]:
        return {name: finalists(found, NANO_CLASSES[dataset]) for name, found in tried.items()}

    if arguments.extend:
        names = part_of(methods, arguments.part)
        while True:
            more = {name: beyond(found, NANO_CLASSES[dataset]) for name, found in searched(names).items()}
            if not any(more.values()):
                break
            for *_, job in planned(more):
                train(job)
    if arguments.confirm:
        last = wanted(searched(part_of(methods, arguments.part)))
        done = finished(last, full=True)
        for method, factor, job in planned(last, full=True):
            if factor not in done.get(method, {}):
                train(job)
    if not arguments.merge:
        return None
    tried = searched(methods)
    last = wanted(tried)
    full = finished(last, full=True)
    chosen = {
        name: best(found, NANO_CLASSES[dataset])
        for name, found in full.items()
        if name in tried and set(last[name]) <= set(found)
    }
    write_json(path, record(path, tried, full, {**rivals.rates(Path(arguments.rates)), **chosen}, cheap))
    rivals.write_chosen(chosen, Path(arguments.rates))
    say(f"Chosen for {len(chosen)} of {len(methods)} methods: {arguments.rates}, {arguments.json}")


if __name__ == "__main__":
    main()
