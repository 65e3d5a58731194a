"""`mambacl bench against`: compares the scan that a user calls with other implementations, in one process.

Every system's results are first compared with float64 (`agreement`). Those that agree are timed in turn.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mambacl.bench.agreement import compare, exact, results
from mambacl.bench.models import free_memory
from mambacl.bench.peers import OURS, PEERS, Call, Peer
from mambacl.bench.result import Result, Row, check_writable, header, machine_line, save, text, wrapped
from mambacl.bench.shapes import CPU_SHAPES, GPU_SHAPES, Problem, Shape, make_problem, shape_named
from mambacl.bench.timing import Clock
from mambacl.data.image_cache import free_bytes
from mambacl.registry import unknown
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
    dtype = problem.inputs_dtype
    wanted = exact(problem, free_bytes(clock.device) // 4 if clock.device.type == "cuda" else 1 << 29)
    calls: dict[str, Call] = {}
    rows: dict[str, Row] = {}
    for peer in peers:
        if not peer.suits(problem):
            continue
        row: Row = {"shape": name, "size": str(problem.shape), "inputs": dtype, "system": peer.name}
        rows[peer.name] = row
        try:
            call = peer.prepare(problem, threads)
            verdict = compare(results(call, problem, peer.differentiable), wanted)
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
    both = {who: lambda call=call: problem.gradients(call()) for who, call in calls.items() if who in trained}
    with torch.no_grad():
        _enter(rows, FORWARD, clock.in_rounds(calls))
    _enter(rows, BOTH, clock.in_rounds(both))
    if clock.device.type == "cuda":
        for who, train in both.items():
            free_memory()
            before, most = clock.memory(train)
            rows[who]["peak_MiB"] = (most - before + problem.bytes()) / 2**20
    return list(rows.values())


def _enter(rows: dict[str, Row], what: str, times: Mapping[str, list[float]]) -> None:
    """Enters times in ms, and the ratio of the others' to ours."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in times.items():
        rows[name] |= {f"{what}_ms": 1e3 * medians[name], f"{what}_best_ms": 1e3 * min(seconds)}
        if name != OURS.name and OURS.name in medians:
            rows[name][f"theirs_/_ours_{what}"] = medians[name] / medians[OURS.name]


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__


def availability(device: torch.device, peers: Sequence[Peer] = PEERS) -> dict[str, Any]:
    """For each system that runs on this kind of device: its version, or how to install it."""
    some = [peer for peer in peers if device.type in peer.devices]
    return {peer.name: peer.version() if peer.installed() else f"not installed: {peer.install}" for peer in some}


def peers_named(names: Sequence[str]) -> Sequence[Peer]:
    """The systems with these names; all if there are none."""
    known = {peer.name: peer for peer in PEERS}
    for name in names:
        if name not in known:
            raise unknown("system", name, known)
    return [known[name] for name in names] or PEERS


def against(
    device: str = "auto",
    shapes: Sequence[str] = (),
    json_file: Path | None = None,
    threads: int = 1,
    rounds: int = 15,
    commit: str | None = None,
    peers: Sequence[Peer] = PEERS,
) -> dict[str, Any]:
    """Compares the systems and shows tables. Returns the contents of the JSON file. `commit` is for a package outside a
    git checkout."""
    where = pick_device(device)
    on_gpu = where.type == "cuda"
    chosen = {name: shape_named(name) for name in shapes or (GPU_SHAPES if on_gpu else CPU_SHAPES)}
    check_writable(json_file)
    dtypes = ("float32", "bfloat16") if on_gpu else ("float32",)
    notes = [note.format(rounds=rounds, threads=threads) for note in (*NOTES, GPU_NOTE if on_gpu else CPU_NOTE)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        options = {"device": device, "shapes": list(chosen), "threads": threads, "rounds": rounds}
        made = header(where, options)
        made["commit"] = commit or made["commit"]
        made["peers"] = availability(where, peers)
        print(machine_line(where), flush=True)
        print("\n".join(f"{name}: {words}" for name, words in made["peers"].items()) + "\n", flush=True)
        clock = Clock(where, rounds, SECONDS)
        found = Comparison()
        for name, shape in chosen.items():
            compare_all(clock, {name: shape}, dtypes, threads, found, peers)
            rows = [row for row in found.rows if row["shape"] == name]
            print(text(Result(f"{name}: {shape}", rows, left_out=HIDDEN)), flush=True)
            result = Result(f"Against others on {where.type}", found.rows, notes)
            made |= result.as_dict() | {"remarks": found.remarks}
            save(made, json_file)  # after each shape, so that an interruption loses no results
    finally:
        torch.set_num_threads(before)
    print("\n".join(map(wrapped, (*made["notes"], *found.remarks))), flush=True)
    return made
