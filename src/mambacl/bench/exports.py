"""`mambacl bench exports`: exported models in ONNX Runtime and OpenVINO beside ours, on the CPU.

Each model is exported with its scans in every form that `mambacl export` tries. A file whose scores differ from ours by
more than rounding is not timed. All others and our own model take turns in one process, so that a busy moment affects
all.
"""

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambacl.bench.busy import VARIABLES
from mambacl.bench.models import CLASSES, build
from mambacl.bench.others import Others
from mambacl.bench.peers import OURS
from mambacl.bench.result import Result, Row, check_writable, header, load, machine_line, quiet, save, shown, text
from mambacl.bench.sizes import Case
from mambacl.bench.timing import FEWEST, Clock
from mambacl.config import from_dict
from mambacl.data.transforms import Transforms
from mambacl.deploy.description import NO_WEIGHTS, Description
from mambacl.deploy.foreign import FORMATS
from mambacl.deploy.graph import Scores, exported
from mambacl.deploy.predictor import Predictor
from mambacl.deploy.shipping import compared
from mambacl.methods import METHODS, Task
from mambacl.reports.rendering import pipe_table
from mambacl.training.build import setup_of

KIND = "exports"  # of the JSON file
BATCHES, THREADS = (1, 32), (1, 2)
CASES = tuple(Case(name, BATCHES) for name in ("defocus_mamba_nano", "vim_nano", "vmamba_nano", "mambavision_nano"))
RUNTIMES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}
PACKAGES = ("onnxruntime", "openvino", "onnx", "onnxscript")
IMAGES = 8  # whose scores are compared
SECONDS = 12.0  # approximate time for the rounds of a batch size and number of threads
DISTURBED = 0.25  # cores of other programs beyond those that we leave free, from which on a round is repeated
ROW_SECONDS = 0.1  # short calls are timed in rows of about this length
TRIES = 3  # times the rounds wanted, at most
FEATURES = (
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_tile",
    "asimd",
    "sve",
)
NOTES = (
    "What is timed: scores of normalised images, float32, random weights, separate heads, a file with a dynamic batch. "
    "theirs / ours: the median over rounds of their time divided by ours in that round; above 1, mambacl is faster.",
    "form: of the scan; loop is ONNX's Scan. others: cores that other programs used during the rounds, the median; a "
    "round with more than {disturbed:g} beyond the cores that we leave free is repeated if possible.",
)

System = tuple[str, str]  # its name, and the form of the scan; ours has no form
OWN: System = (OURS.name, "")


def bench_exports(
    cases: Sequence[Case] = CASES,
    forms: Sequence[str] = FORMATS["onnx"].forms,
    rounds: int = 9,
    json_file: Path | None = None,
) -> dict[str, Any]:
    """Measures and shows a table per model. Returns the contents of the JSON file."""
    check_writable(json_file)
    for name in RUNTIMES:
        FORMATS[name].check_installed()
    where = torch.device("cpu")
    options = {"models": [case.model for case in cases], "forms": list(forms), "rounds": rounds}
    made: dict[str, Any] = {"kind": KIND, **header(where, options)}
    made["machine"] = machine()
    made["environment"] = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    made["versions"] |= {package: version(package) for package in PACKAGES}
    print(machine_line(where), flush=True)
    notes = [note.format(disturbed=DISTURBED) for note in NOTES]
    found = Result("Exported models on the CPU", notes=notes)
    remarks: list[str] = []
    for case in cases:
        with quiet():
            rows = measure(case, forms, rounds, remarks)
        print(text(Result(case.model, rows, left_out=("model",))), flush=True)
        found.rows += rows
        made |= found.as_dict() | {"remarks": remarks}
        made["machine"]["load_at_the_end"] = load()
        save(made, json_file)  # after each model, so that an interruption loses no results
    print("\n".join((*notes, *remarks)), flush=True)
    return made


def machine() -> dict[str, Any]:
    """What matters of the CPU for these times."""
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        words = set()
    return {
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "features": [feature for feature in FEATURES if feature in words],
        "cores": os.cpu_count(),
        "load_at_the_start": load(),
    }


def measure(case: Case, forms: Sequence[str], rounds: int, remarks: list[str]) -> list[Row]:
    """The rows of a model."""
    predictor = untrained(case)
    module, size = Scores(predictor, preprocessing=False), predictor.transforms.size
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (max(IMAGES, *case.batches), 3, size, size), generator=draw, dtype=torch.uint8)
    rows: list[Row] = []
    before = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        files = {form: Path(folder) / f"{form}.onnx" for form in forms}
        for form, file in files.items():
            FORMATS["onnx"].write(exported(module, form), file, {})
        try:
            for threads in THREADS:
                torch.set_num_threads(threads)
                answers = {}
                for form, file in files.items():
                    for name, system in RUNTIMES.items():
                        answer = FORMATS[name].open(file, threads)
                        difference, allowed, _ = compared(predictor, module, answer, images[:IMAGES])
                        if difference <= allowed:
                            answers[system, form] = answer
                        else:
                            remarks.append(f"{case.model}, {form}: {system} disagrees by {difference:.2g}, not timed")
                for batch in case.batches:
                    given = module.inputs(images[:batch])
                    calls = {key: partial(answer, given) for key, answer in answers.items()}
                    rows += timed(case.model, threads, batch, partial(predictor.scores, given), calls, rounds)
        finally:
            torch.set_num_threads(before)
    return rows


