"""Describes a null space in words: what is trained, what is protected, and from which feature."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from mambacl.nullspace.projectors import Decomposition
from mambacl.nullspace.selection import Selection
from mambacl.nullspace.settings import KINDS, Setting

OTHERS = {"first-task": "trained in the first task, then fixed", "free": "trained freely", "fixed": "fixed"}


def describe(setting: Setting, selection: Selection, named: Mapping[str, Tensor]) -> str:
    """One line per kind. `named`: the model's parameters."""
    blocks, others = selection.blocks, selection.others
    counts = {"selective SSM": sum(block.selective for block in blocks)}
    counts["plain layer"] = len(blocks) - counts["selective SSM"]
    found = [f"{count} {word}{'' if count == 1 else 's'}" for word, count in counts.items() if count]
    lines = [f"{' and '.join(found)}; {_how(setting) if selection.protections else 'nothing is protected'}"]
    tuned = 0
    for kind in KINDS:
        rule, parts = setting.rule(kind), [part for _, part in selection.parts() if part.kind == kind]
        if parts:
            size = sum(part.of(named[part.parameter]).numel() for part in parts)
            tuned += size if rule.trains else 0
            what = "trained freely" if not rule.projected else f"protected by {rule.feature}"
            lines.append(f"  {kind:8} {size:>12,} values in {len(parts)} parts, {what if rule.trains else 'fixed'}")
    if others:
        size = sum(named[name].numel() for name in others)
        tuned += size if setting.others != "fixed" else 0
        lines.append(f"  {'others':8} {size:>12,} values in {len(others)} tensors, {OTHERS[setting.others]}")
    total = sum(parameter.numel() for parameter in named.values())
    rest = "; the rest of the model is left alone" if tuned < total else ""
    return "\n".join([*lines, f"  trains {tuned:,} of {total:,} values{rest}"])


def _how(setting: Setting) -> str:
    """The main options, and those that differ from the defaults."""
    how = f"eta {setting.eta}, rank by {setting.rank}"
    if setting.relax > 0:
        how += f", A relaxed by {setting.relax}"
    for name in ("rank_over", "storage", "covariances", "keep_tasks"):
        if getattr(setting, name) != getattr(Setting(), name):
            how += f", {name} {str(getattr(setting, name)).lower()}"
    if setting.scaling == "frobenius":
        how += ", projectors divided by their norm, so that most of their effect is a smaller step"
    return how


def what_is_protected(setting: Setting, tasks: int, decompositions: Iterable[Decomposition]) -> str:
    """One line after a task, with advice if the rank rule leaves nearly everything or nearly nothing free."""
    sizes = sorted((one.protected, one.spectrum.numel()) for one in decompositions)
    if not sizes:
        return ""
    count, size = sizes[len(sizes) // 2]
    hint = ""
    if "corner" in setting.rank and count < 0.1 * size:
        hint = "; the corner leaves nearly all free, energy:0.9 would protect more"
    elif count > 0.98 * size:
        other = "a smaller share" if setting.rank.startswith("energy") else "energy:0.99"
        hint = f"; {setting.rank} leaves nearly nothing free, {other} would leave more to learn with"
    return f"protected after task {tasks}: {count} of {size} directions (median){hint}"
