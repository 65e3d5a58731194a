"""What the null space does, as data: a `Setting` says it for each kind of parameter, and the named settings are
values of it.

The kinds are the paper's, W_delta, W_B, W_C, A and `out`, the linear layer after the SSM; W_dt, the second linear map
of delta; and, where every layer is trained, `linear` and `conv`.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mambacl.errors import UserError
from mambacl.nullspace.ranks import parse_rule
from mambacl.registry import did_you_mean

PAPER_KINDS = ("W_delta", "W_B", "W_C", "A", "out")
KINDS = (*PAPER_KINDS, "W_dt", "linear", "conv")

Feature = Literal["x", "delta", "delta-elementwise", "delta-x", "delta-x-per-image", "dt", "out", "in"]
FEATURES: dict[str, str] = {
    "x": "the SSM's input, tokens x D",
    "delta": "the step sizes, tokens x D",
    "delta-elementwise": "the step sizes, channel by channel: where they were active, A stays",
    "delta-x": "delta X as in the paper: x x^T of each token, weighted by |delta|^2",
    "delta-x-per-image": "delta^T X of each image, D x D, as in the public code",
    "dt": "the input of delta's second linear map, tokens x rank",
    "out": "the input of the linear layer after the SSM, tokens x D",
    "in": "the input of a layer; of a convolution, its windows",
}
MEANT_FOR = {"A": ("delta", "delta-elementwise"), "W_dt": ("dt",), "linear": ("in",), "conv": ("in",)}
"""features of the right size, for the kinds that have not all of them to choose from"""
FOR_X = ("x", "delta", "delta-x", "delta-x-per-image", "out")


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
    W_dt: Rule = Rule(trains=False, feature="dt")
    """the second linear map of delta, which the published method does not train. With layers: all it trains, unless
    W_dt is given trains: false"""
    linear: Rule = Rule(feature="in")
    """the other linear layers, with layers: all"""
    conv: Rule = Rule(feature="in")
    """convolutions, with layers: all"""
    layers: Literal["ssm", "all"] = "ssm"
    """ssm: the selective SSMs and the linear layer after each; all: every linear and convolution layer and W_dt too, as
    in training from scratch"""
    others: Literal["first-task", "fixed", "free"] = "first-task"
    """norms, biases, D, freq, tokens and the like, with layers: all. first-task: trained in the first, then fixed"""
    accumulate: Literal["sum", "batch-mean"] = "sum"
    """plain sums over all tokens, or the mean of each batch, summed over batches and tasks"""
    rank: str = "corner"
    """rule for the number of null directions: corner, smoothed-corner, energy:SHARE, fraction:SHARE or
    tolerance:RELATIVE"""
    rank_over: Literal["block", "all"] = "block"
    """block: the rule sees each spectrum by itself; all: a feature's in all blocks at once, each over its trace"""
    scaling: Literal["none", "frobenius"] = "none"
    """none: H = U U^T; frobenius: that divided by its Frobenius norm"""
    eta: float = 0.95
    """strictness: the update is multiplied by eta H + (1 - eta) I"""
    relax: float = 0.0
    """with A by delta-elementwise: the share of a channel's output by which moving A may change the scan on old inputs,
    at most; 0 fixes A"""
    blocks: int | list[int] | None = None
    """blocks to fine-tune: the number of first ones, or a list of their indices; all if empty"""
    spectrum: Literal["float64", "float32"] = "float64"
    """precision in which the rank rule sees the spectrum"""
    products: Literal["float64", "float32"] = "float64"
    """precision of the products within a batch; their sums are float64 always"""
    storage: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """precision in which projectors are kept; models in float64 keep them so"""
    covariances: Literal["device", "cpu", "disk"] = "device"
    """where covariances are kept between tasks: on the model's device, in the machine's memory, or mapped to disk"""
    keep_tasks: bool = False
    """keep each task's covariances apart, so that a task can be taken back: NullSpace.forget"""

    def __post_init__(self) -> None:
        if not isinstance(self.rank, str):
            raise UserError(f"rank is the name of a rule, such as corner or energy:0.9, got {self.rank!r}.")
        parse_rule(self.rank)
        for kind in KINDS:
            if not isinstance(getattr(self, kind), Rule):
                raise UserError(
                    f"{kind} is a Rule, or a mapping such as {{'trains': False}}, got {getattr(self, kind)!r}."
                )
        for name, kind in get_type_hints(Setting).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                raise UserError(f"{name} is one of {', '.join(get_args(kind))}, got '{getattr(self, name)}'.")
        if not isinstance(self.eta, (int, float)) or not 0.0 <= self.eta <= 1.0:
            raise UserError(f"eta must lie between 0 (no protection) and 1 (strict projection), got {self.eta}.")
        if not isinstance(self.relax, (int, float)) or not 0.0 <= self.relax < 1.0:
            raise UserError(f"relax must lie between 0 (A is fixed) and 1, got {self.relax}.")
        if self.relax > 0 and self.A.feature != "delta-elementwise":
            raise UserError("relax goes with A protected by delta-elementwise, as in the setting 'exact'.")
        for kind in KINDS:
            known = MEANT_FOR.get(kind, FOR_X)
            if getattr(self, kind).feature not in known:
                raise UserError(f"{kind} has no feature '{getattr(self, kind).feature}'; known: {', '.join(known)}.")
        indices = [self.blocks - 1] if isinstance(self.blocks, int) else self.blocks
        if indices is not None and (
            not isinstance(indices, (list, tuple))
            or not indices
            or not all(isinstance(b, int) and b >= 0 for b in indices)
        ):
            raise UserError(
                f"blocks must be a positive number of blocks or a list of their indices, got {self.blocks}."
            )

    def rule(self, kind: str) -> Rule:
        """What happens to a kind, `layers` considered."""
        rule: Rule = getattr(self, kind)
        if self.layers == "ssm" and kind in ("linear", "conv"):
            return dataclasses.replace(rule, trains=False)
        if self.layers == "all" and kind == "W_dt" and rule.projected:
            return dataclasses.replace(rule, trains=True)
        return rule

    def trains_block(self, index: int) -> bool:
        if self.blocks is None:
            return True
        return index < self.blocks if isinstance(self.blocks, int) else index in self.blocks

    def without_projection(self) -> "Setting":
        """The same parameters, trained freely: Mamba-Seq."""
        free: dict[str, Any] = {kind: dataclasses.replace(getattr(self, kind), projected=False) for kind in KINDS}
        free["W_dt"] = dataclasses.replace(free["W_dt"], trains=self.rule("W_dt").trains)
        others = "free" if self.others == "first-task" else self.others
        return dataclasses.replace(self, others=others, **free)

    def override(self, **changes: Any) -> "Setting":
        """A copy with some fields changed; a rule may be given as a mapping of its own changes."""
        known = [f.name for f in dataclasses.fields(self)]
        changes = given_rules(changes)
        for name, value in changes.items():
            if name not in known:
                raise UserError(f"A setting has no '{name}'.{did_you_mean(name, known)} Known: {', '.join(known)}.")
            if name in KINDS and isinstance(value, Mapping):
                fields = [f.name for f in dataclasses.fields(Rule)]
                for key in value:
                    if key not in fields:
                        hint = did_you_mean(key, fields)
                        raise UserError(f"A rule has no '{key}'.{hint} Known: {', '.join(fields)}.")
                changes[name] = dataclasses.replace(getattr(self, name), **value)
        return dataclasses.replace(self, **changes)


