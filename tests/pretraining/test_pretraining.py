"""Whole pre-trainings: what they learn, how they continue, what they export, what they refuse."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pretraining_help import NAME, OPTIONS, Clock, open_halves, stop_after
from safetensors.torch import load_file

from mambacl.backbones import create_model
from mambacl.cli import main
from mambacl.errors import UserError
from mambacl.pretraining import PretrainConfig, loop, pretrain
from mambacl.pretraining.loop import CHECKPOINT, Pretraining
from mambacl.pretraining.schedule import ByClock
from mambacl.training import display
from mambacl.training.checkpoints import Background
from mambacl.training.folder import RunFolder
from mambacl.training.loop import TrainingError
from mambacl.training.progress import Progress, State
from mambacl.training.watching import look

LEARNS = {"epochs": 12, "batch_size": 12, "lr": 5e-3, "ema": 0.9, "mix_share": 0.2, "drop_path": 0.0,
          "jitter": 0.1, "erase": 0.1, "stream": {"dataset": NAME, "transforms": {"augment": "flip"}}}  # fmt: skip


def same_tensors(one: Path, other: Path) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_it_learns(tmp_path: Path) -> None:
    made = pretrain(out=str(tmp_path / "out"), **{**OPTIONS, **LEARNS})
    assert min(made.accuracy.values()) > 0.8, made.accuracy  # chance is a quarter
    losses = [event["loss"] for event in RunFolder(tmp_path / "out").events("epoch", "epoch")]
    assert len(losses) == 12 and losses[-1] < losses[0]
    evaluated = [event["epoch"] for event in RunFolder(tmp_path / "out").events("evaluation")]
    assert evaluated == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("epochs", [1, 3])
def test_an_interrupted_training_ends_the_same(epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, on the CPU: with drop path, mixing, augmentation and the average."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain(out=str(whole), **OPTIONS)
    with monkeypatch.context() as patch:
        stop_after(patch, Pretraining, "_train_epoch", epochs)
        with pytest.raises(KeyboardInterrupt):
            pretrain(out=str(parts), **OPTIONS)
    assert not (parts / "pretraining.json").exists()
    torch.rand(5)  # what the program does in between plays no part
    pretrain(out=str(parts), **OPTIONS)
    assert same_tensors(whole / "defocus_mamba.safetensors", parts / "defocus_mamba.safetensors")
    assert same_tensors(whole / CHECKPOINT, parts / CHECKPOINT)
    kept = ("event", "epoch", "loss", "accuracy", "lr", "raw", "ema")
    lines = [
        [{key: event.get(key) for key in kept} for event in map(json.loads, (folder / "metrics.jsonl").open())]
        for folder in (whole, parts)
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 6


def test_watch_follows_a_pretraining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    seen: list[str] = []
    trained = Pretraining._train_epoch

    def watched(self: Pretraining, *arguments: Any) -> None:
        trained(self, *arguments)
        seen.append("\n".join(look(folder).lines()))

    monkeypatch.setattr(Pretraining, "_train_epoch", watched)
    monkeypatch.setattr(display, "WRITTEN", 0.0)
    assert look(folder).status == "waiting"
    with monkeypatch.context() as patch:
        stop_after(patch, Pretraining, "_save", 2)
        with pytest.raises(KeyboardInterrupt):
            pretrain(out=str(folder), **OPTIONS)
    assert "running, epoch 3/4 " in seen[2] and "after epoch 2: top-1 " in seen[2]
    written = RunFolder(folder).progress()
    RunFolder(folder).write_progress({**written, "notes": {**written["notes"], "pid": ended_process()}})
    assert main(["watch", str(folder)]) == 1
    assert "The same command `mambacl pretrain` continues it." in capsys.readouterr().out
    pretrain(out=str(folder), **OPTIONS)
    assert main(["watch", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: finished\n  last epoch (4): loss " in out and "after epoch 4: top-1 " in out


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("every, interrupted", [(0.0, True), (1e9, False)])
def test_checkpoints_in_the_background(
    every: float, interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: written by a thread, not after each epoch, but always after the last."""
    pretrain(out=str(tmp_path / "whole"), **OPTIONS)
    monkeypatch.setattr(loop, "Background", lambda on: Background(True))
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", every)
    options = {**OPTIONS, "out": str(tmp_path / "background")}
    if interrupted:
        with monkeypatch.context() as patch:
            stop_after(patch, Pretraining, "_train_epoch", 2)
            with pytest.raises(KeyboardInterrupt):
                pretrain(**options)
    pretrain(**options)
    assert same_tensors(tmp_path / "whole" / CHECKPOINT, tmp_path / "background" / CHECKPOINT)


def test_by_minutes_it_follows_the_clock_and_ends(tmp_path: Path) -> None:
    clock = Clock(1.0)  # each reading takes a second
    made = pretrain(out=str(tmp_path / "out"), clock=clock, **{**OPTIONS, "minutes": 1.0, "evaluate_every": 100})
    results = json.loads((made.folder / "pretraining.json").read_text())
    assert 60 <= results["seconds"] < 70 and results["steps"] > 20 and results["epochs"] > 4
    events = RunFolder(made.folder).events("epoch")
    rates = [event["lr"] for event in events]
    assert max(rates) > 1.2e-3 > 3e-4 > rates[-1]
    assert [event["progress"] for event in events] == sorted(event["progress"] for event in events)


