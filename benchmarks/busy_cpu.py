"""A training step on the CPU, alone and beside another program that wants all cores, by how its threads wait.

    python benchmarks/busy_cpu.py [--rounds N] [--seconds S]

Each figure is the median over rounds, in which every way takes its turn in a process of its own. `spinning`: OpenMP's
own; a number: GOMP_SPINCOUNT, of which the command line sets 2000; `passive`: OMP_WAIT_POLICY=passive, which it sets
on a machine that is busy when it starts. `--others 3`: as many programs beside it, each with a thread for each core.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

WAYS: dict[str, dict[str, str]] = {
    "spinning": {},
    **{spins: {"GOMP_SPINCOUNT": spins} for spins in ("2000", "500", "200")},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
OTHER = "import torch; a = torch.randn(1500, 1500)\nwhile True: a @ a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of steps in each turn, at least one")
    parser.add_argument("--others", type=int, default=1)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(step_seconds(options.seconds))
        return
    alone = turns(options.rounds, options.seconds)
    others = [subprocess.Popen([sys.executable, "-c", OTHER], env=environment({})) for _ in range(options.others)]
    try:
        time.sleep(3)
        beside = turns(options.rounds, options.seconds)
    finally:
        for other in others:
            other.kill()
    print(f"{'threads wait':14} {'alone ms':>9} {'beside ms':>10} {'spinning / this, beside':>24}")
    for way in WAYS:
        ratio = beside["spinning"] / beside[way]
        print(f"{way:14} {1e3 * alone[way]:9.0f} {1e3 * beside[way]:10.0f} {ratio:24.1f}")


def turns(rounds: int, seconds: float) -> dict[str, float]:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, variables in WAYS.items():
            command = [sys.executable, __file__, "--measure", "--seconds", str(seconds)]
            done = subprocess.run(command, env=environment(variables), capture_output=True, text=True, check=True)
            times[way].append(float(done.stdout.split()[-1]))
    return {way: statistics.median(each) for way, each in times.items()}


def environment(variables: dict[str, str]) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    return {**kept, **variables}


def step_seconds(seconds: float) -> float:
    """Of a step of the nano model with 32 images."""
    import torch
    from torch.nn.functional import cross_entropy

    from mambacl import create_model

    torch.manual_seed(0)
    model = create_model("defocus_mamba_nano", num_classes=10)
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = torch.randn(32, 3, 32, 32), torch.arange(32) % 10

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    step()
    started, steps = time.perf_counter(), 0
    while steps == 0 or time.perf_counter() - started < seconds:
        step()
        steps += 1
    return (time.perf_counter() - started) / steps


if __name__ == "__main__":
    main()
