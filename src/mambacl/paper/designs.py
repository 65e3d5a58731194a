"""The paper's tables and figures as lists of runs: benchmark, method, seed and what varies. Pure data.

`--scale paper` uses the presets of the paper's benchmarks. `--scale nano` is the same design with the packaged nano
backbone, on CIFAR-100 or on the packaged Fashion-MNIST, with as many tasks as the classes allow; its main table also
has the rows of `paper.rivals`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mambacl.errors import UserError
from mambacl.nullspace.settings import PAPER_KINDS
from mambacl.options import merge
from mambacl.paper import rivals
from mambacl.paper.quoted import paper_table
from mambacl.registry import did_you_mean

Options = Mapping[str, Any]

LARGE, NANO = "defocus_mamba_large_22k", "defocus_mamba_nano"
FIRST_ORDER = 2024  # the paper's class orders have the seeds 2024, 2025, 2026
ETAS = (1.0, 0.95, 0.90, 0.85)
BLOCKS = (1, 12, 24, 36, 48)
DEPTH = {"paper": 48, "nano": 12}
BOTH = ("sequential", "mamba-cl")
NAMES = {"mamba-cl": "Mamba-CL", "sequential": "Mamba-Seq"}  # the paper's names
MAMBA_CL = {"method": "mamba-cl", "series": NAMES["mamba-cl"]}
ABLATION = (
    (), ("W_delta", "out"), ("W_C", "out"), ("A", "out"), ("W_B", "out"), ("W_delta", "W_C", "A", "W_B"), ("out",),
    PAPER_KINDS,
)  # fmt: skip
"""the kinds of parameters whose updates are projected, in the order of the paper's rows"""
VARIANTS = {
    "paper": ("mambavision_base", "vim_base", "vmamba_base_s2l15"),
    "nano": ("mambavision_nano", "vim_nano", "vmamba_nano"),
}
SCALE_FACTORS = {"mamba": {"delta_scale_factor": 2.0, "rope_scale_factor": 4.0}}  # of the ImageNet-1k weights
PRETRAINING = {"paper": ("ImageNet-21k", "ImageNet-1k"), "nano": ("Tiny-ImageNet", "random weights")}

CIFAR, FASHION = "cifar100", "fashion-mnist-small"
PRESETS = {CIFAR: "cifar100-10-nano", FASHION: "demo"}  # of the nano backbone, for our default
NANO_CLASSES = {CIFAR: 100, FASHION: 10}
NANO_BASES: dict[str, dict[str, Any]] = {
    CIFAR: {
        "stream": {"transforms": {"image_size": 32, "augment": "crop-flip"}},
        # few passes: `main` has forty rows; the rates decay after about the same shares of them as in the paper
        "training": {"passes": 5, "decay_after": [2, 4]},
    },
    FASHION: {
        "stream": {"train_per_class": 200, "transforms": {"image_size": 20}},
        "nullspace": {"rank": "energy:0.77", "products": "float32"},  # as in the preset demo, which says why
        "training": {"passes": 3, "batch_size": 25, "lr": 6e-3, "head_lr": 3e-4, "schedule": "constant"},
    },
}


@dataclass(frozen=True)
class Benchmark:
    """A data set in a number of tasks, and the configuration of a run on it."""

    name: str
    dataset: str
    tasks: int
    eta: float
    base: str | Options
    """a preset's name, or options"""


@dataclass(frozen=True)
class PlannedRun:
    benchmark: Benchmark
    method: str
    seed: int
    backbone: str
    variant: str = ""
    """how the run differs from the method's usual run; empty for the usual one"""
    varied: Options = field(default_factory=dict)
    series: str = ""
    """its line or group of bars in a figure"""
    x: float | str | None = None
    """its place on the figure's axis"""
    losses: bool = False
    """whether to record the losses of the first two tasks after each task"""

    @property
    def key(self) -> str:
        """The folder's name; designs that need the same run share the folder."""
        variant = f"-{self.variant}" if self.variant else ""
        return f"{self.benchmark.name}-{self.method}{variant}-{self.seed}"


@dataclass(frozen=True)
class Where:
    """What a design runs on."""

    scale: str
    dataset: str
    seeds: int

    @property
    def backbone(self) -> str:
        return LARGE if self.scale == "paper" else NANO


Design = Callable[[Where], list[PlannedRun]]


def planned(name: str, scale: str = "paper", dataset: str = FASHION, seeds: int = 1) -> list[PlannedRun]:
    """The runs of a table or figure, grouped by benchmark. `dataset` is for the scale nano."""
    if name not in DESIGNS:
        raise UserError(
            f"There is no table or figure '{name}'.{did_you_mean(name, DESIGNS)} Known: {', '.join(DESIGNS)}."
        )
    return DESIGNS[name](Where(scale, dataset, seeds))


