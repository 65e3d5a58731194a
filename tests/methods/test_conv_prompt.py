"""ConvPrompt gives the numbers that were recorded from public code; its parts by plain arithmetic."""

import math

import pytest
import torch
from prompt_recordings import FIRST, Place, Recording, replay
from small_run import CONFIG, VIT
from torch import nn
from training_help import assert_same_run, interrupted_after

import mambacl
from mambacl.backbones import create_model
from mambacl.classifiers.normed import NormedHeads
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.tuning.conv_prompts import ConvPrompts


def with_lower_rates(method, lr):
    """As the training loop makes the optimizer."""
    rates = method.rate_factors()
    named = method.named_parameters().items()
    return torch.optim.Adam(
        [{"params": [p for _, p in own], "factor": rates.get(role, 1.0)} for role, own in named], lr=lr
    )


def cosine(epoch, epochs):
    return 0.5 * (1 + math.cos(math.pi * epoch / epochs))


def own_generators(recording, rows):
    """Keeps those of the task that trains, of what is recorded for all generators."""
    for name in [n for n in recording.tensors if n.startswith("task") and "draws" not in n]:
        own = slice(*rows[int(name[4])])
        if name.endswith(("kernels", "kernel_biases")):
            recording.tensors[name] = recording[name][:, :, :, own]
        elif name.endswith("keys"):
            recording.tensors[name] = recording[name][own]


def test_conv_prompt():
    recording = Recording("convprompt")
    c = recording.config
    first, second = c["new_generators"]
    rows = [(0, first), (first, first + second)]
    old = {name: recording[f"task1.step3.{name}"][:, :, :, :first] for name in ("kernels", "kernel_biases")}
    own_generators(recording, rows)
    for name in ("weight", "bias"):  # where `replay` looks for heads
        parts = [recording[f"task{t}.init.head{t}.{name}"] for t in range(2)]
        recording.tensors[f"init.head.{name}"] = torch.cat(parts)
    options = {
        "variant": "public-code", "blocks": c["prompt_blocks"], "length": c["length"], "kernel": c["kernel"],
        "generators": c["generators_per_task"], "similarities": [0.5],
    }  # fmt: skip
    method = METHODS.get("conv-prompt")(recording.model(), Setup(options=options))
    prompts, grow = method.prompts, method.prompts.grow

    def grow_as_recorded(count, seed):
        task = len(prompts.generators)
        grow(count, seed, recording[f"task{task}.key_draws"])
        new = prompts.generators[-1]
        with torch.no_grad():
            new.kernels.copy_(recording["init.kernels"][:, :, :, slice(*rows[task])])
            new.biases.copy_(recording["init.kernel_biases"][:, :, :, slice(*rows[task])])

    prompts.grow = grow_as_recorded
    with torch.no_grad():
        prompts.shared.copy_(recording["init.shared_prompt"])
        for index, layer in ((0, "linear1"), (2, "linear2")):
            for name in ("weight", "bias"):
                getattr(prompts.matcher[index], name).copy_(recording[f"init.matcher.{layer}.{name}"])

    places = {
        "shared_prompt": Place(lambda: prompts.shared),
        "kernels": Place(lambda: prompts.generators[-1].kernels),
        "kernel_biases": Place(lambda: prompts.generators[-1].biases),
        "keys": Place(lambda: prompts.generators[-1].keys),
    }
    for index, layer in ((0, "linear1"), (2, "linear2")):
        for name in ("weight", "bias"):
            places[f"matcher.{layer}.{name}"] = Place(lambda i=index, n=name: getattr(prompts.matcher[i], n))
    for name, parameter in method.norms.parameters.items():
        places[f"backbone.{name.replace('blocks.', 'block')}"] = Place(lambda p=parameter: p)
    for task in range(2):
        head = f"head{task}"
        for name in ("weight", "bias"):
            places[f"{head}.{name}"] = Place(lambda t=task, n=name: getattr(method.heads.heads[t], n))
            places[f"{head}.norm.{name}"] = Place(lambda t=task, n=name: getattr(method.heads.heads[t].norm, n))

    def started(task):
        prompts.generators[-1].keys.requires_grad_()  # not in the optimizer, but the recording has its gradient
        with torch.no_grad():
            for name in ("weight", "bias"):
                getattr(method.heads.heads[-1].norm, name).copy_(recording[f"task{task}.init.head{task}.norm.{name}"])
        recording.near(f"task{task}.init.keys", prompts.generators[-1].keys, FIRST)
        if task == 0:
            images, _ = recording.batch(0, 1)
            queries, generated = [], prompts.generated
            prompts.generated = lambda block, query: queries.append((block, query)) or generated(block, query)
            recording.near("task0.step1.feature", method.features(images), FIRST)
            for block, query in queries:
                name = f"task0.step1.block{block}"
                recording.near(f"{name}.similarity", prompts.similarity(query), FIRST)
                recording.near(f"{name}.generated_prefix", generated(block, query), FIRST)
            assert [block for block, _ in queries] == c["prompt_blocks"]
            prompts.generated = generated

    replay(recording, method, places, schedule=cosine, optimizer=with_lower_rates, started=started)
    for name, parameter in (("kernels", "kernels"), ("kernel_biases", "biases")):  # the first task's are fixed
        torch.testing.assert_close(getattr(prompts.generators[0], parameter).detach(), old[name], rtol=1e-7, atol=1e-9)
    assert {
        name for name in recording.tensors if ".step3." in name and ".lr" not in name and ".loss.ce" not in name
    } <= (recording.compared)


