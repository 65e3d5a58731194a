"""The commands bench and bench against."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mambacl.config import Device
from mambacl.errors import UserError
from mambacl.options import at_least


def _parts() -> str:  # PyTorch is loaded for the names
    from mambacl.bench import PARTS

    return f"{', '.join(PARTS)}; all if none is named"


def _shapes() -> str:
    from mambacl.bench import SHAPES

    return f"scans to time: {', '.join(SHAPES)}; those that suit the device if left out"


Shapes = Annotated[tuple[str, ...], _shapes]
Json = Annotated[Path | None, "also write the figures there, with machine and date"]


def bench(
    *part: Annotated[str, _parts],
    device: Annotated[Device, "auto, cpu, cuda or cuda:N"] = "auto",
    json: Json = None,
    shape: Shapes = (),
    quick: Annotated[bool, "fewer sizes and repeats, to see that all is well"] = False,
    root: Annotated[Path | None, "folder with CIFAR-100's files, for the part run"] = None,
) -> int:
    """measure how fast this machine is, part by part: `mambacl bench scan step --device cpu`

    Times the parts at sizes that suit the device. Ratios are taken within one run."""
    if "against" in part:
        raise UserError("`against` goes by itself, before its options: mambacl bench against --help says which.")

    from mambacl.bench import bench as run_bench

    run_bench(part, device, json, shape, quick, root)
    return 0


def bench_against(
    *,
    device: Annotated[Device, "auto, cpu, cuda or cuda:N"] = "auto",
    shape: Shapes = (),
    threads: Annotated[int, "threads on the CPU", at_least(1)] = 1,
    rounds: Annotated[int, "most rounds per shape", at_least(1)] = 15,
    json: Json = None,
    commit: Annotated[str | None, "recorded in the JSON where the package does not run from a git checkout"] = None,
) -> int:
    """time the scan beside other implementations: `mambacl bench against --device cpu`

    Times the selective scan and whatever other implementations are installed, in one process and in turn, after
    checking that their results agree. Install them with pip install 'mambacl[bench]'."""
    from mambacl.bench.against import against

    against(device, shape, json, threads, rounds, commit)
    return 0
