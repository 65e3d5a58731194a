"""A rank rule that hardly protects says so, once; one that protects says nothing."""

import logging

import pytest
import torch
from data_help import MEAN, STD
from torch import Tensor, nn

from mambacl.backbones import create_model
from mambacl.data import StreamConfig, TransformConfig, open_stream
from mambacl.nullspace import NullSpace
from mambacl.nullspace.description import Protected, what_is_protected
from mambacl.nullspace.projectors import decompose

SIZE = 64


class Layer(nn.Module):
    """One linear layer: its input is the feature."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, 4)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features)


def features_of_real_images(task: int = 0) -> Tensor:
    """Features whose eigenvalues fall like 1/k after a large first one, as those of a backbone on real images do."""
    generator = torch.Generator().manual_seed(task)
    variances = 1 / torch.arange(1, SIZE + 1, dtype=torch.float64)
    variances[0] = 4.0
    return (torch.randn(2000, SIZE, generator=generator, dtype=torch.float64) * variances.sqrt()).float()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def consolidated(setting: str, tasks: int = 2, **overrides: object) -> NullSpace:
    space = NullSpace(Layer(), setting, layers="all", **overrides)
    for task in range(tasks):
        space.consolidate([features_of_real_images(task)])
    return space


def test_the_papers_rule_says_once_that_it_hardly_protects(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mambacl"):
        space = consolidated("paper")
    assert space.protected is not None and space.protected.little
    assert space.protected.directions == 2 and space.protected.size == SIZE
    [said] = warnings_of(caplog)
    assert "corner protects 2 of 64 directions" in said and "--nullspace.rank energy:0.99" in said
    assert said.endswith(".") and "\n" not in said


@pytest.mark.parametrize("rank", ["energy:0.99", "energy:0.77", "fraction:0.5"])
def test_a_rule_that_protects_says_nothing(rank: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mambacl"):
        space = consolidated("exact", rank=rank)
    assert warnings_of(caplog) == [] and space.protected is not None and not space.protected.little


def test_a_real_corner_protects(caplog: pytest.LogCaptureFixture) -> None:
    """Features in two directions of many: the corner finds them, few as they are."""
    flat = torch.randn(500, 2, generator=torch.Generator().manual_seed(0)) @ torch.eye(SIZE)[:2]
    space = NullSpace(Layer(), "paper", layers="all")
    with caplog.at_level(logging.INFO, "mambacl"):
        space.consolidate([flat])
    assert space.protected is not None and space.protected.directions <= 3
    assert space.protected.energy == pytest.approx(1) and warnings_of(caplog) == []


def test_a_loaded_space_knows_and_does_not_repeat_it(caplog: pytest.LogCaptureFixture) -> None:
    space, other = consolidated("paper", tasks=1), NullSpace(Layer(), "paper", layers="all")
    caplog.clear()
    with caplog.at_level(logging.INFO, "mambacl"):
        other.load_state_dict(space.state_dict())
        other.consolidate([features_of_real_images(1)])
    assert other.protected is not None and other.protected.little and warnings_of(caplog) == []


def test_directions_and_energy_by_hand() -> None:
    """Spectra 8 1 1 0 and 4 4 1 1: energy:0.8 keeps one direction with 8/10 and two with 8/10."""
    found = decompose([torch.diag(torch.tensor(s)) for s in ([8.0, 1, 1, 0], [4.0, 4, 1, 1])], "energy:0.8")
    assert [one.protected for one in found] == [1, 2]
    assert [one.protected_energy for one in found] == pytest.approx([0.8, 0.8])
    assert what_is_protected("energy:0.8", found) == Protected("energy:0.8", 2, 4, pytest.approx(0.8))
    assert decompose([torch.zeros(3, 3)], "corner")[0].protected_energy == 0.0
    assert what_is_protected("corner", []) is None


def test_energy_counts_every_group() -> None:
    groups = torch.stack([torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([5.0, 1.0]))])
    [found] = decompose([groups], "fraction:0.5")
    assert found.protected == 2 and found.protected_energy == pytest.approx(0.8)


def test_the_description_says_it_before_there_are_images(tiny_model) -> None:
    said = {name: NullSpace(tiny_model(), name).describe() for name in ("paper", "exact")}
    assert "rank by corner (on real images it protects few directions, energy:0.99 more)" in said["paper"]
    assert "few directions" not in said["exact"]


@pytest.mark.slow
@pytest.mark.parametrize("setting, overrides, little", [("paper", {}, True), ("exact", {"rank": "energy:0.99"}, False)])
def test_the_packaged_model_on_real_images(setting: str, overrides: dict, little: bool) -> None:
    """The paper's rule protects two or three of 384 directions; what docs/exact.md says."""
    config = StreamConfig(tasks=5, train_per_class=50, transforms=TransformConfig(image_size=16))
    stream = open_stream(config, 16, MEAN, STD, seed=0, workers=0)
    space = NullSpace(create_model("defocus_mamba_nano", pretrained="tin32-39ep", img_size=16), setting, **overrides)
    space.consolidate(stream.plain_batches(0, 100))
    assert space.protected is not None and space.protected.size == 384
    assert space.protected.little == little and (space.protected.directions <= 4) == little
