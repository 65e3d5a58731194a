"""What the null space does, as data: a `Setting` says it for each kind of parameter, and the named settings are
values of it.

The kinds are the paper's: W_delta, W_B, W_C, A and `out`, the linear layer after the SSM.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mambacl.errors import UserError
from mambacl.nullspace.ranks import parse_rule
from mambacl.registry import did_you_mean

KINDS = ("W_delta", "W_B", "W_C", "A", "out")

Feature = Literal["x", "delta", "delta-x", "delta-x-per-image", "out"]
FEATURES: dict[str, str] = {
    "x": "the SSM's input, tokens x D",
    "delta": "the step sizes, tokens x D",
    "delta-x": "delta X as in the paper: x x^T of each token, weighted by |delta|^2",
    "delta-x-per-image": "delta^T X of each image, D x D, as in the public code",
    "out": "the input of the linear layer after the SSM, tokens x D",
}


@dataclass(frozen=True)
class Rule:
    """What happens to one kind of parameter."""

    trains: bool = True
    """whether it is fine-tuned at all"""
    projected: bool = True
    """whether its update is projected"""
    feature: Feature = "x"
    """the feature whose null space the update is projected onto"""


@dataclass(frozen=True)
class Setting:
    """How the null space is built and applied. The defaults are the paper's formulas."""

    W_delta: Rule = Rule(feature="x")
    """the first linear map of delta (Eq. X dW_delta = 0, projector H1)"""
    W_B: Rule = Rule(feature="delta-x")
    """the input projection (Eq. delta X dW_B = 0, projector H3)"""
    W_C: Rule = Rule(feature="x")
    """the output projection (Eq. X dW_C = 0, projector H1)"""
    A: Rule = Rule(feature="delta")
    """the state transition, stored as A_log (Eq. delta dA = 0, projector H2, from the left)"""
    out: Rule = Rule(feature="out")
    """the linear layer after the SSM (projector H_out)"""
    accumulate: Literal["sum", "batch-mean"] = "sum"
    """plain sums over all tokens, or the mean of each batch, summed over batches and tasks"""
    rank: str = "corner"
    """rule for the number of null directions: corner, smoothed-corner, energy:SHARE or fraction:SHARE"""
    scaling: Literal["none", "frobenius"] = "none"
    """none: H = U U^T; frobenius: that divided by its Frobenius norm"""
    eta: float = 0.95
    """strictness: the update is multiplied by eta H + (1 - eta) I"""
    blocks: int | list[int] | None = None
    """blocks to fine-tune: the first so many, or those listed; all if empty"""
    spectrum: Literal["float64", "float32"] = "float64"
    """precision in which the rank rule sees the spectrum"""
    products: Literal["float64", "float32"] = "float64"
    """precision of the products within a batch; their sums are float64 always"""

    def __post_init__(self) -> None:
        parse_rule(self.rank)
        for name, kind in get_type_hints(Setting).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                raise UserError(f"{name} is one of {', '.join(get_args(kind))}, got '{getattr(self, name)}'.")
        if not isinstance(self.eta, (int, float)) or not 0.0 <= self.eta <= 1.0:
            raise UserError(f"eta must lie between 0 (no protection) and 1 (strict projection), got {self.eta}.")
        for kind in KINDS:
            if self.rule(kind).feature not in FEATURES:
                raise UserError(f"{kind} has no feature '{self.rule(kind).feature}'; known: {', '.join(FEATURES)}.")
        listed = [self.blocks - 1] if isinstance(self.blocks, int) else self.blocks
        if listed is not None and (
            not isinstance(listed, (list, tuple))
            or not listed
            or not all(isinstance(b, int) and b >= 0 for b in listed)
        ):
            raise UserError(
                f"blocks must be a positive number of blocks or a list of their indices, got {self.blocks}."
            )

    def rule(self, kind: str) -> Rule:
        return getattr(self, kind)

    def trains_block(self, index: int) -> bool:
        if self.blocks is None:
            return True
        return index < self.blocks if isinstance(self.blocks, int) else index in self.blocks

    def without_projection(self) -> "Setting":
        """The same parameters, trained freely: Mamba-Seq."""
        free: dict[str, Any] = {kind: dataclasses.replace(self.rule(kind), projected=False) for kind in KINDS}
        return dataclasses.replace(self, **free)

    def override(self, **changes: Any) -> "Setting":
        """A copy with some fields changed; a rule may be given as a mapping of its own changes."""
        known = [f.name for f in dataclasses.fields(self)]
        for name, value in changes.items():
            if name not in known:
                raise UserError(f"A setting has no '{name}'.{did_you_mean(name, known)} Known: {', '.join(known)}.")
            if name in KINDS and isinstance(value, Mapping):
                fields = [f.name for f in dataclasses.fields(Rule)]
                for key in value:
                    if key not in fields:
                        hint = did_you_mean(key, fields)
                        raise UserError(f"A rule has no '{key}'.{hint} Known: {', '.join(fields)}.")
                changes[name] = dataclasses.replace(self.rule(name), **value)
        return dataclasses.replace(self, **changes)


SETTINGS: dict[str, Setting] = {
    "paper": Setting(),
    "public-code": Setting(
        W_B=Rule(feature="delta-x-per-image"),
        accumulate="batch-mean",
        rank="smoothed-corner",
        scaling="frobenius",
        spectrum="float32",
    ),
}


def setting_named(name: str) -> Setting:
    if name not in SETTINGS:
        raise UserError(f"There is no setting '{name}'.{did_you_mean(name, SETTINGS)} Known: {', '.join(SETTINGS)}.")
    return SETTINGS[name]


def ablation(*projected: str) -> dict[str, Rule]:
    """Overrides for a row of the paper's ablation: only these kinds are projected, all train."""
    for kind in projected:
        if kind not in KINDS:
            raise UserError(f"There is no kind '{kind}'.{did_you_mean(kind, KINDS)} Known: {', '.join(KINDS)}.")
    return {kind: dataclasses.replace(SETTINGS["paper"].rule(kind), projected=kind in projected) for kind in KINDS}
