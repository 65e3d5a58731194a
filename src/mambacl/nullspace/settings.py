"""Settings of the null space: a `Setting` says how each kind of parameter trains and is protected.

The kinds are the paper's (W_delta, W_B, W_C, A and `out`, the linear layer after the SSM), W_dt, the second linear map
of delta, and, if every layer trains, `linear` and `conv`.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from mambacl.errors import UserError
from mambacl.options import Must, OptionError, Options, build, merge, options_of
from mambacl.registry import did_you_mean, unknown

PAPER_KINDS = ("W_delta", "W_B", "W_C", "A", "out")

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
"""features of the right size, for kinds that cannot use those in `FOR_X`"""
FOR_X = ("x", "delta", "delta-x", "delta-x-per-image", "out")


RANK_RULES = ("corner", "smoothed-corner", "energy", "fraction", "tolerance", "multiple")
WITH_SHARE = ("energy", "fraction", "tolerance", "multiple")


def parse_rank(rule: str) -> tuple[str, float | None]:
    """The name and the share of a rank rule, such as "corner" or "energy:0.99". `nullspace.ranks` has the formulas."""
    name, _, share = rule.partition(":")
    if name not in RANK_RULES or (share and name not in WITH_SHARE):
        known = ", ".join(f"{word}:{_number(word)}" if word in WITH_SHARE else word for word in RANK_RULES)
        raise UserError(f"There is no rank rule '{rule}'.{did_you_mean(name, RANK_RULES)} Known: {known}.")
    if name not in WITH_SHARE:
        return name, None
    try:
        value = float(share)
    except ValueError:
        value = -1.0
    if name == "multiple" and not 1.0 <= value < float("inf"):
        raise UserError(f"The rank rule '{rule}' needs a factor of at least 1, as in multiple:10.")
    if name != "multiple" and not 0.0 <= value <= 1.0:
        raise UserError(f"The rank rule '{rule}' needs a share between 0 and 1, as in {name}:0.99.")
    return name, value


def _number(rule: str) -> str:
    return "FACTOR" if rule == "multiple" else "SHARE"


@dataclass(frozen=True)
class Rule(Options):
    """How one kind of parameter trains."""

    trains: bool = True
    """whether it is fine-tuned at all"""
    projected: bool = True
    """whether its update is projected"""
    feature: Feature = "x"
    """the feature whose null space the update is projected onto"""


def _are_blocks(blocks: int | list[int]) -> bool:
    return blocks > 0 if isinstance(blocks, int) else bool(blocks) and min(blocks) >= 0


@dataclass(frozen=True)
class Setting(Options):
    """How the null space is built and applied. The defaults are the paper's formulas, whose rank rule protects few
    directions of real images' features."""

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
    """the second linear map of delta. The published method does not train it. With layers: all it trains, unless W_dt
    has trains: false"""
    linear: Rule = Rule(feature="in")
    """the other linear layers, with layers: all"""
    conv: Rule = Rule(feature="in")
    """convolutions, with layers: all"""
    layers: Literal["ssm", "all"] = "ssm"
    """ssm: the selective SSMs and the linear layer after each; all: every linear and convolution layer and W_dt too, as
    in training from scratch"""
    others: Literal["first-task", "fixed", "free"] = "first-task"
    """norms, biases, D, freq, tokens and so on, with layers: all. first-task: trained in the first task, then fixed"""
    accumulate: Literal["sum", "batch-mean", "mean-input"] = "sum"
    """sum: over all tokens; batch-mean: the mean of each batch, summed over batches and tasks; mean-input: of the mean
    image of each batch, as in Adam-NSCL's code"""
    projector: Literal["null-space", "gpm", "recursive", "weights"] = "null-space"
    """null-space: of all covariances together; gpm: a subspace that grows task by task; recursive: OWM's, which follows
    the inputs during training; weights: keeps the leading singular directions of the weights, without data (OSF)"""
    acts_on: Literal["update", "gradient"] = "update"
    """what is projected: the optimizer's finished update, or the gradient that it gets"""
    rank: str = "corner"
    """rule for the number of null directions: corner and smoothed-corner (the published ones; on real images they
    protect few directions), energy:SHARE, fraction:SHARE, tolerance:RELATIVE or multiple:FACTOR (of the smallest)"""
    rank_step: float = 0.0
    """added to the share of the rank rule after each task"""
    below_at_first: bool = False
    """with gpm: the first subspace stays below the share, as in the released code"""
    alpha: float | list[float] = 1e-3
    """with recursive: the last value of alpha, which falls from 1 in each task; a list has one per layer"""
    rank_over: Literal["block", "all"] = "block"
    """block: the rank rule is applied to each spectrum separately; all: to a feature's spectra in all blocks at once,
    each divided by its trace"""
    scaling: Literal["none", "frobenius"] = "none"
    """none: H = U U^T; frobenius: H divided by its Frobenius norm"""
    eta: Annotated[
        float, Must("lie between 0 (no protection) and 1 (strict projection)", lambda eta: 0 <= eta <= 1)
    ] = 0.95
    """strictness: the update is multiplied by eta H + (1 - eta) I"""
    relax: Annotated[float, Must("lie between 0 (A is fixed) and 1", lambda share: 0 <= share < 1)] = 0.0
    """with A by delta-elementwise: the largest share of a channel's output by which moving A can change the scan on old
    inputs; 0 fixes A"""
    blocks: Annotated[
        int | list[int] | None, Must("be a positive number of blocks or a list of their indices", _are_blocks)
    ] = None
    """blocks to fine-tune: the first N, or a list of indices; all if empty"""
    spectrum: Literal["float64", "float32"] = "float64"
    """precision of the spectrum for the rank rule"""
    products: Literal["float64", "float32"] = "float64"
    """precision of the products within a batch; their sums are always float64"""
    storage: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """precision of stored projectors; float64 for models in float64"""
    covariances: Literal["device", "cpu", "disk"] = "device"
    """where covariances are stored between tasks: on the model's device, in CPU memory, or memory-mapped on disk"""
    projectors: Literal["device", "cpu", "disk"] = "device"
    """where projectors are stored between steps: on the model's device, in CPU memory, or memory-mapped on disk. From
    elsewhere they are copied to the device in each step, the next while one is used; steps are then not recorded as
    CUDA graphs"""
    keep_tasks: bool = False
    """store each task's covariances separately, so that a task can be removed: NullSpace.forget"""

    def check(self) -> None:
        parse_rank(self.rank)
        if self.relax > 0 and self.A.feature != "delta-elementwise":
            raise OptionError("{group}relax goes with A protected by delta-elementwise, as in the setting 'exact'.")
        for kind in (name for name, option in options_of(Setting).items() if option.kind is Rule):
            known = MEANT_FOR.get(kind, FOR_X)
            if getattr(self, kind).feature not in known:
                wrong = getattr(self, kind).feature
                raise OptionError(f"{{group}}{kind} has no feature '{wrong}'; known: {', '.join(known)}.")

        self._check_projector()

    def _check_projector(self) -> None:
        name, share = parse_rank(self.rank)
        if self.rank_step and share is None:
            raise OptionError("{group}rank_step needs a rank rule with a share, such as energy:0.97.")
        if self.projector == "gpm" and name != "energy":
            raise OptionError("{group}projector gpm needs a share of the energy: set {group}rank to energy:0.97.")
        if self.projector == "recursive" and self.acts_on == "update":
            raise OptionError("{group}projector recursive projects gradients: set {group}acts_on to gradient.")
        if self.projector == "recursive" and self.projectors != "device":
            raise OptionError("{group}projector recursive changes with each step: set {group}projectors to device.")
        alphas = self.alpha if isinstance(self.alpha, list) else [self.alpha]
        if not all(0 < alpha <= 1 for alpha in alphas):
            raise OptionError("{group}alpha must be larger than 0 and at most 1.")
        if self.projector in ("recursive", "weights"):
            kinds = {kind: self.rule(kind) for kind in KINDS}
            for kind in (k for k, rule in kinds.items() if rule.trains and rule.projected):
                if (feature := kinds[kind].feature).startswith("delta"):
                    remedy = "trains to false" if kind == "A" else "feature to x"
                    raise OptionError(
                        f"{{group}}projector {self.projector} needs the input of {kind}, not {feature}: set "
                        f"{{group}}{kind}.{remedy}."
                    )

    def rank_at(self, task: int) -> str:
        """The rank rule after a task, counted from 0."""
        name, share = parse_rank(self.rank)
        if share is None or not self.rank_step:
            return self.rank
        moved = share + self.rank_step * task
        return f"{name}:{max(moved, 1.0) if name == 'multiple' else min(max(moved, 0.0), 1.0)!r}"

    def rule(self, kind: str) -> Rule:
        """The rule for a kind, with `layers` taken into account."""
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
        """A copy with some fields changed; a rule can be given as a mapping of changed fields."""
        return build(Setting, merge(dataclasses.asdict(self), given_rules(changes)))


