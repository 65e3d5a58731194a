"""Measures what classifier, rank rule and eta do, on the packaged images: the figures of docs/choose.md.

    python examples/choose.py --out runs/choose --json docs/results/choose.json
    python tools/draw_figures.py

Split Fashion-MNIST in five tasks at 16 pixels, with the nano model. Of 150 training images per class, 50 train and 100
judge; test images are not read. All methods that train have the same rate and passes, not tuned. Start it again
after an interruption: finished runs are read, the others continue. It takes about ten minutes on two cores.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import mambacl
from mambacl.data import TransformConfig, Transforms, open_dataset
from mambacl.nullspace import NullSpace, null_rank

COMMON: dict[str, Any] = {
    "stream.train_per_class": 150,
    "stream.validation": 2 / 3,
    "stream.transforms.image_size": 16,
    "training.passes": 3,
    "training.lr": 1e-3,
}
PROTECTED = {"method": "mamba-cl", "setting": "exact", "nullspace.rank": "energy:0.99", "nullspace.products": "float32"}
METHODS: dict[str, dict[str, Any]] = {
    "frozen": {"method": "frozen"},
    "protected": PROTECTED,
    "fine-tuned": {"method": "sequential"},
}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    **{name: {"classifier": name} for name in ("separate", "nearest-mean", "lda")},
    "ridge": {"classifier": "ridge", "classifier_options.width": 1000},
}
RANKS = ("corner", "smoothed-corner", "energy:0.9", "energy:0.99", "energy:0.999")
ETAS = (1.0, 0.99, 0.95, 0.9, 0.5)
METRICS = {
    "final accuracy": "final_accuracy_tasks",
    "forgetting": "forgetting",
    "learning accuracy": "learning_accuracy",
}
TABLES = {
    "classifiers": {
        "the default": {"method": "analytic"},
        **{f"{how}, {name}": {**one, **own} for how, one in METHODS.items() for name, own in CLASSIFIERS.items()},
    },
    "ranks": {f"`{rank}`": {**PROTECTED, "nullspace.rank": rank, "classifier": "lda"} for rank in RANKS},
    "etas": {f"eta {eta:g}": {**PROTECTED, "nullspace.eta": eta, "classifier": "lda"} for eta in ETAS},
}
BLOCK = 6  # of 12, for the spectrum


def measured(out: Path, preset: str, given: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    """Mean and deviation over the seeds of a run's metrics, in per cent."""
    found = []
    for seed in seeds:
        words = [str(value) for value in given.values() if value != "float32"]
        folder = out / "-".join([*words, str(seed)]).replace(":", "")
        found.append(mambacl.train(preset, out=str(folder), seed=seed, **{**COMMON, **given}).metrics)
    row: dict[str, Any] = {"options": given}
    for column, name in METRICS.items():
        values = [100 * metrics[name] for metrics in found]
        row[column] = [round(statistics.mean(values), 2), round(statistics.stdev(values) if len(values) > 1 else 0, 2)]
    return row


def spectrum() -> dict[str, Any]:
    """How the energy of one block's SSM input spreads over its directions, and how many each rule protects."""
    model = mambacl.create_model("defocus_mamba_nano", num_classes=0, pretrained="tin32-39ep").eval()
    space = NullSpace(model, "exact", blocks=[BLOCK])
    data = open_dataset("fashion-mnist-small", None)
    about: Any = model.default_cfg
    size = TransformConfig(image_size=COMMON["stream.transforms.image_size"])
    transforms = Transforms(size, about["input_size"][-1], list(about["mean"]), list(about["std"]))
    chosen = [number for number, label in enumerate(data.train.labels) if label < 2]
    images = torch.stack([transforms.evaluate(data.train.image(number)) for number in chosen])
    space.consolidate(transforms.normalize(images).split(50))
    [part] = [part for name, part in space.decompositions().items() if "x_proj" in name][:1]
    values = part.spectrum.clamp(min=0)
    share = (values.cumsum(0) / values.sum()).tolist()
    rules = (*RANKS, "tolerance:1e-12")
    return {
        "what": f"input of the SSM in block {BLOCK + 1} of 12, {len(chosen)} images of two classes",
        "energy": [round(100 * one, 3) for one in share],
        "protected": {rule: len(values) - int(null_rank(values, rule)) for rule in rules},
    }


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--out", default="runs/choose", help="parent of the run folders")
    parser.add_argument("--json", default="choose.json", help="file for the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    arguments = parser.parse_args(given)
    record: dict[str, Any] = {
        "benchmark": f"`{arguments.preset}` with {' '.join(f'--{name} {value:g}' for name, value in COMMON.items())}",
        "unit": f"per cent, seeds {', '.join(map(str, arguments.seeds))}",
        "spectrum": spectrum(),
        "rows": {},
        "tables": {},
    }
    for table in arguments.tables:
        for name, options in TABLES[table].items():
            row = measured(Path(arguments.out), arguments.preset, options, arguments.seeds)
            record["rows"][name] = {"what": name, **row}
        record["tables"][table] = {"columns": list(METRICS), "rows": list(TABLES[table])}
    Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