def test_by_minutes_an_interrupted_training_uses_only_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**OPTIONS, "minutes": 1.0, "evaluate_every": 100, "out": str(tmp_path / "out")}
    with monkeypatch.context() as patch:
        stop_after(patch, Pretraining, "_train_epoch", 2)
        with pytest.raises(KeyboardInterrupt):
            pretrain(clock=Clock(1.0), **options)
    clock = Clock(1.0)
    made = pretrain(clock=clock, **options)
    seconds = json.loads((made.folder / "pretraining.json").read_text())["seconds"]
    assert 60 <= seconds < 70 and clock.now < 60


@pytest.mark.parametrize("evaluate_every, stopped", [(2, 0), (1, 2), (100, 0)])
def test_progress_counts_all_images_of_the_training_and_its_evaluations(
    evaluate_every: int, stopped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Progress, State]] = []
    step = Progress.step

    def noted(self: Progress, images: int) -> None:
        step(self, images)
        seen.append((self, dataclasses.replace(self.state)))

    options = {**OPTIONS, "evaluate_every": evaluate_every, "out": str(tmp_path / "out")}
    if stopped:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            stop_after(patch, Pretraining, "_train_epoch", stopped)
            pretrain(**options)
    monkeypatch.setattr(Progress, "step", noted)
    pretrain(**options)
    assert len({id(progress) for progress, _ in seen}) == 1 and set(seen[0][0].left.values()) == {0.0}
    first = seen[0][1]
    assert first.place() == f"epoch {stopped + 1}/4 training 16/64"  # 72 images: without the last, smaller batch
    assert seen[-1][1].phase == "evaluating" and seen[-1][1].done == seen[-1][1].of == 40


def test_by_minutes_the_time_left_is_that_of_the_clock() -> None:
    now = [100.0]
    schedule = ByClock(60.0, lambda: now[0], spent=10.0)
    assert schedule.deadline() == 50.0
    now[0] = 120.0
    schedule.progress(1.0)
    assert schedule.deadline() == 30.0
    now[0] = 999.0
    assert schedule.progress(2.0) == 1.0 and schedule.deadline() == 0.0


def test_the_export_is_the_average_in_half_precision(tmp_path: Path) -> None:
    """It loads by name, and the logits are those of the rounded average."""
    made = pretrain(out=str(tmp_path / "out"), **OPTIONS)
    assert made.weights.name == "defocus_mamba.safetensors"
    model = create_model("defocus_mamba", pretrained=made.weights, num_classes=4, **OPTIONS["backbone_options"]).eval()
    kept = load_file(made.folder / CHECKPOINT)
    average = {name.removeprefix("average."): value for name, value in kept.items() if name.startswith("average.")}
    assert all(value.dtype == torch.float16 for value in load_file(made.weights).values())
    twin = create_model("defocus_mamba", num_classes=4, **OPTIONS["backbone_options"]).eval()
    twin.load_state_dict({name: value.half().float() for name, value in average.items()})
    pixels = open_halves(None).test
    images = torch.stack([pixels.image(index) for index in range(8)]).float() / 255
    assert torch.equal(model(images), twin(images))
    text = (made.folder / "MODEL_CARD.md").read_text()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for words in (f"{parameters:,} parameters", "72 training and 40 test", f"{made.accuracy['file']:.2%}", "Licence",
                  "commit", "| `mixup` | 0.8 |", "num_classes=4"):  # fmt: skip
        assert words in text, words


def test_a_head_that_does_not_train_is_not_exported(tmp_path: Path) -> None:
    """De-focus Mamba's auxiliary head: a plain softmax classifier leaves it alone."""
    options = {**OPTIONS, "epochs": 1, "backbone_options": {**OPTIONS["backbone_options"], "use_aux_loss": True}}
    names = load_file(pretrain(out=str(tmp_path / "out"), **options).weights)
    assert "head.weight" in names and not any(name.startswith("head2") for name in names)