KINDS = tuple(name for name, option in options_of(Setting).items() if option.kind is Rule)


def given_rules(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of a setting, edited so that `W_dt={"trains": False}` also holds with layers "all".

    By default W_dt trains only with layers "all". A setting, and a file that holds one, marks a W_dt that the user
    fixed by projected = False.
    """
    rule = changes.get("W_dt")
    if isinstance(rule, Rule) and not rule.trains:
        return {**changes, "W_dt": dataclasses.replace(rule, projected=False)}
    if isinstance(rule, Mapping) and "projected" not in rule:
        trains = {"true": True, "false": False}.get(str(rule.get("trains")).lower())  # options can still be text
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
    "exact": Setting(W_B=Rule(feature="x"), A=Rule(feature="delta-elementwise"), rank="tolerance:1e-12", eta=1.0),
}
"""`exact` keeps outputs where features leave a null space. Those of real images leave none, and its own rank rule then
leaves nothing to learn with: give it `rank="energy:0.99"`. docs/exact.md has what each rule leaves free."""


LINEAR: dict[str, Any] = {
    "W_B": Rule(feature="x"),
    "A": Rule(trains=False, feature="delta"),
    "conv": Rule(trains=False, feature="in"),
    "layers": "all",
    "others": "fixed",
    "eta": 1.0,
}
"""all linear layers train, each projected by its input"""
SYSTEMS: dict[str, Setting] = {
    "gpm": Setting(**LINEAR, projector="gpm", acts_on="gradient", rank="energy:0.97", rank_step=0.003),
    "dual-gpm": Setting(**LINEAR, projector="gpm", acts_on="gradient", rank="energy:0.97", rank_step=0.003),
    "nscl": Setting(**LINEAR, rank="multiple:10"),
    "owm": Setting(**LINEAR, projector="recursive", acts_on="gradient"),
    "osf": Setting(**LINEAR, projector="weights", acts_on="update", rank="fraction:0.5"),
}
"""what other systems' rules are as settings: `NullSpace(model, rule="gpm")`"""


def system_named(name: str) -> Setting:
    if name not in SYSTEMS:
        raise unknown("rule", name, SYSTEMS)
    return SYSTEMS[name]


def setting_named(name: str) -> Setting:
    if name not in SETTINGS:
        raise unknown("setting", name, SETTINGS)
    return SETTINGS[name]


def ablation(*projected: str) -> dict[str, Rule]:
    """Overrides for a row of the paper's ablation: all kinds train, only these are projected."""
    for kind in projected:
        if kind not in PAPER_KINDS:
            raise unknown("kind", kind, PAPER_KINDS)
    return {
        kind: dataclasses.replace(SETTINGS["paper"].rule(kind), projected=kind in projected) for kind in PAPER_KINDS
    }
