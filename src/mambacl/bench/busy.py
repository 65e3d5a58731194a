"""`mambacl bench busy`: times a training step on the CPU, alone and while another program uses all cores.

OpenMP's threads wait for each other by spinning. If other programs use the cores, too, spinning takes a core from the
thread that is waited for. OpenMP reads its settings only at its start, so each way of waiting has its own process:

- `spinning`: OpenMP's default
- a number: GOMP_SPINCOUNT; the command line sets 2000
- `passive`: OMP_WAIT_POLICY=passive, which the command line sets if the machine is busy when it starts
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from mambacl.bench.result import Result, Row

Process = subprocess.Popen[str]
SPINNING = "spinning"
WAYS: dict[str, dict[str, str]] = {
    SPINNING: {},
    **{spins: {"GOMP_SPINCOUNT": spins} for spins in ("2000", "500", "200")},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
OTHER = "import torch; a = torch.randn(1500, 1500)\nwhile True: a @ a"
START_SECONDS = 3  # until the other programs are running
NOTES = (
    "A step of the nano model with {images} images: the median over {rounds} round(s), in each of which every way runs "
    "for at least {seconds:g} s. beside: with {others} other program(s) running, each with one thread per core.",
)


@dataclass(frozen=True)
class Effort:
    rounds: int
    seconds: float
    """time for the steps of each turn; at least one step"""
    images: int = 32
    ways: tuple[str, ...] = tuple(WAYS)


SHORT = Effort(1, 1.0, images=16, ways=(SPINNING, "2000", "passive"))
LONG = Effort(3, 5.0)


def busy(long: bool, others: int) -> Result:
    return measure(LONG if long else SHORT, others)


def measure(effort: Effort, others: int = 1) -> Result:
    with ExitStack() as stack:
        workers = {way: start_worker(stack, WAYS[way], effort.images) for way in effort.ways}
        for worker in workers.values():
            step_seconds(worker, 0)  # the first step takes longer
        alone = _turns(workers, effort)
        for _ in range(others):
            start(stack, [sys.executable, "-c", OTHER], {})
        time.sleep(START_SECONDS)
        beside = _turns(workers, effort)
    words = {"images": effort.images, "rounds": effort.rounds, "seconds": effort.seconds, "others": others}
    return Result("A training step on a busy CPU", rows(alone, beside), [note.format(**words) for note in NOTES])


def rows(alone: Mapping[str, float], beside: Mapping[str, float]) -> list[Row]:
    return [
        {
            "threads_wait": way,
            "alone_ms": 1e3 * alone[way],
            "beside_ms": 1e3 * beside[way],
            "spinning_/_this_beside": beside[SPINNING] / beside[way],
        }
        for way in alone
    ]


def _turns(workers: Mapping[str, Process], effort: Effort) -> dict[str, float]:
    """Seconds per step. Every worker has a turn in every round, so that a busy moment affects all of them."""
    rounds = [
        {way: step_seconds(worker, effort.seconds) for way, worker in workers.items()} for _ in range(effort.rounds)
    ]
    return {way: statistics.median(each[way] for each in rounds) for way in workers}


def start(stack: ExitStack, command: list[str], variables: Mapping[str, str]) -> Process:
    """A process that ends with the `with` block of the stack."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    process = stack.enter_context(
        subprocess.Popen(command, env={**kept, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    )
    stack.callback(process.kill)
    return process


def start_worker(stack: ExitStack, variables: Mapping[str, str], images: int) -> Process:
    """A process that takes training steps on request and sleeps in between."""
    return start(stack, [sys.executable, "-m", "mambacl.bench.busy", str(images)], variables)


def step_seconds(worker: Process, seconds: float) -> float:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(f"{seconds}\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise RuntimeError(f"The measuring process ended with code {worker.wait()}.")
    return float(answer)


def answer_requests(images: int) -> None:
    """The worker's side: reads a line with a number of seconds, prints the seconds per step."""
    from mambacl.backbones import create_model

    torch.manual_seed(0)
    model = create_model("defocus_mamba_nano", num_classes=10)
    optimizer = torch.optim.Adam(model.parameters())
    batch, labels = torch.randn(images, 3, 32, 32), torch.arange(images) % 10

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch), labels).backward()
        optimizer.step()

    for line in sys.stdin:
        started, steps = time.perf_counter(), 0
        while steps == 0 or time.perf_counter() - started < float(line):
            step()
            steps += 1
        print((time.perf_counter() - started) / steps, flush=True)


if __name__ == "__main__":
    answer_requests(int(sys.argv[1]))