@pytest.mark.parametrize(
    "name, config",
    [
        ("vim", {"img_size": 16, "patch_size": 4, "stride": 4, "embed_dim": 32, "depth": 2}),
        ("vmamba", {"depths": (1, 1), "dims": 16, "imgsize": 16}),
        ("mambavision_nano", {"dim": 8, "in_dim": 4, "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2)}),
    ],
)
def test_every_family_trains(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    """With running statistics and counters in the average and in the file, in bf16."""
    options = {**OPTIONS, "backbone": name, "backbone_options": config, "epochs": 1, "precision": "bf16"}
    made = pretrain(out=str(tmp_path / "out"), **options)
    create_model(name, pretrained=made.weights, num_classes=4, **config)
    start = create_model(name, num_classes=4, **config).state_dict()
    assert load_file(made.weights).keys() == start.keys()


def test_the_norm_of_the_gradient_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    original = torch.nn.utils.clip_grad_norm_

    def noted(parameters: Any, limit: float) -> Any:
        parameters = list(parameters)
        original(parameters, limit)
        norms = [parameter.grad.norm() for parameter in parameters if parameter.grad is not None]
        limits.append(float(torch.stack(norms).norm()))

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noted)
    pretrain(out=str(tmp_path / "out"), **{**OPTIONS, "epochs": 1, "clip": 0.01})
    assert len(limits) == 4 and max(limits) <= 0.01 * (1 + 1e-5)  # four full batches of sixteen
    pretrain(out=str(tmp_path / "free"), **{**OPTIONS, "epochs": 1, "clip": 0.0})
    assert len(limits) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_recorded_step_clips_and_averages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps recorded as a CUDA graph and without: the same average, to rounding."""
    options = {**OPTIONS, "device": "cuda", "precision": "float32", "drop_path": 0.0, "clip": 0.1}
    recorded = pretrain(out=str(tmp_path / "recorded"), **options)
    with monkeypatch.context() as patch:
        patch.setattr("mambacl.training.step.TrainingStep._record", lambda *_: None)
        plain = pretrain(out=str(tmp_path / "plain"), **options)
    a, b = load_file(recorded.weights), load_file(plain.weights)
    for name in a:
        assert torch.allclose(a[name].float(), b[name].float(), rtol=1e-2, atol=1e-3), name


# Refusals


def test_a_folder_of_another_training_is_kept(tmp_path: Path) -> None:
    options = {**OPTIONS, "epochs": 1, "out": str(tmp_path / "out")}
    made = pretrain(**options)
    assert pretrain(**{**options, "eval_batch_size": 7}) == made  # finished
    with pytest.raises(UserError, match=r"another pre-training \(it differs in lr\)"):
        pretrain(**options, lr=1e-4)
    again = pretrain(**options, lr=1e-4, overwrite=True)
    assert again.weights == made.weights
    (tmp_path / "out" / "config.yaml").write_text("name: x")
    with pytest.raises(UserError, match="holds a run of `mambacl train`"):
        pretrain(**options)


def test_changed_data_and_a_damaged_checkpoint_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**OPTIONS, "out": str(tmp_path / "out")}
    with monkeypatch.context() as patch:
        stop_after(patch, Pretraining, "_train_epoch", 1)
        with pytest.raises(KeyboardInterrupt):
            pretrain(**options)
    with monkeypatch.context() as patch:
        patch.setattr("mambacl.data.dataset.DataSet.fingerprint", lambda self: "other")
        with pytest.raises(UserError, match=r"cannot be continued \(the data have changed\): start again"):
            pretrain(**options)
    path = tmp_path / "out" / CHECKPOINT
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"cannot be continued .*start again with --overwrite"):
        pretrain(**options)


def test_a_loss_that_is_not_finite_stops_the_training(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="The loss of epoch 1 is not finite: lower lr"):
        pretrain(out=str(tmp_path / "out"), **{**OPTIONS, "lr": 1e30, "clip": 0.0, "warmup": 0.0})


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "Name the images to train on"),
        ({"stream": {"dataset": NAME, "tasks": 5}}, "all classes at once: remove stream.tasks"),
        ({"stream": {"dataset": NAME, "scenario": "domain"}}, "remove stream.scenario"),
        ({"stream": {"dataset": NAME}, "minutes": 0}, "minutes must be positive"),
        ({"stream": {"dataset": NAME}, "ema": 1.0}, "ema must be at least 0 and below 1"),
        ({"stream": {"dataset": NAME}, "backbone_options": {"num_classes": 3}}, "the data set sets it"),
        ({"stream": {"dataset": NAME}, "backbone_options": {"drop_path_rate": 0.1}}, "set drop_path"),
        ({"stream": {"dataset": NAME}, "epoch": 3}, "no option 'epoch'. Did you mean 'epochs'"),
        ({"stream": {"dataset": NAME}, "backbone": "vim_mino"}, "no model 'vim_mino'. Did you mean 'vim_mini'"),
        ({"stream": {"dataset": NAME, "transforms": {"image_size": 30}}}, "Images of 30 x 30 pixels do not divide"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        pretrain(out=str(tmp_path / "out"), **options)
    assert not any(tmp_path.iterdir())


def test_the_default_folder_has_the_names_of_model_and_data() -> None:
    config = PretrainConfig(backbone="vim_mini", seed=3)
    assert config.folder == Path("pretrained/vim_mini-folders-3")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["pretrain", "vim_nano", "--stream.dataset", NAME, "--epochs", "1", "--batch-size", "24", "--device", "cpu",
             "--backbone_options.depth", "1", "--backbone_options.embed_dim", "16"]  # fmt: skip
    assert main(words) == 0
    folder = tmp_path / "pretrained" / f"vim_nano-{NAME}-0"
    out = capsys.readouterr().out
    assert out.startswith("top-1: ") and f"Weights: {folder.relative_to(tmp_path) / 'vim_nano.safetensors'}" in out
    assert main([*words, "--stream.tasks", "2"]) == 2
    assert "remove stream.tasks" in capsys.readouterr().err