def benchmarks(names: Iterable[str], where: Where) -> list[Benchmark]:
    """The paper's benchmarks, or their substitutes at the scale nano: the same numbers of tasks, as long as each task
    has two classes."""
    if where.scale == "paper":
        found = []
        for name in names:
            dataset, _, tasks = name.rpartition("-")
            found.append(Benchmark(name, dataset, int(tasks), paper_eta(name), name))
        return found
    most = NANO_CLASSES[where.dataset] // 2
    counts = dict.fromkeys(min(int(name.rpartition("-")[2]), most) for name in names)
    return [_nano(where.dataset, tasks) for tasks in counts]


def paper_eta(benchmark: str) -> float:
    return 0.90 if benchmark == "imagenet-r-10" else 0.95


def _nano(dataset: str, tasks: int) -> Benchmark:
    base = NANO_BASES[dataset]
    stream = {**base["stream"], "dataset": dataset, "tasks": tasks, "order": "mamba-cl"}
    options = {"backbone": NANO, "pretrained": True, "setting": "paper", "recipe": "paper", **base, "stream": stream}
    return Benchmark(f"{dataset}-{tasks}", dataset, tasks, 0.95, options)


def _columns(table: str) -> list[str]:
    return [name for name in paper_table(table).columns if name != "average"]


def _at(size: int, benchmark: Benchmark) -> dict[str, Any]:
    """Options for another image size. As in the released code, images are cropped from 32 pixels more, except those of
    CIFAR-100."""
    crop = {} if benchmark.dataset in NANO_CLASSES else {"resize": size + 32}
    return {"stream": {"transforms": {"image_size": size, **crop}}}


def _runs(where: Where, names: Iterable[str], vary: Callable[[Benchmark], Iterable[Options]]) -> list[PlannedRun]:
    """A run per benchmark, variation and seed; `vary` returns a benchmark's variations."""
    return [
        PlannedRun(benchmark, seed=seed, **{"backbone": where.backbone, **fields})
        for benchmark in benchmarks(names, where)
        for fields in vary(benchmark)
        for seed in range(where.seeds)
    ]


def _methods(table: str, methods: Sequence[str]) -> Design:
    """Compares methods on the benchmarks of a table."""
    return lambda where: _runs(where, _columns(table), lambda _: [{"method": method} for method in methods])


def _main(where: Where) -> list[PlannedRun]:
    """At the scale nano, also the other rows, in ten tasks: at the scale of the paper they run by preset."""
    own = _methods("main", BOTH)(where)
    return own + ([_rival(rival, where, seed) for rival, seed in _rows(where)] if where.scale == "nano" else [])


def _rows(where: Where) -> Iterator[tuple[rivals.Rival, int]]:
    return ((rival, seed) for rival in rivals.rows() for seed in range(where.seeds))


def _rival(rival: rivals.Rival, where: Where, seed: int, factor: float | None = None) -> PlannedRun:
    (benchmark,) = benchmarks(["cifar100-10"], where)
    assert isinstance(benchmark.base, Mapping)
    own = rivals.options_of(rival, benchmark.base["training"], PRESETS[where.dataset], factor)
    benchmark = replace(benchmark, base=merge(dict(benchmark.base), own))
    on_vit = rival.backbone == rivals.VIT  # the others follow --backbone, as Mamba-CL does
    words = [rival.backbone] * on_vit + ([] if factor is None else [f"times-{factor:g}"])
    varied = {"backbone": rival.backbone} if on_vit else {}
    return PlannedRun(benchmark, rival.method, seed, rival.backbone, "-".join(words), varied)


def tuning(
    dataset: str = CIFAR, factors: Callable[[str], Sequence[float]] = lambda method: rivals.FACTORS
) -> list[tuple[rivals.Rival, float, PlannedRun]]:
    """The runs that choose the learning rates of the main table at the scale nano: these factors of each row."""
    where = Where("nano", dataset, 1)
    tried = [(rival, factor) for rival in rivals.rows() if rival.tuned for factor in factors(rival.method)]
    return [(rival, factor, _rival(rival, where, 0, factor)) for rival, factor in tried]


def _ablation(where: Where) -> list[PlannedRun]:
    def vary(_: Benchmark) -> Iterator[Options]:
        for kinds in ABLATION:
            rules = {"nullspace": {kind: {"projected": kind in kinds} for kind in PAPER_KINDS}}
            variant = "" if kinds == PAPER_KINDS else "only-" + "+".join(kinds)
            yield {"method": "mamba-cl", "variant": variant, "varied": rules} if kinds else {"method": "sequential"}

    return _runs(where, _columns("ablation"), vary)


def _variants(where: Where) -> list[PlannedRun]:
    size = 32 if where.scale == "nano" else 224

    def vary(benchmark: Benchmark) -> Iterator[Options]:
        for name in VARIANTS[where.scale]:
            for method in BOTH:
                varied = {"backbone": name, **_at(size, benchmark)}
                yield {"method": method, "variant": name, "backbone": name, "varied": varied}

    return _runs(where, _columns("variants"), vary)


