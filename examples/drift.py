"""Compares ways to correct the statistics of old classes when training moves the features, with an oracle.

    python examples/drift.py --preset cifar100-10-nano --root FOLDER --options '{"training.lr": 2e-5}' --out RUN

The backbone trains once, with the method given. Each classifier is computed with each kind of drift correction that it
can follow, from the same features. Two oracles see the training images of all tasks again at the end, which no method
may do, and bound what a correction can reach: `oracle` has the true statistics, `oracle means` the true means and
otherwise those without correction. Prints JSON: accuracy in per cent after the last task, mean over tasks, on a tenth
of the training images that is held back; `--options '{"stream.validation": null}'` takes the test images. With `--out`
the run is kept, and the same command continues it after an interruption.
"""

import argparse
import copy
import json
import math
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mambacl
from mambacl.classifiers import CLASSIFIERS, Classifier
from mambacl.classifiers.drift import FollowsDrift
from mambacl.classifiers.drifts import KINDS
from mambacl.files import read_tensors, write_tensors
from mambacl.ops.precision import at_least_float32
from mambacl.training.loop import Loop
from mambacl.training.step import autocast

OPTIONS: dict[str, dict[str, Any]] = {"ridge": {"width": 2000}, "ridge without a lift": {"width": 0}}
DEFAULT = ["nearest-mean", "lda", "gaussian", "ridge without a lift", "ridge"]
CHOOSE = ("shift", "linear")  # kinds that choose a setting
Features = tuple[Tensor, Tensor]


class Contest:
    """Classifiers beside that of the run, which learn from the same features and are judged after the last task. They
    are saved after each task, in the run's folder."""

    def __init__(self, names: list[str], kinds: list[str], options: dict[str, dict[str, Any]], settings: Any) -> None:
        self.names, self.kinds, self.options, self.settings = names, kinds, options, settings
        self.contestants: dict[tuple[str, str], Classifier] = {}
        self.tasks = 0  # that the contestants have learned
        self.choices: dict[str, list[float]] = {}
        self.seconds: dict[str, float] = {}
        self.found: dict[str, Any] = {}

    def loop(self) -> type[Loop]:
        contest = self

        class Watched(Loop):
            def evaluate(self, task: int) -> list[int]:
                contest.learn(self, task)
                return super().evaluate(task)

        return Watched

    def made(self, loop: Loop, name: str, **more: Any) -> Classifier:
        kind = CLASSIFIERS.get(name.split()[0])
        made = kind(loop.method.reader.num_features, **{**OPTIONS.get(name, {}), **self.options.get(name, {}), **more})
        return made.to(loop.device)

    def entered(self, loop: Loop) -> dict[tuple[str, str], Classifier]:
        """Each classifier without correction, and with each kind that it can follow."""
        found = {}
        for name in self.names:
            plain = found[name, "none"] = self.made(loop, name)
            assert isinstance(plain, FollowsDrift)
            for kind in self.kinds:
                if plain.can_follow(KINDS[kind]):
                    settings = self.settings.get(kind, {})
                    found[name, kind] = self.made(loop, name, drift=kind, drift_options=settings)
        return found

    def learn(self, loop: Loop, task: int) -> None:
        if task == 0:
            self.contestants = self.entered(loop)
        elif self.tasks != task:
            self.load(file_of(loop.folder.path, task - 1), loop)
        batches = partial(loop.stream.plain_batches, task, loop.recipe.eval_batch_size)
        with autocast(loop.device, loop.bf16):
            pairs = list(loop.method.moved_features(batches()))
            for (name, kind), classifier in self.contestants.items():
                started = time.perf_counter()
                assert isinstance(classifier, FollowsDrift)
                move = classifier.follow(pairs, loop.method.task_end(batches))
                add(classifier, ((new, labels) for _, new, labels in pairs))
                row = f"{name}, {kind}"
                self.seconds[row] = self.seconds.get(row, 0.0) + time.perf_counter() - started
                if task and kind in CHOOSE:
                    self.choices.setdefault(row, []).append(move.choice)
        self.tasks = task + 1
        if task == len(loop.stream.tasks) - 1:
            self.judge(loop, task)
        self.save(file_of(loop.folder.path, task))

    def save(self, path: Path) -> None:
        named = {f"{name}|{kind}": one.state_dict() for (name, kind), one in self.contestants.items()}
        tensors = {f"{row}/{key}": tensor.cpu() for row, state in named.items() for key, tensor in state.items()}
        record = {"choices": self.choices, "seconds": self.seconds, "found": self.found}
        write_tensors(path, tensors, {"record": json.dumps(record)})

    def load(self, path: Path, loop: Loop | None = None) -> None:
        """With a loop, the classifiers as well."""
        tensors, text = read_tensors(path)
        record = json.loads(text["record"])
        self.choices, self.seconds, self.found = record["choices"], record["seconds"], record["found"]
        if loop is not None:
            self.contestants = self.entered(loop)
            for (name, kind), one in self.contestants.items():
                row = f"{name}|{kind}/"
                one.load_state_dict({key.removeprefix(row): t for key, t in tensors.items() if key.startswith(row)})
                one.to(loop.device)

    @torch.no_grad()
    def judge(self, loop: Loop, last: int) -> None:
        size = loop.recipe.eval_batch_size
        tests = [list(seen(loop, loop.stream.test_batches(task, size))) for task in range(last + 1)]
        images = [list(seen(loop, loop.stream.plain_batches(task, size), True)) for task in range(last + 1)]
        for name in self.names:
            oracle, none = self.made(loop, name), copy.deepcopy(self.contestants[name, "none"])
            for task in images:
                add(oracle, task)
            assert isinstance(oracle, FollowsDrift) and isinstance(none, FollowsDrift)
            none.transport(offset=oracle.class_means()[0] - none.class_means()[0])
            ways = {kind: one for (own, kind), one in self.contestants.items() if own == name}
            ways |= {"oracle means": none, "oracle": oracle}
            self.found[name] = {way: accuracy(one, tests) for way, one in ways.items()}
            self.found[name] |= {"memory in MB": round(oracle.nbytes / 1e6, 1)}