# The parts


def test_convolutions():
    """Entry by entry, from the formula."""
    prompts = ConvPrompts([1, 3], length=2, kernel=2, width=6, heads=2, seed=0)
    prompts.grow(1, seed=1)
    prompts.grow(1, seed=2)
    query = torch.randn(3, 6)
    found = prompts.generated(3, query)
    assert found.shape == (3, 2, 2, 2, 3) and prompts.shared.shape == (2, 6, 8)
    similarity = prompts.similarity(query)
    for image, part, row, head, column in [(0, 0, 0, 0, 0), (1, 1, 1, 1, 2), (2, 0, 1, 1, 1), (2, 1, 0, 0, 2)]:
        expected = 0.0
        for p, own in enumerate(prompts.generators):
            shared = prompts.shared[1, 3 * part : 3 * part + 3, 4 * head : 4 * head + 4]
            window = shared[row : row + 2, column : column + 2]
            value = (own.kernels[part, 1, head, 0] * window).sum() + own.biases[part, 1, head, 0]
            expected = expected + similarity[image, p] * value
        torch.testing.assert_close(found[image, part, row, head, column], expected)
    keys = prompts.joined("keys", 0)
    assert keys.shape == (2, 1)  # no room for two orthogonal keys of one entry
    torch.testing.assert_close(keys.abs(), torch.ones(2, 1))


def test_keys_are_orthogonal_and_old_generators_fixed():
    prompts = ConvPrompts([0], length=2, kernel=2, width=24, heads=2, seed=0)
    for task in range(3):
        prompts.grow(2, seed=task)
    keys = prompts.joined("keys", 0).detach()
    torch.testing.assert_close(keys @ keys.T, torch.eye(6))
    assert [p.requires_grad for p in prompts.generators.parameters()] == [False] * 6 + [True] * 3


def tiny(setup=None, **options):
    torch.manual_seed(0)
    model = create_model("vit", num_classes=0, pretrained=False, **VIT["backbone_options"])
    small = {"length": 2, "kernel": 3, "generators": 2}
    return METHODS.get("conv-prompt")(model, Setup(options={**small, **options}, **(setup or {})))


def test_the_drift():
    method = tiny()
    method.start_task(Task(0, 2, 0, seed=0))
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 0, 1])
    with torch.no_grad():
        method.prompts.shared += 0.5
        method.prompts.matcher[0].bias -= 0.25
    plain, _ = method.task_loss(method.features(images), labels)
    assert torch.equal(method.loss(images, labels)[0], plain)  # not in the first task
    by_hand = 0.5 * method.prompts.shared.numel() + 0.25 * method.prompts.matcher[0].bias.numel()
    assert float(method.prompts.drift().detach()) == pytest.approx(by_hand, rel=1e-5)
    method.start_task(Task(1, 2, 2, seed=1))
    assert float(method.prompts.drift().detach()) == 0
    with torch.no_grad():
        method.prompts.shared += 1.0
    plain, _ = method.task_loss(method.features(images), labels + 2)
    found = float((method.loss(images, labels + 2)[0] - plain).detach())
    assert found == pytest.approx(0.01 * method.prompts.shared.numel(), rel=1e-3)