def _scratch(where: Where) -> list[PlannedRun]:
    backbone = "defocus_mamba_tiny" if where.scale == "paper" else NANO
    varied = {"backbone": backbone, "pretrained": False, "nullspace": {"layers": "all"}}
    fields = {"variant": "scratch", "backbone": backbone, "varied": varied}
    return _runs(where, _columns("scratch"), lambda _: [{"method": method, **fields} for method in BOTH])


def _eta(where: Where) -> list[PlannedRun]:
    def vary(benchmark: Benchmark) -> Iterator[Options]:
        for eta in ETAS:
            variant = "" if eta == benchmark.eta else f"eta-{eta:g}"
            yield {**MAMBA_CL, "variant": variant, "varied": {"nullspace": {"eta": eta}}, "x": eta}

    return _runs(where, _columns("main"), vary)


def blocks(scale: str) -> list[int]:
    """How many of the first blocks to fine-tune: the paper's numbers, or the same shares of nano's twelve."""
    return list(dict.fromkeys(max(1, round(count * DEPTH[scale] / BLOCKS[-1])) for count in BLOCKS))


def _blocks(where: Where) -> list[PlannedRun]:
    def vary(_: Benchmark) -> Iterator[Options]:
        for count in blocks(where.scale):
            usual = count == DEPTH[where.scale]
            varied = {"nullspace": {"blocks": None if usual else count}}
            yield {**MAMBA_CL, "variant": "" if usual else f"blocks-{count}", "varied": varied, "x": count}

    return _runs(where, _columns("main"), vary)


def _pretraining(where: Where) -> list[PlannedRun]:
    usual, other = PRETRAINING[where.scale]

    def vary(benchmark: Benchmark) -> Iterator[Options]:
        fewer: dict[str, Any] = {"variant": other.replace(" ", "-"), "varied": {"pretrained": False}}
        if where.scale == "paper":
            backbone = "defocus_mamba_large"
            varied = {"backbone": backbone, "backbone_options": SCALE_FACTORS, **_at(384, benchmark)}
            fewer |= {"backbone": backbone, "varied": varied}
        for label, fields in ((usual, {}), (other, fewer)):
            for method in BOTH:
                yield {"method": method, "series": NAMES[method], "x": label, **fields}

    return _runs(where, _columns("main"), vary)


def _curve(losses: bool) -> Design:
    """The figures with values after each task use ImageNet-R and CIFAR-100 in ten tasks."""
    fields = {"variant": "losses" if losses else "", "losses": losses}

    def design(where: Where) -> list[PlannedRun]:
        both = [{"method": method, "series": NAMES[method], **fields} for method in BOTH]
        return _runs(where, ("imagenet-r-10", "cifar100-10"), lambda _: both)

    return design


NANO_WORDS = {
    "main": f"rows on {rivals.VIT} have the published recipes with other passes, batches and factors of the learning "
    "rates (docs/paper.md): not the published setting",
    "long-sequence": "each task has at least two classes, so CIFAR-100 has at most 50 tasks and Fashion-MNIST 5",
    "variants": "the nano sizes of the three backbones, at 32 pixels, from random weights instead of ImageNet-1k's",
    "scratch": f"{NANO} instead of defocus_mamba_tiny",
    "blocks": f"the first {', '.join(map(str, blocks('nano')))} of {DEPTH['nano']} blocks, the same shares as in the "
    "paper",
    "pretraining": f"{PRETRAINING['nano'][0]}'s weights and {PRETRAINING['nano'][1]}, instead of ImageNet-21k's and "
    "ImageNet-1k's",
    "runtime": "minutes of a small model, not comparable with the paper's",
    "svd": "minutes of a small model, not comparable with the paper's",
    "resources": "the cost of a small model, not comparable with the paper's",
}
"""notes for the reader on how a design at the scale nano differs from the paper's"""


DESIGNS: dict[str, Design] = {
    "main": _main,
    "long-sequence": _methods("long-sequence", BOTH),
    "ablation": _ablation,
    "same-backbone": _methods("same-backbone", ("frozen", "seq-adapter", "ease", "mamba-cl")),
    "variants": _variants,
    "scratch": _scratch,
    "runtime": _methods("runtime", BOTH),
    "svd": _methods("svd", ("mamba-cl",)),
    "resources": _methods("resources", BOTH),
    "eta": _eta,
    "blocks": _blocks,
    "pretraining": _pretraining,
    "accuracy-curve": _curve(losses=False),
    "loss-curve": _curve(losses=True),
}
FIGURES = ("eta", "blocks", "pretraining", "accuracy-curve", "loss-curve")
"""the designs that are figures in the paper; the others are tables"""