def untrained(case: Case) -> Predictor:
    """A model with random weights and heads."""
    config = from_dict(
        {"method": "frozen", "backbone": case.model, "backbone_options": dict(case.options), "pretrained": False,
         "precision": "float32"}
    )  # fmt: skip
    device = torch.device("cpu")
    model: Any = build(case, device)
    method = METHODS.get(config.method)(model, setup_of(config))
    method.start_task(Task(0, CLASSES, 0, seed=0))
    transforms = Transforms.of_model(config.stream.transforms, model)
    names = [str(label) for label in range(CLASSES)]
    return Predictor(method, transforms, Description(names, config, [], NO_WEIGHTS), device)


def timed(
    model: str,
    threads: int,
    batch: int,
    ours: Callable[[], Tensor],
    calls: Mapping[System, Callable[[], Tensor]],
    rounds: int,
) -> list[Row]:
    everyone = {OWN: ours, **calls}
    seconds, others = quiet_rounds(everyone, rounds, free=max(0, (os.cpu_count() or 1) - threads) + DISTURBED)
    rows: list[Row] = []
    for (system, form), own in seconds.items():
        ratios = [theirs / mine for theirs, mine in zip(own, seconds[OWN], strict=True)]
        row: Row = {"model": model, "threads": threads, "batch": batch, "system": system, "form": form}
        row |= {"images_per_second": batch / statistics.median(own), "theirs_/_ours": statistics.median(ratios)}
        rows.append(row | {"rounds": len(own), "others": others})
    rows[0]["theirs_/_ours"] = None
    return rows


def quiet_rounds(
    calls: Mapping[System, Callable[[], object]], rounds: int, free: float
) -> tuple[dict[System, list[float]], float | None]:
    """Seconds per call in each round, and how many cores other programs used. Rounds in which these were more than
    `free` are left out, unless there would be too few."""
    clock = Clock(torch.device("cpu"), rounds, SECONDS)
    counts = {name: _in_a_row(clock, call) for name, call in calls.items()}
    others, wanted = Others(), 0
    found: list[tuple[float | None, dict[System, float]]] = []
    while len(found) < TRIES * max(wanted, FEWEST):
        seconds = {name: clock.once(call, counts[name]) for name, call in calls.items()}
        found.append((others.cores(), seconds))
        wanted = wanted or 1 + clock.more(sum(seconds[name] * count for name, count in counts.items()))
        calm = [(cores, seconds) for cores, seconds in found if (cores or 0) <= free]
        if len(calm) >= wanted:
            break
    kept = calm if len(calm) >= FEWEST else found
    used = [cores for cores, _ in kept if cores is not None]
    return (
        {name: [seconds[name] for _, seconds in kept] for name in calls},
        statistics.median(used) if used else None,
    )


def _in_a_row(clock: Clock, call: Callable[[], object]) -> int:
    """How many calls to time at once, after two to warm up."""
    clock.once(call)
    return max(1, int(ROW_SECONDS / clock.once(call)))


# The page


def markdown(record: Mapping[str, Any]) -> str:
    """A line with command, commit, machine and date; a table with a row per model, threads and batch."""
    rows: Sequence[Row] = record["rows"]
    systems = list(dict.fromkeys((row["system"], row["form"]) for row in rows if row["system"] != OURS.name))
    cases: dict[tuple[str, int, int], dict[System, Row]] = {}
    for row in rows:
        key = str(row["model"]), row["threads"], row["batch"]
        cases.setdefault(key, {})[row["system"], row["form"]] = row
    lines: list[list[str]] = []
    before = ""
    for (model, threads, batch), found in cases.items():
        title, before = "" if model == before else f"`{model}`", model
        ratios = [shown(found[system]["theirs_/_ours"]) if system in found else "disagrees" for system in systems]
        ours = shown(round(found[OWN]["images_per_second"]))
        lines.append([title, str(threads), str(batch), str(ours), *map(str, ratios)])
    head = ["model", "threads", "batch", f"{OURS.name}, images/s", *(" ".join(system) for system in systems)]
    return f"{_head(record)}\n\n{pipe_table(head, lines)}"


def _head(record: Mapping[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    cores = machine["cores"]
    busiest = max((row["others"] or 0) - max(0, cores - row["threads"]) for row in record["rows"])
    words = ["`mambacl bench exports`", *([f"commit {record['commit']}"] if record.get("commit") else [])]
    words.append(f"{cores} cores with {machine['vectors']}")
    words += [f"while other programs took up to {busiest:.1f} cores from these"] if busiest > DISTURBED else []
    words.append(
        f"PyTorch {versions['torch']}, ONNX Runtime {versions['onnxruntime']}, OpenVINO {versions['openvino']}"
    )
    return "; ".join([*words, record["date"][:10]]) + "."
