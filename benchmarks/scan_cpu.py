"""Forward and backward of the selective scan on the CPU: transformers' slow path and our backends, in one run.

    python benchmarks/scan_cpu.py [--threads N] [--rounds N] [--json PATH]

The C++ backend runs once per instruction set of this machine. Rounds are interleaved (each backend once per round), so
that a busy moment of the machine hits all of them; the figures are medians. Outputs and gradients are compared before
anything is timed.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambacl.ops import cpu
from mambacl.scan import available_backends, selective_scan

Inputs = dict[str, Tensor]
Scan = Callable[[Inputs], Tensor]
TRANSFORMERS = "transformers"
TOLERANCE = 1e-4  # relative to the largest value, in float32


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    inputs = random_inputs(options.batch, options.channels, options.length, options.states)
    scans = implementations()
    check_agreement(scans, inputs)
    seconds = measure(scans, inputs, options.rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(table(medians, options))
    if options.json is not None:
        options.json.write_text(json.dumps(record(medians, seconds, options), indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the selective scan's forward and backward on the CPU.")
    parser.add_argument("--batch", type=int, default=2, help="images (2)")
    parser.add_argument("--channels", type=int, default=768, help="channels of the SSM (768)")
    parser.add_argument("--length", type=int, default=197, help="tokens (197)")
    parser.add_argument("--states", type=int, default=16, help="states per channel (16)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (15)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (all cores)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    return parser.parse_args()


def random_inputs(batch: int, channels: int, length: int, states: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {
        "u": normal(batch, channels, length),
        "delta": normal(batch, channels, length) * 0.5,
        "A": -torch.arange(1.0, states + 1).repeat(channels, 1),
        "B": normal(batch, states, length),
        "C": normal(batch, states, length),
        "D": torch.ones(channels),
        "z": normal(batch, channels, length),
        "delta_bias": normal(channels) - 3.0,  # steps of about 0.05, as in a trained model
    }
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def implementations() -> dict[str, Scan]:
    """What can run here, by name; what cannot is said on standard error with the remedy."""
    scans: dict[str, Scan] = {}
    try:
        from transformers.models.mamba.modeling_mamba import mamba_selective_scan
    except ImportError:
        tell("transformers is missing, so there is nothing to compare with: pip install 'mambacl[bench]'")
    else:
        scans[TRANSFORMERS] = slow_path(mamba_selective_scan)
    scans |= {backend: our_backend(backend) for backend in ("reference", "torch")}
    if "native" in available_backends():
        scans |= {f"native {name}": our_backend("native", name) for name in cpu.instruction_sets()}
    else:
        tell("native is not built: reinstall mambacl from its wheel, or where a C++ compiler is present")
    return scans


def slow_path(function: Callable[..., Tensor]) -> Scan:
    """transformers' function takes the arguments of ours, in the same order and shapes."""
    return lambda inputs: function(*inputs.values(), delta_softplus=True)


def our_backend(backend: str, instruction_set: str = "") -> Scan:
    """An empty name leaves the choice of the instruction set to the library. It holds for the backward too, which runs
    before the next scan is called."""
    function: Callable[..., Any] = selective_scan

    def scan(inputs: Inputs) -> Tensor:
        os.environ[cpu.ENVIRONMENT_VARIABLE] = instruction_set
        return function(*inputs.values(), delta_softplus=True, backend=backend)

    return scan


def forward_and_backward(scan: Scan, inputs: Inputs) -> list[Tensor]:
    """The output, and the gradient of every input."""
    output = scan(inputs)
    return [output, *torch.autograd.grad(output.sum(), list(inputs.values()))]


def check_agreement(scans: dict[str, Scan], inputs: Inputs) -> None:
    """Also the first, untimed run of each."""
    names = ["the output", *(f"the gradient of {name}" for name in inputs)]
    expected = forward_and_backward(scans["reference"], inputs)
    for backend, scan in scans.items():
        for name, actual, wanted in zip(names, forward_and_backward(scan, inputs), expected, strict=True):
            error = ((actual - wanted).abs().max() / wanted.abs().max()).item()
            if not error < TOLERANCE:
                sys.exit(f"{backend} disagrees with the reference: {name} is off by {error:.1e}")


def measure(scans: dict[str, Scan], inputs: Inputs, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in scans}
    for _ in range(rounds):
        for name, scan in scans.items():
            started = time.perf_counter()
            forward_and_backward(scan, inputs)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def table(medians: dict[str, float], options: argparse.Namespace) -> str:
    size = f"B {options.batch}, D {options.channels}, L {options.length}, N {options.states}"
    lines = [
        f"Selective scan, forward + backward, float32, {size}",
        f"threads: {options.threads}, median of {options.rounds} interleaved rounds, PyTorch {torch.__version__}",
        "",
        f"{'':18}{'ms':>10}{'times as fast as transformers':>34}",
    ]
    for name, median in medians.items():
        ratio = f"{medians[TRANSFORMERS] / median:.2f}" if TRANSFORMERS in medians else "-"
        lines.append(f"{name:18}{median * 1e3:>10.2f}{ratio:>34}")
    return "\n".join(lines)


def record(
    medians: dict[str, float], seconds: dict[str, list[float]], options: argparse.Namespace
) -> dict[str, object]:
    sizes = {name: getattr(options, name) for name in ("batch", "channels", "length", "states", "threads", "rounds")}
    theirs = medians.get(TRANSFORMERS)
    return {
        **sizes,
        "median_seconds": medians,
        "speedup_over_transformers": {name: theirs / value for name, value in medians.items()} if theirs else None,
        "seconds": seconds,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": platform.machine(),
    }


def tell(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    main()