def given_rules(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of a setting, in which W_dt stays fixed with layers "all" if they say that it does not train.

    The default of W_dt does not train either, except with layers "all". What tells the two apart in a setting, and in
    the files that hold one, is that a W_dt fixed by the user is not projected.
    """
    rule = changes.get("W_dt")
    if isinstance(rule, Rule) and not rule.trains:
        return {**changes, "W_dt": dataclasses.replace(rule, projected=False)}
    if isinstance(rule, Mapping) and "projected" not in rule:
        trains = {"true": True, "false": False}.get(str(rule.get("trains")).lower())  # options may still be text
        return dict(changes) if trains is None else {**changes, "W_dt": {**rule, "projected": trains}}
    return dict(changes)


SETTINGS: dict[str, Setting] = {
    "paper": Setting(),
    "public-code": Setting(
        W_B=Rule(feature="delta-x-per-image"),
        accumulate="batch-mean",
        rank="smoothed-corner",
        scaling="frobenius",
        spectrum="float32",
    ),
    "exact": Setting(
        W_B=Rule(feature="x"),
        A=Rule(feature="delta-elementwise"),
        rank="tolerance:1e-12",
        eta=1.0,
    ),
}


def setting_named(name: str) -> Setting:
    if name not in SETTINGS:
        raise UserError(f"There is no setting '{name}'.{did_you_mean(name, SETTINGS)} Known: {', '.join(SETTINGS)}.")
    return SETTINGS[name]


def ablation(*projected: str) -> dict[str, Rule]:
    """Overrides for a row of the paper's ablation: only these kinds are projected, all train."""
    for kind in projected:
        if kind not in PAPER_KINDS:
            raise UserError(
                f"There is no kind '{kind}'.{did_you_mean(kind, PAPER_KINDS)} Known: {', '.join(PAPER_KINDS)}."
            )
    return {
        kind: dataclasses.replace(SETTINGS["paper"].rule(kind), projected=kind in projected) for kind in PAPER_KINDS
    }