def file_of(folder: Path, task: int) -> Path:
    return folder / f"drift-{task + 1:02d}.safetensors"


def seen(loop: Loop, batches: Iterable[Features], mirrored: bool = False) -> Iterable[Features]:
    """What classifiers see of images."""
    mirrored = mirrored and loop.method.setup.features.mirror != "none"
    for images, labels in batches:
        images, labels = images.to(loop.device), labels.to(loop.device)
        for view in (images, images.flip(3)) if mirrored else (images,):
            with torch.no_grad(), autocast(loop.device, loop.bf16):
                yield at_least_float32(loop.method.classifier_input(view)), labels


def add(classifier: Classifier, batches: Iterable[Features]) -> None:
    for features, labels in batches:
        classifier.update(features, labels)
    classifier.finish_task()


def accuracy(classifier: Classifier, tasks: list[list[Features]]) -> float:
    """Per cent, mean over tasks."""
    shares = []
    for batches in tasks:
        right = sum(int((classifier.scores(x).argmax(1) == labels).sum()) for x, labels in batches)
        shares.append(right / sum(len(labels) for _, labels in batches))
    return round(100 * sum(shares) / len(shares), 2)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--root", help="folder with the data set")
    parser.add_argument("--method", default="sequential")
    parser.add_argument("--classifiers", nargs="+", choices=DEFAULT, default=DEFAULT)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="of drift correction")
    parser.add_argument("--options", type=json.loads, default={}, help='of the run, as JSON: {"training.lr": 2e-5}')
    parser.add_argument("--of", type=json.loads, default={}, help='of classifiers, as JSON: {"ridge": {"width": 5000}}')
    parser.add_argument("--settings", type=json.loads, default={}, help='of kinds, as JSON: {"sdc": {"sigma": 0.2}}')
    parser.add_argument("--out", type=Path, help="folder of the run, which the same command continues")
    parser.add_argument("--json", help="file for the results; they are printed as well")
    arguments = parser.parse_args(given)
    contest = Contest(arguments.classifiers, arguments.kinds, arguments.of, arguments.settings)
    root = {"stream.root": arguments.root} if arguments.root else {}
    run = {"stream.validation": 0.1, "features.mirror": "none", **root, **arguments.options}
    # The run's classifier keeps the weights from before each task.
    run |= {"method": arguments.method, "classifier": "nearest-mean", "classifier_options": {"drift": "linear"}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary) / "run"
        made = mambacl.train(arguments.preset, out=str(folder), loop=contest.loop(), **run)
        if not contest.found:  # the run had finished
            contest.load(file_of(folder, len(made.results["tasks"]) - 1))
    record = {
        "run": {"preset": arguments.preset, **run},
        "final accuracy": contest.found,
        "ridge or s^2 by task, null: no move": {
            row: [None if value == math.inf else float(f"{value:.3g}") for value in values]
            for row, values in contest.choices.items()
        },
        "seconds": {row: round(seconds, 1) for row, seconds in contest.seconds.items()},
        "seconds of the run": round(sum(made.results["seconds"].values()), 1),
    }
    text = json.dumps(record, indent=1)
    print(text)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
