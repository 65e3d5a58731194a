"""What `mambacl models` shows is what the models are. After a change: `python -m mambacl.backbones.catalogue`."""

import json

import pytest
from torch import nn

from mambacl.backbones import list_models
from mambacl.backbones.catalogue import FILE, described, linear_head
from mambacl.backbones.defocus import DefocusConfig, DefocusMamba
from mambacl.backbones.registry import MODELS, ModelEntry
from mambacl.cli.models import catalogue

RECORDED = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_model_is_recorded() -> None:
    assert list(RECORDED["models"]) == list_models()


@pytest.mark.parametrize("name", ["defocus_mamba_nano", "vim_nano"])
def test_small_models_are_as_recorded(name: str) -> None:
    assert described(name) == RECORDED["models"][name]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED["models"])
def test_every_model_is_as_recorded(name: str) -> None:
    assert described(name) == RECORDED["models"][name]


@pytest.mark.slow
def test_the_figure_of_the_paper_is_as_recorded() -> None:
    assert linear_head() == RECORDED["linear_head"]


def test_weights_are_as_recorded() -> None:
    for name, entry in RECORDED["models"].items():
        known = MODELS.get(name).weights
        assert list(known) == list(entry["weights"])
        for tag, weights in known.items():
            file = "in the package" if weights.packaged else weights.file
            expected = {"top1": weights.top1, "data": weights.data, "licence": weights.licence, "file": file}
            assert entry["weights"][tag] == expected


def test_models_of_other_packages_are_counted_when_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(config: DefocusConfig) -> nn.Module:
        return DefocusMamba(config)

    nano = MODELS.get("defocus_mamba_nano")
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
    MODELS.add("another_nano", ModelEntry("another_nano", build, nano.config_class, nano.config))
    found = catalogue()["models"]
    assert list(found) == sorted([*RECORDED["models"], "another_nano"])
    assert found["another_nano"] == {**RECORDED["models"]["defocus_mamba_nano"], "weights": {}}
