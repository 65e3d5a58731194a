"""Prints a plan of the null space's cost."""

from mambacl.nullspace.plan import Plan, paper_projector_bytes, paper_values
from mambacl.nullspace.rounding import in_words


def plan_text(plan: Plan, backbone: str, size: int, protected: float, tasks: int, storage: str, device: str) -> str:
    places = plan.by_place()
    names = {"device": "on the device", "cpu": "in memory", "disk": "on disk"}
    share = plan.projector_bytes / max(1, plan.dense_bytes)
    matrices = ", ".join(f"{count} of {side} x {side}" for side, count in sorted(plan.matrices.items()))
    decomposition = f"Decomposition: {matrices} per task"
    if plan.decomposition_seconds is not None:
        seconds = plan.decomposition_seconds
        decomposition += f"; {seconds:.1f} s per task on {device}, {tasks * seconds:.0f} s for {tasks} tasks"
    cost = in_words(storage)
    lines = [
        f"{backbone} at {size} px: {plan.blocks} selective SSMs, D {_joined(plan.widths)}, L {_joined(plan.tokens)}",
        f"{protected:.0%} of the directions protected, projectors in {storage}" + (f" ({cost})" if cost else ""),
        "",
        "Memory between tasks",
        *(f"  {names[place]:15} {bytes_text(count):>10}" for place, count in places.items()),
        f"  projectors      {bytes_text(plan.projector_bytes):>10} {names[plan.projectors]}, "
        f"{share:.2f} of dense matrices ({bytes_text(plan.dense_bytes)})",
        f"  covariances     {bytes_text(plan.covariance_bytes):>10} {names[plan.covariances]}, float64",
        "In addition",
        f"  per step        {bytes_text(plan.step_bytes):>10} on the device",
        f"  gathering       {bytes_text(plan.gathering_bytes):>10} on the device, one task's covariances",
        f"  run folder      {bytes_text(2 * plan.file_bytes):>10} on disk, the null space after the last two tasks",
        "",
        f"Projection per step: {plan.projection_flops / 1e9:.2f} GFLOP ({plan.dense_flops / 1e9:.2f} if dense)",
        decomposition,
    ]
    if len(plan.widths) == len(plan.tokens) == 1:
        S, D, L = plan.blocks, plan.widths[0], plan.tokens[0]
        lines.append(
            f"The paper's count: 2 S (2 D^2 + L^2) = {paper_values(S, D, L) / 1e6:.2f} M values; "
            f"{paper_projector_bytes(S, D, L) / 1e9:.2f} GB of projectors in half precision"
        )
    return "\n".join(lines)


def bytes_text(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _joined(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
