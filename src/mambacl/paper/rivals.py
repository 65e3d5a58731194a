"""The rows of the main table at the scale nano: every method, the paper's name for it, its backbone and its options.

A method of `METHODS` gets a row by one line in `ROWS`; a line whose method is not registered counts for nothing.

Every row is trained by the recipe that the preset `cifar100-10` holds for its method: optimizer, schedule, clipping,
weight decay and the method's options. The passes and the batch size are the same for all methods, and the
learning rates are the recipe's times a factor, chosen from `FACTORS` on held-back training images by
`examples/tune_rivals.py`, which writes `rates.yaml`. A method that is not in that file has the factor 1.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mambacl.config import RunConfig, resolve
from mambacl.methods.registry import METHODS
from mambacl.training.recipe import Recipe

Options = Mapping[str, Any]

VIT, MAMBA = "vit_nano", "defocus_mamba_nano"
PUBLISHED = "cifar100-10"  # the preset with the recipes
RATES = Path(__file__).parent / "rates.yaml"
FACTORS = (1.0, 0.25, 4.0)  # of equals, the first is chosen
KEPT = ("optimizer", "weight_decay", "schedule", "decay_rate", "clip")  # of a recipe
ALL_LAYERS = {"nullspace": {"layers": "all"}}  # a Vision Transformer has no parameters of an SSM
OURS = "analytic"  # our default, with the options of the data set's preset
IMAGES = "stores images"
STAND_IN = "random directions in place of text"
SLOWER = "autoencoders at a tenth of the published rate"  # at which they diverge: tokens of vit_nano are long


@dataclass(frozen=True)
class Rival:
    method: str
    row: str = ""
    """its name in the paper's main table; empty if it is not there"""
    backbone: str = VIT
    options: Options = field(default_factory=dict)
    """of the run, in addition to the recipe"""
    tuned: bool = True
    """whether it has learning rates to choose"""
    words: str = ""
    """what the reader must know about our row"""


ROWS = (
    # our default and the simplest baselines, on both backbones
    Rival(OURS, backbone=MAMBA, tuned=False),
    Rival(OURS, tuned=False),
    Rival("frozen"),
    Rival("sequential", options=ALL_LAYERS, words="all linear layers"),
    # the systems of the paper's main table
    Rival("l2p", "L2P"),
    Rival("dualprompt", "DualPrompt"),
    Rival("coda-prompt", "CODA-Prompt"),
    Rival("lae", "LAE"),
    Rival("lgcl", "LGCL", options={"options": {"stand_in": "random"}}, words=STAND_IN),
    Rival("c-ln", "C-LN"),
    Rival("esn", "ESN"),
    Rival("c-ada", "C-ADA"),
    Rival("os-prompt", "OS-Prompt++"),
    Rival("evoprompt", "EvoPrompt"),
    Rival("dualprompt-pgp", "PGP"),
    Rival("ovor", "OVOR-Deep"),
    Rival("conv-prompt", "ConvPrompt"),
    Rival("inflora", "InfLoRA"),
    Rival("ease", "EASE"),
    Rival("cprompt", "CPrompt"),
    Rival("sd-lora", "SD-LoRA"),
    Rival("cprompt-kac", "CPrompt-KAC"),
    Rival("bilora", "BiLoRA"),
    Rival("lora-drs", "LoRA-DRS"),
    Rival("sema", "SEMA", options={"options": {"descriptor_rate": 0.2}}, words=SLOWER),
    Rival("cl-lora", "CL-LoRA"),
    # others on a Vision Transformer
    Rival("l2p-pgp"),
    Rival("vpt-nsp2"),
    Rival("simplecil", tuned=False),
    Rival("aper"),
    Rival("ranpac"),
    Rival("slca"),
    # the same backbone as Mamba-CL
    Rival("simplecil", backbone=MAMBA, tuned=False),
    *(Rival(name, backbone=MAMBA) for name in ("gpm", "dual-gpm", "nscl", "owm", "trgp", "osf", "ewc", "lwf")),
    Rival("inf-ssm", backbone=MAMBA),
    Rival("icarl", backbone=MAMBA, words=IMAGES),
    Rival("der", backbone=MAMBA, words=IMAGES),
)


def rows() -> list[Rival]:
    """The rows whose methods are registered."""
    known = METHODS.names()
    return [rival for rival in ROWS if rival.method in known]


def method_of(row: str) -> str | None:
    """The method of a row of the paper; None if mambacl does not have it."""
    return next((rival.method for rival in rows() if rival.row and rival.row == row), None)


def words_about(method: str, backbone: str, options: Options) -> str:
    """What the reader must know about a run of ours, besides its method."""
    if method == "lgcl" and options.get("stand_in") != "random":
        return ""
    return next((rival.words for rival in ROWS if (rival.method, rival.backbone) == (method, backbone)), "")


def options_of(rival: Rival, own: Options, preset: str, factor: float | None = None) -> dict[str, Any]:
    """The options of a row's run. `own`: the recipe at the scale nano, for passes and batch size; `preset`: that of the
    data set, for our default. `factor` of the learning rates: the chosen one if None."""
    published = _preset(PUBLISHED, rival.method)
    recipe, factor = published.training, chosen().get(rival.method, 1.0) if factor is None else factor
    passes, multistep = own["passes"], recipe.schedule == "multistep"
    training: dict[str, Any] = {
        "passes": passes,
        "passes_per_epoch": 1,
        "batch_size": own.get("batch_size", Recipe.batch_size),
        **{name: getattr(recipe, name) for name in KEPT},
        "decay_after": [max(1, round(after * passes / recipe.passes)) for after in recipe.decay_after * multistep],
        "lr": factor * recipe.lr,
        "head_lr": factor * recipe.head_lr,
    }
    options = {**published.options, **rival.options.get("options", {})}
    made = {"backbone": rival.backbone, **rival.options, "options": options, "training": training}
    if rival.method == OURS:
        usual = _preset(preset, OURS)
        made |= {"features": dataclasses.asdict(usual.features), "classifier_options": usual.classifier_options}
    return made


@functools.cache
def _preset(name: str, method: str) -> RunConfig:
    return resolve(name, {"method": method})


@functools.cache
def chosen() -> dict[str, float]:
    """The factor of the learning rates by method; empty before anything was tuned."""
    return rates(RATES)


def rates(path: Path) -> dict[str, float]:
    """The factors in a file; none if there is no file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return {name: float(factor) for name, factor in (yaml.safe_load(text) or {}).items()}


def write_chosen(factors: Mapping[str, float], path: Path = RATES) -> None:
    """Writes the file of chosen factors. Methods that it has already and that are not among them stay."""
    head = (
        "# Factors of the published learning rates (preset cifar100-10) in the main table at the scale nano.\n"
        "# Chosen on held-back training images; written by examples/tune_rivals.py.\n"
    )
    lines = [f"{name}: {factor:g}\n" for name, factor in sorted({**rates(path), **factors}.items())]
    path.write_text(head + "".join(lines), encoding="utf-8")
    chosen.cache_clear()