@pytest.mark.parametrize("variant", ["paper", "public-code"])
def test_what_trains_and_what_is_kept(variant):
    """Two tasks of some steps; the loss falls; a state in the middle of a task gives the same answers and losses."""
    method, other = tiny(variant=variant), tiny(variant=variant)
    weights = {name: p.detach().clone() for name, p in method.model.named_parameters()}
    for task in range(2):
        method.start_task(Task(task, 2, 2 * task, seed=task))
        generator = torch.Generator().manual_seed(task)
        kinds, labels = torch.randn(2, 3, 16, 16, generator=generator), torch.arange(6) % 2 + 2 * task
        images = kinds[labels - 2 * task] + 0.3 * torch.randn(6, 3, 16, 16, generator=generator)
        taken, losses = with_lower_rates(method, 0.01), []
        for _ in range(20):
            loss, _ = method.loss(images, labels)
            taken.zero_grad()
            loss.backward()
            taken.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.8 * losses[0]
    names = [name for name, _ in method.tuning.trained()]
    assert ("prompts.prompts.generators.1.keys" in names) == (variant == "paper")
    assert not any("before" in name or "generators.0" in name for name in names)
    changed = {name for name, p in method.model.named_parameters() if not torch.equal(p, weights[name])}
    norms = {
        f"{n}.{part}"
        for n, m in method.model.named_modules()
        if isinstance(m, nn.LayerNorm)
        for part in ("weight", "bias")
    }
    assert changed == (norms if variant == "public-code" else set())
    assert method.rate_factors() == ({"norms": 0.005} if variant == "public-code" else {})
    other.load_state_dict({name: tensor.clone() for name, tensor in method.state_dict().items()})
    with torch.no_grad():
        assert torch.equal(other.predict(images), method.predict(images))
        assert torch.equal(other.loss(images, labels)[0], method.loss(images, labels)[0])
    assert [name for name, _ in other.tuning.trained()] == names


@pytest.mark.long
@pytest.mark.usefixtures("few_test_images")
def test_a_run_whose_layer_norms_train_resumes_and_loads(tmp_path):
    """Bit for bit, with parameters of the backbone and modules beside it in one state; a loaded model answers alike."""
    options = {"variant": "public-code", "length": 2, "kernel": 3, "generators": 2}
    chosen = {"method": "conv-prompt", "options": options, **VIT, "pretrained": False}
    mambacl.train(CONFIG, out=str(tmp_path / "whole"), **chosen)
    with interrupted_after(7):
        mambacl.train(CONFIG, out=str(tmp_path / "broken"), **chosen)
    mambacl.resume(tmp_path / "broken")
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    evaluation = mambacl.evaluate(tmp_path / "whole")
    assert evaluation.counted == evaluation.recorded
    images = torch.rand(3, 3, 16, 16)
    whole, broken = (mambacl.load(tmp_path / name).method for name in ("whole", "broken"))
    with torch.no_grad():
        assert torch.equal(whole.answer(images), broken.answer(images)) and whole.answer(images).shape == (3, 10)


def test_heads_with_a_norm():
    heads = NormedHeads(4)
    heads.take_over(nn.Linear(4, 2))
    heads.add_task(3, seed=1)
    features = torch.randn(5, 4)
    known, own = heads.heads
    normed = (features - features.mean(1, keepdim=True)) / (features.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(heads(features), torch.cat((known(features), normed @ own.weight.T + own.bias), 1))
    other = NormedHeads(4)
    other.load_state_dict(heads.state_dict())
    assert torch.equal(other(features), heads(features))


def test_new_generators_by_similarity():
    method = tiny(similarities=[1.0, 0.4, 0.6, 0.0], generators=5)
    assert [method.new_generators(task) for task in range(5)] == [5, 1, 3, 2, 5]
    with pytest.raises(UserError, match=r"options\.similarities ends before task 6: give one more"):
        method.new_generators(5)
    assert tiny(generators=5).new_generators(7) == 5


def test_mistakes():
    with pytest.raises(UserError, match=r"options\.similarities must be from 0 to 1"):
        tiny(similarities=[1.5])
    with pytest.raises(UserError, match=r"similarities has 1 values for 2 tasks after the first: give one for each"):
        tiny({"tasks": 3}, similarities=[0.5])
    with pytest.raises(UserError, match=r"options\.blocks = \[9\] must list some of the model's blocks"):
        tiny(blocks=[9])
    assert list(tiny().prompts.places) == [0, 1, 2, 3, 4, 5]  # the model has six
