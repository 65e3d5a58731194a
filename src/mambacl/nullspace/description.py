"""Describes a null space in words: what is trained, what is protected, and from which feature."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from mambacl.nullspace.projectors import Decomposition
from mambacl.nullspace.rounding import in_words
from mambacl.nullspace.selection import Selection
from mambacl.nullspace.settings import KINDS, Setting

FEW, MOST = 0.05, 2 / 3  # a rule that protects a smaller share of the directions and of the energy hardly protects
EVERYDAY = "energy:0.99"  # the rule that messages suggest
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
            by = "its leading directions" if setting.projector == "weights" else rule.feature
            what = "trained freely" if not rule.projected else f"protected by {by}"
            lines.append(f"  {kind:8} {size:>12,} values in {len(parts)} parts, {what if rule.trains else 'fixed'}")
    if others:
        size = sum(named[name].numel() for name in others)
        tuned += size if setting.others != "fixed" else 0
        lines.append(f"  {'others':8} {size:>12,} values in {len(others)} tensors, {OTHERS[setting.others]}")
    total = sum(parameter.numel() for parameter in named.values())
    rest = "; the rest of the model is left alone" if tuned < total else ""
    return "\n".join([*lines, f"  trains {tuned:,} of {total:,} values{rest}"])


def in_one_line(description: str) -> str:
    """The first and the last line of a description: how many SSMs, how they are protected, how much trains."""
    first, *_, last = description.split("\n")
    return f"{first}; {last.strip()}"


def _how(setting: Setting) -> str:
    """The main options, and those that differ from the defaults."""
    how = f"eta {setting.eta}, rank by {setting.rank}"
    if setting.projector == "recursive":
        how = f"recursive projectors of gradients, alpha down to {setting.alpha}"
    elif setting.projector != "null-space":
        how += f", projector {setting.projector}"
    if setting.acts_on == "gradient" and setting.projector != "recursive":
        how += ", gradients projected"
    if setting.rank == "corner" and setting.projector == "null-space":
        how += f" (on real images it protects few directions, {EVERYDAY} more)"
    if setting.relax > 0:
        how += f", A relaxed by {setting.relax}"
    for name in ("rank_over", "storage", "covariances", "projectors", "keep_tasks"):
        if getattr(setting, name) != getattr(Setting(), name):
            how += f", {name} {str(getattr(setting, name)).lower()}"
            how += f" ({cost})" if name == "storage" and (cost := in_words(setting.storage)) else ""
    if setting.scaling == "frobenius":
        how += ", projectors divided by their norm, so that most of their effect is a smaller step"
    return how


@dataclass(frozen=True)
class Protected:
    """What a rank rule protects, as medians over the features: directions, of how many, and their share of the energy
    (of the spectrum's sum)."""

    rank: str
    directions: int
    size: int
    energy: float

    @property
    def little(self) -> bool:
        """Whether later tasks are hardly limited: the features' directions and most of their energy are free."""
        return self.directions < FEW * self.size and self.energy < MOST

    def describe(self, tasks: int) -> str:
        """One line after a task, with advice if the rank rule leaves nearly nothing free."""
        hint = ""
        if self.directions > 0.98 * self.size:
            other = "a smaller share" if self.rank.startswith("energy") else EVERYDAY
            hint = f"; {self.rank} leaves nearly nothing free, {other} would leave more to learn with"
        return f"protected after task {tasks}: {self.directions} of {self.size} directions (median){hint}"

    def warning(self) -> str:
        return (
            f"The rank rule {self.rank} protects {self.directions} of {self.size} directions and leaves "
            f"{1 - self.energy:.0%} of the features' energy free (medians), so it hardly limits later tasks; "
            f"--nullspace.rank {EVERYDAY} leaves 1%."
        )


def what_is_protected(rank: str, decompositions: Iterable[Decomposition]) -> Protected | None:
    """None if nothing is projected."""
    found = list(decompositions)
    if not found:
        return None
    sizes = sorted((one.protected, one.spectrum.numel()) for one in found)
    return Protected(rank, *sizes[len(sizes) // 2], median(one.protected_energy for one in found))
