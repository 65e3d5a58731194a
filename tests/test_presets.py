"""Presets: what each resolves to, against the paper and its code; what each says of itself; a plan of each."""

import dataclasses
import functools
import itertools
import json
import re
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as TF

import mambacl
from mambacl.backbones import create_model
from mambacl.cli import COMMANDS
from mambacl.config import RunConfig, preset_names, resolve
from mambacl.data import DATASETS, SOURCES
from mambacl.data.tasks import class_order
from mambacl.data.transforms import Transforms
from mambacl.errors import UserError
from mambacl.nullspace import SETTINGS, NullSpace
from mambacl.nullspace.plan import Plan, make_plan
from mambacl.paper import paper_table
from mambacl.training.recipe import RECIPES

DOCS = Path(__file__).parents[1] / "docs" / "presets.md"
OURS = tuple(name for name in preset_names() if resolve(name, {}).method == RunConfig.method)
"""which use the default method; their further commands are Mamba-CL's"""
PAPERS = tuple(name for name in preset_names() if name not in OURS)
"""whose first command is the paper's way, and whose second is the released code's"""


@dataclass(frozen=True)
class Wanted:
    """What a benchmark of the paper is, by hand, and where in the paper's tables its result stands."""

    dataset: str
    tasks: int
    table: str | None
    backbone: str = "defocus_mamba_large_22k"
    size: int = 192
    eta: float = 0.95
    venue: str = ""
    minutes: int | None = None


WANTED = {
    "imagenet-r-10": Wanted("imagenet-r", 10, "main", eta=0.90, minutes=384),
    "imagenet-r-20": Wanted("imagenet-r", 20, "main", minutes=433),
    "imagenet-r-50": Wanted("imagenet-r", 50, "long-sequence"),
    "imagenet-r-100": Wanted("imagenet-r", 100, "long-sequence"),
    "cifar100-10": Wanted("cifar100", 10, "main", minutes=755),
    "cifar100-50": Wanted("cifar100", 50, "long-sequence"),
    "domainnet-s200-10": Wanted("domainnet-s200", 10, "main", minutes=751),
    "domainnet-s200-50": Wanted("domainnet-s200", 50, "long-sequence"),
    "domainnet-s200-100": Wanted("domainnet-s200", 100, "long-sequence"),
    "imagenet-r-10-vim": Wanted("imagenet-r", 10, "variants", "vim_base", 224, 0.90, "Vim"),
    "imagenet-r-10-vmamba": Wanted("imagenet-r", 10, "variants", "vmamba_base_s2l15", 224, 0.90, "VMamba"),
    "imagenet-r-10-mambavision": Wanted("imagenet-r", 10, "variants", "mambavision_base", 224, 0.90, "MambaVision"),
    "imagenet-r-10-1k": Wanted("imagenet-r", 10, None, "defocus_mamba_large", 384, 0.90),
    "cifar100-10-scratch": Wanted("cifar100", 10, "scratch", "defocus_mamba_tiny"),
}
PURE = tuple(WANTED)
"""whose training is a named recipe to the last field"""


