"""Part `freed`: answers on a CPU, if the process keeps the memory that it frees and if it does not (`mambacl.heap`)."""

import json
import os
import subprocess
import sys
from statistics import median

from mambacl.bench.result import Result, Row
from mambacl.bench.sizes import Case, Sizes
from mambacl.bench.timing import Clock
from mambacl.heap import OWN_CHOICES

ROUNDS = 3  # processes of each way; one if a quick answer is enough
QUICK = 1.0  # seconds
# Each way has a process of its own, because a choice for the heap cannot be taken back.
WORKER = """
import json
import resource
import sys
import time

import torch

from mambacl.backbones import create_model
from mambacl.heap import keep_freed_memory

name, options, pixels, way, batch, seconds = json.loads(sys.argv[1])
if way == "kept":
    keep_freed_memory()
model = create_model(name, num_classes=0, **options).eval()
size = pixels or model.default_cfg["input_size"][-1]
images = torch.randn(batch, 3, size, size)
with torch.no_grad():
    model(images)
    calls, before, start = 0, resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    while calls < 2 or time.perf_counter() - start < seconds:
        model(images)
        calls += 1
taken, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
lines = dict(line.split(":") for line in open("/proc/self/status"))  # getrusage would count the parent's memory
peak = 1024 * int(lines["VmHWM"].split()[0])
print(json.dumps([calls * batch / taken, (after.ru_minflt - before.ru_minflt) // calls, peak]))
"""
NOTES = (
    "The backbone's forward pass in float32 without gradients; the median of {rounds} process(es) each, in turns. "
    "returned: freed memory goes back to the system, as the C library does by default; kept: it stays, as in mambacl's "
    "commands. Page faults are those of one pass.",
)


def measure(clock: Clock, sizes: Sizes) -> Result:
    rows: list[Row] = []
    if clock.device.type == "cpu" and sys.platform == "linux":
        rows = [_row(case, batch, clock.budget) for case in sizes.inference for batch in case.batches]
    return Result("Freed memory on Linux's CPUs", rows, [note.format(rounds=rounds_in(clock.budget)) for note in NOTES])


def rounds_in(seconds: float) -> int:
    return 1 if seconds < QUICK else ROUNDS


def _row(case: Case, batch: int, seconds: float) -> Row:
    ways = ("returned", "kept")
    found = [{way: _run(case, way, batch, seconds) for way in ways} for _ in range(rounds_in(seconds))]
    row: Row = {"model": case.model, "batch": batch}
    speeds = {way: median(one[way][0] for one in found) for way in ways}
    row |= {f"{way}_images_per_second": speed for way, speed in speeds.items()}
    row["ratio"] = speeds["kept"] / speeds["returned"]
    row |= {f"{way}_page_faults": found[0][way][1] for way in ways}
    return row | {f"{way}_peak_bytes": found[0][way][2] for way in ways}


def _run(case: Case, way: str, batch: int, seconds: float) -> tuple[float, int, int]:
    environment = {name: value for name, value in os.environ.items() if name not in OWN_CHOICES}
    given = json.dumps([case.model, dict(case.options), case.pixels, way, batch, seconds])
    words = [sys.executable, "-c", WORKER, given]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    speed, faults, peak = json.loads(done.stdout)
    return speed, faults, peak
