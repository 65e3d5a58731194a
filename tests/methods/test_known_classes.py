"""A model trained elsewhere: its classifier is taken over, and what it knows is protected before the first task."""

import copy

import pytest
import torch
from nullspace_help import images
from safetensors.torch import save_file
from small_run import CONFIG
from tolerance import assert_counts_alike

import mambacl
from mambacl.backbones import create_model
from mambacl.classifiers import SeparateHeads
from mambacl.errors import UserError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one task, and its model with its classifier as a checkpoint of its own, as from anywhere."""
    folder = tmp_path_factory.mktemp("known")
    stream = {**CONFIG["stream"], "order": "natural", "tasks": [10]}
    stream["train_per_class"] = 20
    first = mambacl.train(CONFIG, stream=stream, out=str(folder / "elsewhere"), training={"passes": 6})
    model = create_model("defocus_mamba", num_classes=4, **CONFIG["backbone_options"])
    from safetensors.torch import load_file

    state = load_file(first.folder / "checkpoints" / "backbone.safetensors")
    learned = load_file(first.folder / "checkpoints" / "task-end.safetensors")
    state |= {n.removeprefix("method.model."): t for n, t in learned.items() if n.startswith("method.model.")}
    state |= {f"head.{word}": learned[f"method.heads.0.{word}"][:4].contiguous() for word in ("weight", "bias")}
    model.load_state_dict(state)
    save_file({n: t.clone() for n, t in model.state_dict().items()}, folder / "deployed.safetensors")
    return folder / "deployed.safetensors"


def config(path, **more):
    stream = {**CONFIG["stream"], "order": "natural", "tasks": [4, 3, 3]}
    return {**copy.deepcopy(CONFIG), "stream": stream, "pretrained": str(path), "known_classes": True, **more}


@pytest.mark.slow
def test_nothing_is_trained_in_the_first_task_and_its_accuracy_is_the_models_own(trained, tmp_path):
    run = mambacl.train(config(trained), out=str(tmp_path / "run"))
    epochs = [line for line in (run.folder / "metrics.jsonl").read_text().splitlines() if '"epoch"' in line]
    assert epochs and not any('"task": 0' in line for line in epochs)
    deployed = create_model("defocus_mamba", num_classes=4, pretrained=trained, **CONFIG["backbone_options"]).eval()
    from mambacl.data import open_stream
    from mambacl.training.folder import RunFolder

    resolved = RunFolder.existing(run.folder).config()
    data = deployed.default_cfg
    stream = open_stream(resolved.stream, 16, list(data["mean"]), list(data["std"]), 0, 0)
    with torch.no_grad():
        right = sum(int((deployed(x).argmax(1) == y).sum()) for x, y in stream.test_batches(0, 50))
    assert_counts_alike(run.results["correct"][0], [right])
    assert run.results["status"] == "finished" and len(run.results["correct"]) == 3
    updates = {entry["task"] for entry in mambacl.audit(run.folder)["updates"]}
    assert updates == {1, 2}  # protected from the first trained task on


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_it_resumes(trained, tmp_path, monkeypatch):
    from mambacl.training.loop import Loop

    whole = mambacl.train(config(trained), out=str(tmp_path / "whole"))
    original = Loop._train_epoch
    for stop in (0, 1, 4):
        calls = []

        def stopping(self, task, epoch, calls=calls, stop=stop):
            if len(calls) == stop:
                raise KeyboardInterrupt
            calls.append(epoch)
            return original(self, task, epoch)

        monkeypatch.setattr(Loop, "_train_epoch", stopping)
        with pytest.raises(KeyboardInterrupt):
            mambacl.train(config(trained), out=str(tmp_path / f"run{stop}"))
        monkeypatch.setattr(Loop, "_train_epoch", original)
        again = mambacl.resume(tmp_path / f"run{stop}")
        assert again.results["correct"] == whole.results["correct"]


def test_a_checkpoint_with_another_classifier_is_refused(trained, tmp_path):
    wrong = config(trained)
    wrong["stream"]["tasks"] = [5, 5]
    with pytest.raises(UserError, match="has no linear classifier for the 5 classes"):
        mambacl.train(wrong, out=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="known_classes needs a checkpoint that knows the classes"):
        mambacl.train(config(trained) | {"pretrained": False}, out=str(tmp_path / "run"))


def test_in_a_loop_of_ones_own(tiny_model):
    model = tiny_model(num_classes=5)
    heads = SeparateHeads(model.num_features)
    heads.take_over(model.get_classifier())
    old = images(1)
    with torch.no_grad():
        logits = model(old)
    space = mambacl.NullSpace(model, "exact", leave=["head"])
    space.consolidate([old])  # before the first task
    heads.add_task(3, seed=0)
    optimizer = space.wrap(torch.optim.Adam([*space.parameters(), *heads.heads[-1].parameters()], lr=1e-3))
    for step in range(20):
        loss = (
            heads(model.forward_head(model.forward_features(images(4, seed=step + 1)), pre_logits=True)).square().sum()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    features = model.forward_head(model.forward_features(old), pre_logits=True)
    assert heads.widths == [5, 3] and not any(p.requires_grad for p in heads.heads[0].parameters())
    torch.testing.assert_close(heads(features)[:, :5], logits, rtol=1e-4, atol=1e-5)
