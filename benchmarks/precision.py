"""Whether a precision loses accuracy beyond the spread of seeds: CIFAR-100 in 10 tasks with the nano model.

    python benchmarks/precision.py --root FOLDER [--out runs/precision] [--seeds 3] [--preset cifar100-10-nano]

A run for each precision and seed; those that are there already are shown as they are, an interrupted one is continued.
`train s`: seconds of training, of a run that found its kernels compiled or not.
"""

import argparse
import statistics
from pathlib import Path

import mambacl

PRECISIONS = ("float32", "tf32", "bf16")
SHOWN = {"final_accuracy_images": "accuracy", "forgetting": "forgetting"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=None, help="folder with the data set's files")
    parser.add_argument("--out", type=Path, default=Path("runs/precision"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--preset", default="cifar100-10-nano")
    given = parser.parse_args()
    found: dict[str, list[mambacl.Run]] = {precision: [] for precision in PRECISIONS}
    for seed in range(given.seeds):
        for precision in PRECISIONS:
            out = str(given.out / f"{given.preset}-{precision}-{seed}")
            stream = {} if given.root is None else {"root": given.root}
            run = mambacl.train(given.preset, seed=seed, precision=precision, out=out, stream=stream)
            found[precision].append(run)
    print(f"\n{'precision':10} {'per cent':12} " + " ".join(f"{f'seed {s}':>8}" for s in range(given.seeds)) +
          f" {'mean':>8} {'deviation':>9}")  # fmt: skip
    for precision, runs in found.items():
        for metric, word in SHOWN.items():
            values = [100 * run.metrics[metric] for run in runs]
            print(row(precision, word, values))
        print(row(precision, "train s", [run.results["seconds"]["train"] for run in runs]))


def row(precision: str, word: str, values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    each = " ".join(f"{value:8.2f}" for value in values)
    return f"{precision:10} {word:12} {each} {statistics.mean(values):8.2f} {spread:9.2f}"


if __name__ == "__main__":
    main()