def head(name: str) -> list[str]:
    """The comment lines that a preset's file opens with, without their marks."""
    text = (files("mambacl") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    lines = text.split("\n\n")[0].splitlines()
    assert all(line.startswith("# ") for line in lines)
    return [line.removeprefix("# ") for line in lines]


def typed(command: str) -> RunConfig:
    """What a command resolves to."""
    program, word, preset, *options = shlex.split(re.sub(r" --compare [\w,-]+", "", command))
    assert (program, word) == ("mambacl", "train")
    return resolve(preset, COMMANDS["train"].read(options)[2])


def commands(name: str) -> list[str]:
    """The commands that a preset's file opens with."""
    return list(itertools.takewhile(lambda line: line.startswith("mambacl train "), head(name)))


@functools.cache
def both(name: str) -> tuple[RunConfig, RunConfig]:
    """The paper's way and the released code's."""
    paper, public = map(typed, commands(name))
    return paper, public


@pytest.mark.parametrize("name", preset_names())
def test_the_first_lines_are_the_commands_the_machine_the_time_and_the_accuracy(name: str) -> None:
    (first, *others), lines = commands(name), head(name)
    assert re.fullmatch(
        rf"mambacl train {name}( --stream\.root FOLDER)?( --stream\.tasks 5| --compare [\w,-]+)?", first
    )
    plain, (title, *rest) = re.sub(r" --compare .*", "", first), lines[1 + len(others) :]
    further = " --method mamba-cl" if name in OURS else " --setting public-code --recipe public-code"
    assert others and all(command.startswith(plain + further) for command in others)
    assert title.endswith(".") and (name in OURS or "docs/settings.md" in rest[0])
    assert [line.split()[0] for line in rest if re.match("Machine: |Time: |Expect ", line)] == [
        "Machine:",
        "Time:",
        "Expect",
    ]
    machine, time, expect = (line for line in rest if re.match("Machine: |Time: |Expect ", line))
    assert "minute" in time and all(line.endswith(".") for line in (machine, time, expect))
    for line in (time, expect):  # a number has a source
        said = re.search(r"\d", line) is None or re.search(r"in the paper|quoted from the paper|measured", line)
        assert said, line
    assert all(len(line) <= 118 for line in (title, *rest))


@pytest.mark.parametrize("name", OURS)
def test_the_further_commands_of_a_default_train_mamba_cl_on_the_same_stream(name: str) -> None:
    first, *others = map(typed, commands(name))
    assert first.method == "analytic" and all(config.method == "mamba-cl" for config in others)
    assert all((config.stream, config.backbone) == (first.stream, first.backbone) for config in others)


@pytest.mark.parametrize("name", PAPERS)
def test_both_commands_resolve_and_differ_only_by_setting_and_recipe(name: str) -> None:
    paper, public = both(name)
    assert (paper.setting, paper.recipe) == ("paper", "paper")
    assert (public.setting, public.recipe) == ("public-code", "public-code")
    assert paper.method == "mamba-cl"
    parts = {"setting": "", "recipe": "", "nullspace": SETTINGS["paper"], "training": RECIPES["paper"]}
    assert dataclasses.replace(paper, **parts) == dataclasses.replace(public, **parts)  # type: ignore[arg-type]
    assert paper.nullspace.layers == public.nullspace.layers
    if name in PURE:
        kept = {"eta": paper.nullspace.eta, "layers": paper.nullspace.layers}
        assert paper.nullspace == SETTINGS["paper"].override(**kept)
        assert public.nullspace == SETTINGS["public-code"].override(**kept)
        assert paper.training == RECIPES["paper"] and public.training == RECIPES["public-code"]


def test_the_papers_benchmarks_are_the_papers() -> None:
    assert set(WANTED) <= set(PAPERS) and {"demo", "images"} <= set(OURS)


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("recipe", ["paper", "public-code"])
def test_the_numbers_are_those_of_the_paper_and_its_code(name: str, recipe: str) -> None:
    wanted, config = WANTED[name], both(name)[recipe == "public-code"]
    stream, training = config.stream, config.training
    assert (stream.dataset, stream.tasks, config.backbone) == (wanted.dataset, wanted.tasks, wanted.backbone)
    assert config.method == "mamba-cl" and config.nullspace.eta == wanted.eta and config.nullspace.blocks is None
    assert (training.passes, training.batch_size, training.optimizer) == (50, 200, "adam")
    assert (training.lr, training.head_lr, training.weight_decay) == (2e-4, 1e-2, 5e-5)
    assert (training.schedule, training.decay_rate, training.covariance_batch_size) == ("multistep", 0.1, 100)
    assert training.decay_after == ([25, 40] if recipe == "paper" else [20, 35])
    assert training.passes_per_epoch == (1 if recipe == "paper" else 5)
    assert (stream.order, stream.order_seed) == ("mamba-cl", 2024)
    assert class_order(stream.order, 100, stream.order_seed, [])[:10] == [55, 17, 75, 11, 2, 29, 49, 48, 41, 45]
    scratch = name == "cifar100-10-scratch"
    assert config.pretrained is (not scratch) and config.nullspace.layers == ("all" if scratch else "ssm")
    classes = SOURCES[stream.dataset].counts[0]
    assert classes is not None and classes % wanted.tasks == 0


@pytest.mark.parametrize("name", WANTED)
def test_the_transforms_are_those_of_the_data_set(name: str) -> None:
    wanted, transforms = WANTED[name], both(name)[0].stream.transforms
    assert transforms.image_size == wanted.size and transforms.covariance == "evaluation"
    assert transforms.augment_interpolation == "bilinear"
    assert transforms.mean == [0.485, 0.456, 0.406] and transforms.std == [0.229, 0.224, 0.225]
    said = (transforms.resize, transforms.interpolation, transforms.augment)
    others = (wanted.size + 32, "bilinear", "autoaugment-imagenet")
    assert said == ((None, "bicubic", "autoaugment-cifar") if wanted.dataset == "cifar100" else others)


def test_a_run_states_its_transforms_and_uses_them() -> None:
    """Train, evaluation and covariance stand in the resolved configuration; they are what is done to an image."""
    config = both("imagenet-r-10")[0]
    said = config.as_dict()["stream"]["transforms"]
    assert {"image_size", "resize", "interpolation", "augment", "mean", "std", "covariance"} <= {
        key for key, value in said.items() if value is not None
    }
    image = torch.randint(0, 256, (3, 150, 260), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    made = Transforms(config.stream.transforms, 32, [0.5] * 3, [0.5] * 3)  # of another backbone
    resized = TF.resize(image, [224, 224], interpolation=InterpolationMode.BILINEAR, antialias=True)
    assert torch.equal(made.evaluate(image), resized[:, 16:208, 16:208])
    mean, std = (torch.tensor(said[key]).view(3, 1, 1) for key in ("mean", "std"))
    normal = (resized[:, 16:208, 16:208] / 255 - mean) / std
    torch.testing.assert_close(made.normalize(made.evaluate(image)[None])[0], normal)
    assert made.train(image, 1).shape == (3, 192, 192) and not torch.equal(made.train(image, 1), made.train(image, 2))
    cifar = Transforms(both("cifar100-10")[0].stream.transforms, 32, [0.5] * 3, [0.5] * 3)
    resized = TF.resize(image[:, :32, :32], [192, 192], interpolation=InterpolationMode.BICUBIC, antialias=True)
    assert torch.equal(cifar.evaluate(image[:, :32, :32]), resized)


@pytest.mark.parametrize("name", WANTED)
def test_the_accuracy_and_time_to_expect_are_the_papers(name: str) -> None:
    wanted = WANTED[name]
    time, expect = head(name)[5:7]
    if wanted.table is None:
        assert expect.startswith("Expect no number") and "figure" in expect
        return
    table = paper_table(wanted.table)
    rows = [r for r in table.rows if r.method.startswith("Mamba-CL") and (not wanted.venue or r.venue == wanted.venue)]
    values = [rows[0].values[f"{wanted.dataset}-{wanted.tasks}", metric] for metric in ("accuracy", "forgetting")]
    texts = [value.text for value in values if value is not None]
    quoted = f"Expect accuracy {texts[0]}, forgetting {texts[1]} (per cent, quoted from the paper); not measured here."
    assert expect == quoted
    if wanted.minutes is None:
        assert time == "Time: the paper gives no minutes; not measured here."
    else:
        assert time == f"Time: {wanted.minutes} minutes in the paper; not measured here."
        row = next(row for row in paper_table("runtime").rows if row.method == "Mamba-CL")
        assert row.values[f"{wanted.dataset}-{wanted.tasks}", "minutes"].mean == wanted.minutes  # type: ignore[union-attr]


def test_the_fine_tuned_checkpoint_has_its_own_scale_factors() -> None:
    config = both("imagenet-r-10-1k")[0]
    assert config.backbone_options == {"mamba": {"delta_scale_factor": 2.0, "rope_scale_factor": 4.0}}
    for name, scales in (("imagenet-r-10-1k", (2.0, 4.0)), ("imagenet-r-10", (1.0, 1.0))):
        config = both(name)[0]
        model: Any = built(config.backbone, json.dumps(config.backbone_options))
        mamba = model.config.mamba
        assert (mamba.delta_scale_factor, mamba.rope_scale_factor) == scales


@functools.cache
def built(backbone: str, options: str) -> nn.Module:
    with torch.device("meta"):
        return create_model(backbone, num_classes=0, **json.loads(options)).eval()


@functools.cache
def planned(backbone: str, options: str, size: int, setting: str, layers: str, blocks: str) -> Plan:
    model = built(backbone, options)
    space = NullSpace(model, setting, layers=layers, blocks=json.loads(blocks))
    return make_plan(space, torch.empty(1, 3, size, size, device="meta"))


def plan(config: RunConfig) -> Plan:
    options = json.dumps(config.backbone_options)
    model: Any = built(config.backbone, options)
    size = config.stream.transforms.image_size or model.default_cfg["input_size"][-1]
    null = config.nullspace
    return planned(config.backbone, options, size, config.setting, null.layers, json.dumps(null.blocks))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_its_data_set_and_can_be_planned(name: str) -> None:
    for config in map(typed, commands(name)):
        assert config.stream.dataset in DATASETS.names()
        made = plan(config)
        assert made.blocks > 0 and made.covariance_bytes > 0
        if name in WANTED:
            assert f"The covariances take {made.covariance_bytes / 1e9:.1f} GB." in head(name)[4]
    if name in WANTED and WANTED[name].backbone.startswith("defocus"):
        assert made.tokens == ((WANTED[name].size // 16) ** 2 + 1,)


def test_the_documentation_lists_every_preset_as_it_is() -> None:
    text = DOCS.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    listed = {row[0].strip("`"): row[1:] for row in rows if row[0].strip("`") in preset_names()}
    assert sorted(listed) == preset_names()
    for name, (dataset, tasks, backbone, size, eta, *_) in listed.items():
        config = resolve(name, {})
        said = (dataset.strip("`"), tasks, backbone.strip("`"), size, float(eta))
        pixels = config.stream.transforms.image_size or 32
        stream = config.stream
        assert said == (stream.dataset, str(stream.tasks), config.backbone, str(pixels), config.nullspace.eta), name


def test_the_commands_of_the_documentation_do_what_it_says() -> None:
    commands = re.findall(r"^    (mambacl train (?!PRESET).*?)(?: +#.*)?$", DOCS.read_text(encoding="utf-8"), re.M)
    variants = [config for config in map(typed, commands) if config.backbone == "vim_base"]
    assert len(commands) == 4 and len(variants) == 2
    for config, resize in zip(variants, (256, None), strict=True):
        assert config.pretrained is True and config.stream.transforms.image_size == 224
        assert config.stream.transforms.resize == resize
    assert typed(commands[-1]) == both("imagenet-r-10")[1]


def test_data_are_looked_for_before_weights_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(*_: object) -> None:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr("mambacl.backbones.loading.weights_file", download)
    options = {"backbone": "defocus_mamba_tiny", "pretrained": True, "stream": {"root": str(tmp_path / "nowhere")}}
    with pytest.raises(UserError, match="nowhere"):
        mambacl.train("imagenet-r-20", out=str(tmp_path / "run"), **options)


@pytest.mark.parametrize(
    "name, passes, after", [("cifar100-10", 20, 18), ("imagenet-r-10", 50, 40), ("imagenet-r-20", 50, 40)]
)
def test_references_train_by_their_own_recipes(name: str, passes: int, after: int) -> None:
    """docs/methods.md has the numbers; a rate that the user gives comes first."""
    slca = resolve(name, {"method": "slca"}).training
    assert (slca.optimizer, slca.lr, slca.head_lr, slca.batch_size, slca.weight_decay) == ("sgd", 1e-4, 1e-2, 128, 5e-4)
    assert (slca.passes, slca.schedule, slca.decay_after) == (passes, "multistep", [after])
    for method in ("aper", "ranpac"):
        tuned = resolve(name, {"method": method}).training
        assert (tuned.optimizer, tuned.schedule, tuned.passes) == ("sgd", "cosine", 20) and tuned.lr == tuned.head_lr
    assert resolve(name, {"method": "slca", "training": {"lr": 1e-3}}).training.lr == 1e-3
    assert resolve(name, {}).training == RECIPES["paper"]
