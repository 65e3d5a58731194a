"""What a run says: once what trains, and a warning if new classes are never chosen."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_run import CONFIG

import mambacl
from mambacl.backbones import create_model

STREAM = {**CONFIG["stream"], "order": "natural", "tasks": [4, 6]}
WARNING = "fewer than by guessing among all 10 classes"


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_the_null_space_is_described_once_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mambacl"):
        run = mambacl.train(CONFIG, stream=STREAM, training={"passes": 1}, out=str(tmp_path / "run"))
        described = [line for line in caplog.text.splitlines() if "selective SSM" in line or " parts, " in line]
        assert len(described) == 1 and "2 selective SSMs; eta 0.95, rank by energy:0.9; trains " in described[0]
        caplog.clear()
        mambacl.evaluate(run.folder)
        mambacl.audit(run.folder)
    assert "selective SSM" not in caplog.text and " values" not in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_new_classes_that_are_never_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    deployed = create_model("defocus_mamba", num_classes=4, **CONFIG["backbone_options"])
    with torch.no_grad():  # a classifier that is sure of itself, as one that was trained for long
        deployed.get_classifier().weight.normal_()
        deployed.get_classifier().bias.fill_(100.0)
    save_file(deployed.state_dict(), tmp_path / "deployed.safetensors")
    options = {"stream": STREAM, "pretrained": str(tmp_path / "deployed.safetensors"), "known_classes": True}
    options |= {"training": {"passes": 1}}
    with caplog.at_level(logging.INFO, "mambacl"):
        run = mambacl.train(CONFIG, out=str(tmp_path / "separate"), **options)
        assert run.results["correct"][1][1] == 0
        assert f"0 of 60 test images of task 2 are recognised, {WARNING}" in caplog.text
        assert "the checkpoint's classifier has larger scores" in caplog.text and "--classifier lda" in caplog.text
        caplog.clear()
        computed = mambacl.train(CONFIG, out=str(tmp_path / "lda"), classifier="lda", **options)
    assert computed.results["correct"][1][1] > 6 and WARNING not in caplog.text
