"""Transforms as data: for training, for evaluation, for the covariances."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from data_help import MEAN, STD, random_arrays
from small_run import CONFIG
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as TF

import mambacl
from mambacl.cli import main
from mambacl.config import resolve
from mambacl.data import Stream, TransformConfig, Transforms
from mambacl.errors import UserError

ENGINES = ["torchvision", "batched"]


def stream(covariance: Any = None, seed: int = 0, **options: Any) -> Stream:
    given = {"image_size": 8, **options, **({} if covariance is None else {"covariance": covariance})}
    transforms = Transforms(TransformConfig(**given), 32, MEAN, STD)
    return Stream(random_arrays(4, 3, 3, (10, 14)), transforms, 2, seed=seed)


def plain(stream: Stream, task: int = 1) -> Tensor:
    return torch.cat([images for images, _ in stream.plain_batches(task, 4)])


# Covariances


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("augment", ["none", "flip", "autoaugment-cifar"])
def test_covariances_see_training_images_as_in_evaluation(engine: str, augment: str) -> None:
    ours = stream(engine=engine, augment=augment)
    expected = torch.stack([ours.transforms.evaluate(ours.dataset.train.image(i)) for i in range(6, 12)])
    assert torch.equal(plain(ours), ours.transforms.normalize(expected))
    assert torch.equal(plain(stream("evaluation", engine=engine, augment=augment)), plain(ours))


@pytest.mark.parametrize("engine", ENGINES)
def test_covariances_may_have_a_transform_of_their_own(engine: str) -> None:
    options = {"engine": engine, "augment": "flip"}
    usual, ours = stream(**options), stream({"resize": 10, "interpolation": "bilinear"}, **options)
    images = [ours.dataset.train.image(i) for i in range(6, 12)]
    resized = [TF.resize(image, [10, 10], InterpolationMode.BILINEAR, antialias=True) for image in images]
    expected = torch.stack([TF.center_crop(image, [8, 8]) for image in resized])
    assert torch.equal(plain(ours), ours.transforms.normalize(expected))
    for name in ("test_batches", "train_batches"):  # these stay as they are
        words = (1, 4) if name == "test_batches" else (1, 0, 4)
        pairs = zip(getattr(usual, name)(*words), getattr(ours, name)(*words), strict=True)
        assert all(torch.equal(a, b) for (a, _), (b, _) in pairs)
    assert torch.equal(usual.some_images(1, 3), ours.some_images(1, 3))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("covariance", ["training", {"augment": "flip"}, {"augment": "autoaugment-imagenet"}], ids=str)
def test_covariances_of_augmented_images(engine: str, covariance: Any) -> None:
    """The same at every call; another seed draws otherwise."""
    options = {"engine": engine, "augment": "crop-flip"}
    first = plain(stream(covariance, **options))
    assert torch.equal(plain(stream(covariance, **options)), first)
    assert not torch.equal(plain(stream(covariance, seed=1, **options)), first)
    assert not torch.equal(plain(stream(**options)), first)
    if covariance == {"augment": "flip"}:
        usual = plain(stream(**options))
        same = (first == usual).flatten(1).all(1) | (first.flip(-1) == usual).flatten(1).all(1)
        assert same.all()


@pytest.mark.slow
def test_a_run_gathers_its_covariances_from_them(tmp_path: Path) -> None:
    short = {"training.passes": 1, "training.decay_after": [], "stream.tasks": [5, 5], "device": "cpu"}
    mambacl.train(CONFIG, out=str(tmp_path / "usual"), **short)
    changed = {"stream.transforms.covariance": {"augment": "autoaugment-cifar"}}
    run = mambacl.train(CONFIG, out=str(tmp_path / "changed"), **short, **changed)
    rows = [json.loads((tmp_path / name / "results.json").read_text())["correct"] for name in ("usual", "changed")]
    assert rows[0][0] == rows[1][0]  # the first task is trained before there are covariances
    files = [sorted((tmp_path / name / "checkpoints").glob("task-*.safetensors")) for name in ("usual", "changed")]
    assert files[0] and [one.name for one in files[0]] == [one.name for one in files[1]]
    assert files[0][0].read_bytes() != files[1][0].read_bytes()
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert config["stream"]["transforms"]["covariance"] == {"augment": "autoaugment-cifar"}
    steps = json.loads((run.folder / "stream.json").read_text())["transforms"]
    assert steps["covariance"][0] == {"autoaugment": "cifar", "interpolation": "bilinear"}
    assert mambacl.evaluate(run.folder).counted == rows[1][-1]  # the folder is still taken for its own


@pytest.mark.parametrize(
    ("covariance", "sentence"),
    [
        ({"resiz": 10}, "'stream.transforms.covariance.resiz'. Did you mean 'stream.transforms.covariance.resize'"),
        ({"resize": 4}, "resize must be at least image_size"),
        ({"resize": "wide"}, "covariance.resize takes a whole number or null, got 'wide'"),
        ({"interpolation": "nearest"}, "takes one of bicubic, bilinear"),
        ({"augment": "filp"}, "takes one of none, flip"),
        ("test", "takes one of evaluation, training or a mapping, got 'test'"),
    ],
)
def test_wrong_transforms_of_covariances(covariance: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(CONFIG, {"stream.transforms.covariance": covariance})
    assert sentence in str(caught.value)


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(json.dumps(CONFIG))
    words = ["train", str(tmp_path / "small.yaml"), "--training.passes", "1", "--stream.tasks", "[5,5]"]
    for name, given in (("a", ["", "training"]), ("b", [".augment", "flip"])):
        option = [f"--stream.transforms.covariance{given[0]}", given[1]]
        assert main([*words, *option, "--out", str(tmp_path / name)]) == 0
    read = [yaml.safe_load((tmp_path / name / "config.yaml").read_text()) for name in "ab"]
    assert [config["stream"]["transforms"]["covariance"] for config in read] == ["training", {"augment": "flip"}]


def test_another_backbone_drops_their_size_with_the_others() -> None:
    given = {"backbone": "defocus_mamba_nano", "pretrained": False}
    sizes = {"image_size": 20, "resize": 24, "covariance": {"resize": 22, "augment": "flip"}}
    config = resolve({**given, "stream": {"transforms": sizes}}, {"backbone": "vim_tiny"})
    assert config.stream.transforms.resize is None and config.stream.transforms.covariance == {"augment": "flip"}


# What a reader sees


def test_the_steps_of_each_transform() -> None:
    options = {"image_size": 192, "resize": 224, "interpolation": "bilinear", "augment": "autoaugment-imagenet"}
    normalise = {"normalise": {"mean": MEAN, "std": STD}}
    evaluation = [{"resize": 224, "interpolation": "bilinear"}, {"central_crop": 192}, normalise]
    assert Transforms(TransformConfig(**options), 32, MEAN, STD).describe() == {  # type: ignore[arg-type]
        "training": [
            {"autoaugment": "imagenet", "interpolation": "bilinear"},
            {"random_resized_crop": 192, "interpolation": "bilinear"},
            normalise,
        ],
        "evaluation": evaluation,
        "covariance": evaluation,
    }
    small = TransformConfig(augment="crop-flip", covariance="training")
    steps = Transforms(small, 32, MEAN, STD).describe()
    crop = [{"resize": 32, "interpolation": "bicubic"}, {"random_crop": 32, "padding": 4}, {"random_flip": 0.5}]
    assert steps["training"] == [*crop, normalise] == steps["covariance"]
    assert steps["evaluation"] == [crop[0], normalise]


# AutoAugment


@pytest.mark.parametrize("between", ["nearest", "bilinear"])
def test_how_autoaugment_moves_pixels(between: str) -> None:
    config = TransformConfig(augment="autoaugment-cifar", augment_interpolation=between)  # type: ignore[arg-type]
    transforms = Transforms(config, 24, MEAN, STD)
    policy, crop = v2.AutoAugmentPolicy.CIFAR10, v2.RandomResizedCrop(24, interpolation=InterpolationMode.BICUBIC)
    expected = v2.Compose([v2.AutoAugment(policy, InterpolationMode(between)), crop])
    image = torch.randint(0, 256, (3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    moved = 0
    for seed in range(60):
        torch.manual_seed(seed)
        assert torch.equal(transforms.train(image, seed), expected(image))
        other = TransformConfig(augment="autoaugment-cifar", augment_interpolation="nearest")
        moved += not torch.equal(transforms.train(image, seed), Transforms(other, 24, MEAN, STD).train(image, seed))
    assert (moved > 3) == (between == "bilinear")


def test_augmenting_an_image_leaves_all_generators_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's too, which draws dropout and the like."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeded GPUs"))
    transforms, before = Transforms(TransformConfig(augment="crop-flip"), 24, MEAN, STD), torch.get_rng_state()
    transforms.train(torch.zeros(3, 24, 24, dtype=torch.uint8), 5)
    assert torch.equal(torch.get_rng_state(), before)
