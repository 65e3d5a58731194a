"""The command bench, and the benchmarks with options: bench against, settings, precision, exports, busy,
relaxation, methods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from mambacl.config import Device
from mambacl.errors import UserError
from mambacl.options import Must, at_least


def _parts() -> str:  # a function, because it is rarely needed
    from mambacl.bench.names import PARTS

    return "; ".join(f"{name}: {sentence}" for name, sentence in PARTS.items()) + "; default: all"


def _shapes() -> str:
    from mambacl.bench.shapes import SHAPES

    return f"scans to time: {', '.join(SHAPES)}; default: those that suit the device"


Where = Annotated[Device, "auto, cpu, cuda or cuda:N"]
Shapes = Annotated[tuple[str, ...], _shapes]
Seeds = Annotated[int, "number of seeds", at_least(1)]
Json = Annotated[Path | None, "also write the results to this file, with machine and date"]
SEPARATE = ("against", "settings", "precision", "exports", "busy", "relaxation", "methods")


def bench(
    *part: Annotated[str, _parts],
    device: Where = "auto",
    json: Json = None,
    shape: Shapes = (),
    quick: Annotated[bool, "fewer sizes and repeats, to check that everything works"] = False,
    root: Annotated[Path | None, "folder with CIFAR-100's files, for the part run"] = None,
) -> None:
    """measure the speed of this machine, part by part: `mambacl bench scan step --device cpu`

    Times the parts at sizes that suit the device. Ratios are computed within one run."""
    for name in part:
        if name in SEPARATE:
            raise UserError(f"`{name}` is a separate command: see `mambacl bench {name} --help`.")

    from mambacl.bench import bench as run_bench

    run_bench(part, device, json, shape, quick, root)


def bench_against(
    *,
    device: Where = "auto",
    shape: Shapes = (),
    peer: Annotated[tuple[str, ...], "systems to compare with; default: all that are installed"] = (),
    threads: Annotated[int, "threads on the CPU", at_least(1)] = 1,
    rounds: Annotated[int, "maximum number of rounds per shape", at_least(1)] = 15,
    json: Json = None,
    commit: Annotated[str | None, "commit to record in the JSON if the package is not in a git checkout"] = None,
) -> None:
    """compare the scan with other implementations: `mambacl bench against --device cpu --threads 2`

    Checks that they agree, then times the selective scan and all other installed implementations in turn, in one
    process. Install them with pip install 'mambacl[bench]'."""
    from mambacl.bench.against import against, peers_named

    against(device, shape, json, threads, rounds, commit, peers_named(peer))


def bench_settings(
    *,
    device: Where = "auto",
    batch: Annotated[int, "images per step", at_least(1)] = 200,
    precision: Annotated[Literal["float32", "tf32", "bf16"], "precision of the step"] = "bf16",
    tasks: Annotated[
        int, "tasks to consolidate first, at most 5", Must("be between 1 and 5", range(1, 6).__contains__)
    ] = 3,
    images: Annotated[int, "images per task, for the covariances", at_least(1)] = 500,
    json: Json = None,
) -> None:
    """time a training step after some tasks, in each setting: `mambacl bench settings --batch 32 --precision float32`

    Settings: sequential, public-code, exact. Covariances come from the packaged images, so that ranks are realistic."""
    from mambacl.bench.result import publish
    from mambacl.bench.settings import measure

    publish(measure, json, device=device, batch=batch, precision=precision, tasks=tasks, images=images)


def bench_precision(
    *,
    preset: Annotated[str, "what to train"] = "cifar100-10-nano",
    root: Annotated[Path | None, "folder with the data set's files"] = None,
    out: Annotated[Path, "folder for the runs"] = Path("runs/precision"),
    seeds: Seeds = 3,
    device: Where = "auto",
    json: Json = None,
) -> None:
    """compare complete runs in float32, tf32 and bf16: `mambacl bench precision --root data/cifar100 --seeds 3`

    Shows accuracy, forgetting and seconds. Finished runs in the folder are not trained again."""
    from mambacl.bench.result import publish
    from mambacl.bench.runs import compare_precisions

    publish(compare_precisions, json, preset=preset, root=root, out=out, seeds=seeds, device=device)


def bench_exports(
    *,
    rounds: Annotated[int, "maximum number of rounds per batch size and number of threads", at_least(3)] = 9,
    json: Json = None,
) -> None:
    """compare exported nano models with ours on the CPU: `mambacl bench exports --json export-speed.json`

    In ONNX Runtime and OpenVINO, with the scan as a loop and chunked; one thread and two, one image and 32.
    Install the runtimes with pip install 'mambacl[onnx,openvino]'."""
    from mambacl.bench.exports import bench_exports as measure

    measure(rounds=rounds, json_file=json)


def bench_busy(
    *,
    long: Annotated[bool, "more ways of waiting and more rounds: about five minutes"] = False,
    others: Annotated[int, "other programs, each with one thread per core", at_least(1)] = 1,
    json: Json = None,
) -> None:
    """time a training step on a shared CPU for each way in which threads can wait: `mambacl bench busy --others 2`

    Takes about a minute on two cores."""
    from mambacl.bench.busy import busy
    from mambacl.bench.result import publish

    publish(busy, json, long=long, others=others)


def bench_methods(
    *method: Annotated[str, "methods to measure; default: all"],
    backbone: Annotated[
        str, "backbone; a method that cannot work on it is measured on the other kind's nano"
    ] = "vit_nano",
    device: Where = "auto",
    batch: Annotated[int | None, "images per step (default 100 on a GPU, 8 on the CPU)", at_least(1)] = None,
    quick: Annotated[bool, "fewer repeats, to check that everything works"] = False,
    json: Json = None,
) -> None:
    """time each method beside its frozen backbone: `mambacl bench methods l2p coda-prompt --device cpu`

    A training step and a test image, as multiples of the backbone's forward, and how much of that the method's passes
    through the backbone explain."""
    from mambacl.bench.methods import measure
    from mambacl.bench.result import publish

    effort = {"repeats": 3, "budget": 0.1} if quick else {}
    publish(measure, json, names=method, backbone=backbone, device=device, batch=batch, **effort)


def bench_relaxation(
    *,
    device: Where = "auto",
    seeds: Seeds = 3,
    passes: Annotated[int, "passes over each task's images", at_least(1)] = 3,
    lr: Annotated[float, "learning rate"] = 2e-3,
    json: Json = None,
) -> None:
    """measure what training A gains, at equal drift of the old features: `mambacl bench relaxation --seeds 1`

    docs/exact.md explains it. Takes about 4 minutes on two cores, one on an H200."""
    from mambacl.bench.relaxation import measure
    from mambacl.bench.result import publish

    publish(measure, json, device=device, seeds=seeds, passes=passes, lr=lr)
