"""LAE gives the numbers that were recorded from its public code, and trains in phases."""

from itertools import pairwise

import pytest
import torch
from prompt_recordings import FIRST, LATER, Recording, adam
from small_run import VIT

from mambacl.backbones import create_model
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.tuning.passes import run_blocks

OURS = {  # a recorded name within a block, and ours
    "adapter": {n: f"adapter.{n}" for n in ("down.weight", "down.bias", "up.weight", "up.bias", "scale")},
    "lora": {f"{kind}.{n}": f"{kind}.{n}" for kind in ("key", "value") for n in ("A", "B", "scale")},
    "prefix": {
        "key.prefix": "key",
        "value.prefix": "value",
        "key.scale": "key_scale",
        "value.scale": "value_scale",
    },
}


def parameters(recording, part, module):
    """By their recorded names."""
    named = dict(module.named_parameters())
    return {
        f"block{block}.{theirs}": named[f"{block}.{ours}"]
        for block in recording.config["adapt_blocks"]
        for theirs, ours in OURS[part].items()
    }


def recorded_method(part):
    recording = Recording(f"lae_{part}")
    c = recording.config
    options = {"part": part, "size": c["size"], "blocks": c["adapt_blocks"], "decay": c["ema_decay"]}
    options["head_first"] = c["freeze_epochs"] / c["epochs"]
    method = METHODS.get("lae")(recording.model(), Setup(options=options))
    with torch.no_grad():
        for name, parameter in parameters(recording, part, method.online).items():
            parameter.copy_(recording[f"init.pet.{name}"])
    return recording, method


@pytest.mark.parametrize("part", OURS)
def test_as_recorded(part):
    recording, method = recorded_method(part)
    c, classes = recording.config, recording.classes
    for task in range(c["tasks_run"]):
        method.start_task(Task(task, classes, task * classes, seed=task))
        method.heads.double()
        head = method.heads.heads[-1]
        with torch.no_grad():
            head.weight.copy_(recording[f"task{task}.init.head.weight"])
            head.bias.copy_(recording[f"task{task}.init.head.bias"])
        optimizer = method.wrap(adam(method, c["lr"]))
        for step in range(1, c["epochs"] + 1):
            name, tolerance = f"task{task}.step{step}", FIRST if (task, step) == (0, 1) else LATER
            phase = method.phase(step - 1, c["epochs"])
            method.enter(phase)
            assert (phase.name == "both") == bool(recording[f"{name}.pet_trained"])
            images, labels = recording.batch(task, step)
            online = parameters(recording, part, method.online)
            if step == 1:
                forward(recording, name, method, images, tolerance)
            loss, _ = method.loss(images, labels)
            recording.near(f"{name}.loss", loss, tolerance)
            optimizer.zero_grad()
            loss.backward()
            gradients = {"head.weight": head.weight, **{f"pet.{n}": p for n, p in online.items()}}
            for theirs, parameter in gradients.items():
                if f"{name}.grad.{theirs}" in recording:
                    recording.near(f"{name}.grad.{theirs}", parameter.grad, tolerance)
            optimizer.step()
            states = {"head.weight": head.weight, "head.bias": head.bias}
            states |= {f"pet.{n}": p for n, p in online.items()}
            states |= {f"offline_pet.{n}": p for n, p in parameters(recording, part, method.offline).items()}
            for theirs, parameter in states.items():
                if f"{name}.{theirs}" in recording:
                    recording.near(f"{name}.{theirs}", parameter, LATER)
        answers(recording, f"task{task}.end", method)
    inputs = ("backbone.", "init.", "test.")
    rest = {n for n in recording.tensors if not n.startswith(inputs) and ".init." not in n and ".batch" not in n}
    assert {n for n in rest - recording.compared if not n.endswith("pet_trained")} == set()


def forward(recording, name, method, images, tolerance):
    """The output of the first block, the feature and the logits, before the first update of a task."""
    with torch.no_grad():
        feature = method.features(images)
        recording.near(f"{name}.feature", feature, tolerance)
        recording.near(f"{name}.logits", method.classifier.scores(feature), tolerance)
        if f"{name}.block0.output" in recording:
            seen = []

            def change(block):
                seen.append(block.tokens)
                return method.online["0"].change() if block.index == 0 else None

            run_blocks(method.model, images, change)
            recording.near(f"{name}.block0.output", seen[1], tolerance)


@torch.no_grad()
def answers(recording, name, method):
    images = recording["test.images"]
    parts = {"online": method.online, "offline": method.offline}
    for kind, module in parts.items():
        if f"{name}.{kind}_probabilities" in recording:
            scores = method.classifier.scores(method.with_parts(images, module))
            recording.near(f"{name}.{kind}_probabilities", scores.softmax(1), LATER)
    recording.near(f"{name}.ensemble_score", method.predict(images), LATER)


def tiny(**options):
    return METHODS.get("lae")(create_model("vit", num_classes=0, **VIT["backbone_options"]), Setup(options=options))


@pytest.mark.parametrize("part", OURS)
def test_it_starts_as_the_backbone(part):
    """Adapters and LoRA add nothing at first; a prefix does."""
    method, images = tiny(part=part), torch.randn(2, 3, 16, 16)
    method.start_task(Task(0, 3, 0, seed=0))
    with torch.no_grad():
        same = torch.allclose(method.features(images), method.model(images), atol=1e-6)
    assert same == (part != "prefix")
    assert {name.split(".")[1] for name, _ in method.tuning.trained()} == {"online"}


def test_phases_by_share():
    method = tiny()
    method.start_task(Task(0, 3, 0, seed=0))
    assert {method.phase(epoch, 5).name for epoch in range(5)} == {"both"}
    method.start_task(Task(1, 3, 3, seed=1))
    for epochs, waiting in ((5, 3), (50, 30), (1, 0)):
        names = [method.phase(epoch, epochs).name for epoch in range(epochs)]
        assert names.count("head") == waiting and sum(a != b for a, b in pairwise(names)) == bool(waiting)
    assert method.phase(0, 5).roles == ("classifier",)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"part": "prompt"}, "adapter"),
        ({"blocks": [6]}, r"lae: options\.blocks = \[6\] must list some of the model's blocks, 0 to 5"),
        ({"part": "prefix", "size": 69}, r"lae: options\.size: 69 prompt tokens are too many for a model of 17 tokens"),
        ({"decay": 1.5}, "decay must be at least 0 and at most 1"),
    ],
)
def test_a_mistake_gets_one_sentence(options, words):
    with pytest.raises(UserError, match=words):
        tiny(**options)


def test_it_takes_no_other_classifier():
    model = create_model("vit", num_classes=0, **VIT["backbone_options"])
    with pytest.raises(UserError, match=r"'lae' answers with the heads that it trains.*leave classifier at auto"):
        METHODS.get("lae")(model, Setup(classifier="lda"))
