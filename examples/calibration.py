"""Measures what docs/deploy.md says about calibrated probabilities and unknown images.

    python examples/calibration.py --root FOLDER --out runs/calibration --json docs/results/calibration.json

Each run is measured after half of its tasks, when the images of later tasks are of classes that it does not know, and
after all of them; once on training images that are held back, on which the choices were made, and once on test images.
`--root` is the folder with CIFAR-100's files; without it, only the demo is measured.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mambacl
from mambacl.deploy.paired import calibration_error
from mambacl.deploy.probabilities import as_probabilities
from mambacl.training.loop import Loop

SHARE = 0.05  # of images of known classes that may be called unknown
CIFAR = {"stream.train_per_class": 40, "features.mirror": "none", "classifier_options": {"width": 3000}}
OTHERS: dict[str, dict[str, Any]] = {
    name: {"classifier": name, "classifier_options": {}, "features.depths": "final"} for name in ("lda", "nearest-mean")
}
# name -> preset and options
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("demo", {}),
    **{f"demo, {name}": ("demo", options) for name, options in OTHERS.items()},
    "CIFAR-100": ("cifar100-10-nano", CIFAR),
    **{f"CIFAR-100, {name}": ("cifar100-10-nano", {**CIFAR, **options}) for name, options in OTHERS.items()},
}
HELD_BACK = {"demo": 0.2, "cifar100-10-nano": 0.05}  # share of the training images
IMAGES = ("held-back", "test")
COLUMNS = [
    "classes", "accuracy", "error, raw", "error, softmax", "error, calibrated", "known rejected",
    "others accepted, estimated", "others accepted",
]  # fmt: skip


class Measuring(Loop):
    """Measures after half of the tasks and after all."""

    measured: dict[str, dict[str, Any]]

    def _end_task(self, task: int) -> None:
        super()._end_task(task)
        tasks = len(self.stream.tasks)
        places = {tasks // 2 - 1: "half of the tasks", tasks - 1: "all tasks"}
        if task in places:
            Measuring.measured[places[task]] = self.measure(task)

    @torch.no_grad()
    def measure(self, task: int) -> dict[str, Any]:
        known, foreign = self._all_scores(range(task + 1)), self._all_scores(range(task + 1, len(self.stream.tasks)))
        scores, labels = known
        method, calibration = self.method, self.method.calibration
        assert calibration is not None, method.why_not_calibrated()
        rates = calibration.rejecting(SHARE)
        kinds = {
            "error, raw": as_probabilities(scores, method.classifier.estimates_probabilities),
            "error, softmax": torch.softmax(scores, dim=1),
            "error, calibrated": calibration.probabilities(scores),
        }
        found = {"accuracy": 100 * float((scores.argmax(1) == labels).double().mean())}
        for name, probabilities in kinds.items():
            confidences, answers = probabilities.max(1)
            found[name] = 100 * calibration_error(confidences.tolist(), (answers == labels).tolist())
        rejected = calibration.probabilities(scores).amax(1) < rates.threshold
        found["known rejected"] = 100 * float(rejected.double().mean())
        if len(foreign[0]):
            accepted = calibration.probabilities(foreign[0]).amax(1) >= rates.threshold
            found["others accepted, estimated"] = 100 * rates.false_acceptances
            found["others accepted"] = 100 * float(accepted.double().mean())
        return {"classes": str(scores.shape[1]), **{name: round(value, 2) for name, value in found.items()}}

    def _all_scores(self, tasks: range) -> tuple[Tensor, Tensor]:
        """Mean scores over views and labels of the images of these tasks that are evaluated."""
        views = len(self.method.views(torch.empty(0, 0, 0, 0)))
        parts = [part for task in tasks for part in self._scores(task, self.method.answer)]
        if not parts:
            return torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)
        return torch.cat([scores.double() for scores, _ in parts]) / views, torch.cat([labels for _, labels in parts])


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with CIFAR-100's files")
    parser.add_argument("--out", default="runs/calibration", help="parent of the run folders")
    parser.add_argument("--json", default="calibration.json", help="file for the results")
    parser.add_argument("--only", nargs="+", choices=IMAGES, default=IMAGES, help="images to measure on")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    arguments = parser.parse_args(words)
    path = Path(arguments.json)
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows, tables = record.get("rows", {}), record.get("tables", {})  # rows that are not measured now stay
    for name in arguments.runs:
        preset, options = RUNS[name]
        root = {"stream.root": arguments.root} if name.startswith("CIFAR") else {}
        if root and arguments.root is None:
            continue
        for images in arguments.only:
            Measuring.measured = {}
            given = {**options, "stream.validation": HELD_BACK[preset]} if images == "held-back" else options
            out = Path(arguments.out) / f"{name}-{images}".replace(", ", "-").replace(" ", "-")
            mambacl.train(preset, out=str(out), overwrite=True, loop=Measuring, **root, **given)
            for place, found in Measuring.measured.items():
                row = f"{name}, {place}, {images}"
                rows[row] = {
                    "what": f"{name}, {place}",
                    "preset": preset,
                    "options": given,
                    **found,
                }
                listed = tables.setdefault(images, {"columns": COLUMNS, "rows": []})["rows"]
                listed += [] if row in listed else [row]
            record |= {"unit": "per cent", "rows": rows, "tables": tables}
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
