"""The run folder: one reader and writer for training and for reports."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml
from reports_help import make_run
from safetensors.torch import load_file, save_file
from small_run import CONFIG
from torch import Tensor
from training_help import interrupted_after

import mambacl
from mambacl.backbones import create_model
from mambacl.backbones.registry import MODELS, PublicWeights
from mambacl.config import resolve
from mambacl.errors import UserError
from mambacl.reports import load_run
from mambacl.training.folder import BEFORE_TAGS, SCHEMA, RunFolder, audit_file, task_file
from mambacl.training.identity import differences


def make(folder: Path) -> RunFolder:
    return RunFolder(make_run(folder, [[90], [80, 45]], [100, 50], epochs=2))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    results = {**folder.results(), "status": "interrupted"}
    folder.write_results(results)
    folder.add_seconds("report", 2.0)
    assert folder.results() == {**results, "seconds": {**results["seconds"], "report": 2.0}}
    folder.write_audit({"after": 2, "tasks": [], "updates": []})
    assert folder.audit() == {"schema": SCHEMA, "after": 2, "tasks": [], "updates": []}
    assert load_run(folder.path).audit == folder.audit() and load_run(folder.path).status == "interrupted"


def test_events_by_kind_and_up_to_a_checkpoint(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    assert [event["task"] for event in folder.events("epoch", "task", "epoch")] == [0, 0, 1, 1]
    length = folder.events_length()
    folder.append_event({"event": "task", "task": 2})
    assert len(folder.events("task", "task")) == 3
    folder.truncate_events(length)
    assert len(folder.events("task", "task")) == 2
    with open(folder.path / "metrics.jsonl", "a") as out:
        out.write('{"event": "task", "ta')  # cut off by a crash
    assert len(folder.events("task", "task")) == 2
    (folder.path / "metrics.jsonl").write_text('{"event": "epoch", "task": 0}\n')
    with pytest.raises(UserError, match="line 1 is an event 'epoch' without task and epoch"):
        folder.events("epoch", "task", "epoch")


def test_tensor_files_are_found_by_task(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for name in (task_file(9), task_file(101), audit_file(3), "task-end.safetensors", "last.safetensors"):
        (folder.checkpoints / name).write_bytes(b"")
    assert list(folder.task_files()) == [9, 101] and list(folder.audit_files()) == [3]


def test_only_what_is_needed_must_be_there(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for name in ("stream.json", "config.yaml", "metrics.jsonl"):
        (folder.path / name).unlink()
    record = load_run(folder.path)
    assert record.stream == {} and record.config == {} and record.epochs == ()
    with pytest.raises(
        UserError, match=r"stream\.json is missing: restore it, or start the run again with --overwrite"
    ):
        folder.stream()
    with pytest.raises(UserError, match="is not a run folder"):
        RunFolder.existing(folder.path)
    (folder.path / "results.json").write_text(json.dumps({"schema": 2}))
    with pytest.raises(UserError, match="reads schema 1: use the version that wrote the run"):
        folder.results()


def test_a_folder_from_before_the_option_precision_stays_in_float32(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    assert "precision" not in folder.options()
    assert folder.config().precision == "float32"


# Weights by tag: the default can change from one version of the package to the next

NANO = "defocus_mamba_nano"


def set_weights(monkeypatch: pytest.MonkeyPatch, *newer: Path) -> None:
    """The nano model has its first weights, and before them those of newer files, as in a later version."""
    entry = MODELS.get(NANO)
    weights = {path.stem: PublicWeights(packaged=str(path)) for path in newer}
    weights["tin32-39ep"] = entry.weights["tin32-39ep"]
    monkeypatch.setitem(MODELS._entries, NANO, dataclasses.replace(entry, weights=weights))


def recorded(folder: RunFolder) -> object:
    return yaml.safe_load(folder.config_text())["pretrained"]


def test_before_tags_every_model_had_one_file() -> None:
    for name in MODELS.names():
        public = [tag for tag, weights in MODELS.get(name).weights.items() if weights.url]
        if name.startswith("vit"):  # came with tags
            continue
        assert not public or BEFORE_TAGS.get(name, "in1k") in public, name
    assert all(BEFORE_TAGS[name] in MODELS.get(name).weights for name in BEFORE_TAGS)


def test_a_run_from_before_tags_is_the_one_with_the_weights_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_weights(monkeypatch)
    wanted = resolve("demo", {"precision": "float32", "pretrained": True})
    folder = RunFolder(make_run(tmp_path / "run", [[9]], [10], config=wanted.as_dict()))
    assert recorded(folder) is True
    assert folder.config().pretrained == load_run(folder.path).config["pretrained"] == "tin32-39ep"
    assert differences(folder.config(), wanted) == []
    set_weights(monkeypatch, tmp_path / "newer.safetensors")
    assert differences(folder.config(), wanted) == ["pretrained"]
    assert differences(folder.config(), dataclasses.replace(wanted, pretrained="tin32-39ep")) == []


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_a_run_records_its_weights_and_resumes_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it stopped before the weights were written, and also if it recorded only `true`, as runs once did."""
    old = create_model(NANO, "tin32-39ep", num_classes=0).state_dict()
    newer = {name: tensor + 1 for name, tensor in create_model(NANO, "tin32-39ep").state_dict().items()}
    save_file(newer, tmp_path / "newer.safetensors")

    def assert_starts_from(folder: RunFolder, tensors: Mapping[str, Tensor]) -> None:
        kept = load_file(folder.checkpoints / "backbone.safetensors")
        assert kept.keys() == old.keys() and all(torch.equal(tensor, tensors[name]) for name, tensor in kept.items())

    own = {**CONFIG, "backbone": NANO, "pretrained": True, "backbone_options": {}, "training": {"passes": 1}}
    folder, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other")
    set_weights(monkeypatch)
    with interrupted_after(1):
        mambacl.train(own, method="frozen", out=str(folder.path))
    assert recorded(folder) == "tin32-39ep"
    set_weights(monkeypatch, tmp_path / "newer.safetensors")
    with pytest.raises(UserError, match=r"holds another run \(it differs in pretrained\)"):
        mambacl.train(own, method="frozen", out=str(folder.path))
    text = folder.config_text()
    for written in (text, text.replace("pretrained: tin32-39ep", "pretrained: true")):
        for path in folder.checkpoints.glob("*.safetensors"):
            path.unlink()
        (folder.path / "config.yaml").write_text(written)
        with interrupted_after(1):
            mambacl.resume(folder.path)
        assert_starts_from(folder, old)
    assert recorded(folder) is True
    with interrupted_after(1):
        mambacl.train(own, method="frozen", out=str(other.path))
    assert recorded(other) == "newer"
    assert_starts_from(other, newer)
