"""`mambacl bench against`: compares the scan that a user calls with other implementations, in one process.

Every system's results are first compared with float64 (`agreement`). Those that agree are timed in turn.
"""

import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambacl.bench.agreement import Exact, Verdict, compare, exact, results
from mambacl.bench.models import free_memory
from mambacl.bench.options import check_at_least_one, check_writable, shape_named
from mambacl.bench.peers import OURS, PEERS, Call, Peer
from mambacl.bench.result import Result, Row, header, machine_line, save, text
from mambacl.bench.shapes import CPU_SHAPES, GPU_SHAPES, Problem, Shape, make_problem
from mambacl.bench.timing import Clock
from mambacl.data.image_cache import free_bytes
from mambacl.training.build import pick_device

SECONDS = 10.0  # approximate time for the rounds of a shape
HIDDEN = ("shape", "size")  # these are in the title
FORWARD, BOTH = "forward", "forward_and_backward"
NOTES = (
    "What is timed: the scan with D, delta's bias, softplus and, without groups, the gate z, of (b, d, l) tensors. "
    "forward: without gradients. forward and backward: with the gradients of all inputs.",
    "Median and best of at most {rounds} rounds with all systems. theirs / ours: ratio of the medians.",
    "worst / bound: the largest error of the output and of all gradients, compared with float64, divided by what "
    "rounding allows. A system above 1 computes something else and is not timed.",
)
CPU_NOTE = "Threads of each system: {threads}; the loop in C always has one."
GPU_NOTE = "GPU time, by events around queued calls. peak: memory of forward and backward, including inputs."


@dataclass
class Comparison:
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """what disagreed or failed, and for which shape"""


def compare_all(
    clock: Clock,
    shapes: Mapping[str, Shape],
    dtypes: Sequence[str],
    threads: int,
    found: Comparison,
    peers: Sequence[Peer] = PEERS,
) -> None:
    """Adds the rows of all shapes and types to `found`."""
    installed = [OURS, *(peer for peer in peers if peer.installed())]
    for name, shape in shapes.items():
        for dtype in dtypes:
            problem = make_problem(shape, clock.device, getattr(torch, dtype))
            found.rows += _compare_one(clock, name, problem, threads, installed, found.remarks)
            del problem
            free_memory()


def _compare_one(
    clock: Clock, name: str, problem: Problem, threads: int, peers: Sequence[Peer], remarks: list[str]
) -> list[Row]:
    dtype = str(problem.dtype).removeprefix("torch.")
    wanted = exact(problem, _graph_memory(clock.device))
    calls: dict[str, Call] = {}
    rows: dict[str, Row] = {}
    for peer in peers:
        if not peer.suits(problem):
            continue
        row: Row = {"shape": name, "size": str(problem.shape), "inputs": dtype, "system": peer.name}
        rows[peer.name] = row
        try:
            call = peer.prepare(problem, threads)
            verdict = judged(call, problem, wanted, peer.differentiable)
        except Exception as error:  # show the failure of another system, and continue
            row["agrees"] = False
            remarks.append(f"{name}, {dtype}: {peer.name} failed: {first_line(error)}")
            continue
        row |= {"agrees": verdict.agrees, "worst_/_bound": verdict.worst}
        if verdict.agrees:
            calls[peer.name] = call
        else:
            remarks.append(f"{name}, {dtype}: {peer.name} disagrees ({verdict}) and is not timed")
    del wanted
    free_memory()
    trained = {peer.name for peer in peers if peer.differentiable and peer.name in calls}
    forward = {who: partial(_without_gradients, call) for who, call in calls.items()}
    both = {who: partial(_with_gradients, call, problem) for who, call in calls.items() if who in trained}
    _enter(rows, FORWARD, clock.in_rounds(forward))
    _enter(rows, BOTH, clock.in_rounds(both))
    if clock.device.type == "cuda":
        for who, train in both.items():
            rows[who]["peak_MiB"] = _peak(train, problem) / 2**20
    return list(rows.values())


def judged(call: Call, problem: Problem, wanted: dict[str, Exact], differentiable: bool) -> Verdict:
    return compare(results(call, problem, differentiable), wanted)


@torch.no_grad()
def _without_gradients(call: Call) -> Tensor:
    return call()


def _with_gradients(call: Call, problem: Problem) -> object:
    return torch.autograd.grad(call(), list(problem.inputs.values()), problem.dy)


def _enter(rows: dict[str, Row], what: str, times: Mapping[str, list[float]]) -> None:
    """Enters times in ms, and the ratio of the others' to ours."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in times.items():
        rows[name] |= {f"{what}_ms": 1e3 * medians[name], f"{what}_best_ms": 1e3 * min(seconds)}
        if name != OURS.name and OURS.name in medians:
            rows[name][f"theirs_/_ours_{what}"] = medians[name] / medians[OURS.name]


def _peak(call: Callable[[], object], problem: Problem) -> int:
    """The peak memory of a call in bytes, including the inputs."""
    free_memory()
    torch.cuda.synchronize(problem.device)
    before = torch.cuda.memory_allocated(problem.device)
    torch.cuda.reset_peak_memory_stats(problem.device)
    call()
    torch.cuda.synchronize(problem.device)
    return torch.cuda.max_memory_allocated(problem.device) - before + problem.bytes()


def _graph_memory(device: torch.device) -> int:
    return free_bytes(device) // 4 if device.type == "cuda" else 1 << 29


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__


def as_result(found: Comparison, device: torch.device, threads: int, rounds: int) -> Result:
    """A table of the rows, with notes."""
    notes = [NOTES[0], NOTES[1].format(rounds=rounds), NOTES[2]]
    notes.append(GPU_NOTE if device.type == "cuda" else CPU_NOTE.format(threads=threads))
    return Result(f"Against others on {device.type}", found.rows, notes, left_out=HIDDEN)


def availability(device: torch.device, peers: Sequence[Peer] = PEERS) -> dict[str, Any]:
    """For each system that runs on this kind of device: its version, or how to install it."""
    some = [peer for peer in peers if device.type in peer.devices]
    return {peer.name: peer.version() if peer.installed() else f"not installed: {peer.install}" for peer in some}


def against(
    device: str = "auto",
    shapes: Sequence[str] = (),
    json_file: Path | None = None,
    threads: int = 1,
    rounds: int = 15,
    commit: str | None = None,
    show: Callable[[str], object] | None = None,
    peers: Sequence[Peer] = PEERS,
) -> dict[str, Any]:
    """Compares the systems and shows tables. Returns the contents of the JSON file. `commit` is for a package outside a
    git checkout."""
    show = show or partial(print, flush=True)
    where = pick_device(device)
    on_gpu = where.type == "cuda"
    chosen = {name: shape_named(name) for name in shapes or (GPU_SHAPES if on_gpu else CPU_SHAPES)}
    check_at_least_one(threads=threads, rounds=rounds)
    check_writable(json_file)
    dtypes = ("float32", "bfloat16") if on_gpu else ("float32",)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        options = {"device": device, "shapes": list(chosen), "threads": threads, "rounds": rounds}
        made = header(where, options)
        made["commit"] = commit or made["commit"]
        made["peers"] = availability(where, peers)
        show(machine_line(where))
        show("\n".join(f"{name}: {words}" for name, words in made["peers"].items()) + "\n")
        clock = Clock(where, rounds, SECONDS)
        found = Comparison()
        for name, shape in chosen.items():
            compare_all(clock, {name: shape}, dtypes, threads, found, peers)
            show(text(Result(f"{name}: {shape}", [row for row in found.rows if row["shape"] == name], left_out=HIDDEN)))
            made |= as_result(found, where, threads, rounds).as_dict() | {"remarks": found.remarks}
            save(made, json_file)  # after each shape, so that an interruption loses no results
    finally:
        torch.set_num_threads(before)
    notes = [textwrap.fill(note, 120, break_on_hyphens=False) for note in (*made["notes"], *found.remarks)]
    show("\n".join(notes))
    return made
