"""LoRA-DRS gives the numbers that were recorded from its public code."""

import copy

import pytest
import torch
from adapter_methods_help import accuracy, new_method, optimizer_of, step, task_data
from layer_recordings import LayerRecording, set_head
from prompt_recordings import FIRST, LATER

from mambacl.classifiers.triplet import augmented_triplet
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.training.recipe import Recipe

PARTS = {"key": "k", "value": "v"}
FACTORS = {"down": "A", "up": "B"}


def test_three_tasks_as_recorded():
    recording = LayerRecording("lora_drs")
    c = recording.config
    method = recording.method(
        "lora-drs", variant="public-code", rank=c["rank"], margin=c["margin"], triplet=c["lambda"]
    )
    index = {place.name: number for number, place in enumerate(method.changes.places)}
    recipe, names = Recipe(passes=c["epochs"], schedule="coda-cosine"), [f"blocks.{b}.attn.qkv" for b in range(2)]
    tokens = 12 * (1 + (c["image"] // c["patch"]) ** 2)

    def factors():
        found = {}
        for block, layer in enumerate(names):
            for part, letter in PARTS.items():
                change = method.changes.at(index[f"{layer}.{letter}"])[-1]
                found |= {f"block{block}.{part}_{word}": getattr(change, own) for word, own in FACTORS.items()}
        return found

    for task in range(c["tasks"]):
        head, name, tolerance = recording.start(method, task), f"task{task}", FIRST if task == 0 else LATER
        set_head(head, recording[f"{name}.initial.head.weight"], recording[f"{name}.initial.head.bias"])
        with torch.no_grad():
            for key, parameter in factors().items():
                parameter.copy_(recording[f"{name}.initial.{key}"])
        if task:
            with method.changes.times([-1.0] * task + [0.0]):
                moments = method.moments(recording.batches(task))
        method.start_epoch(0, lambda task=task: recording.batches(task))
        for block, layer in enumerate(names) if task else ():
            stored, space = f"{name}.block{block}.", method.space.spaces[layer]
            recording.near(stored + "subtracted_input_covariance", moments[layer] / tokens, tolerance)
            recording.near(stored + "singular_values", space.spectrum.flip(0) / tokens, tolerance)
            recording.near(stored + "kept_directions", space.ranks, 0)
            recording.near(stored + "update_projector", space.projector(1.0, "frobenius").dense(), tolerance)
        roles = method.named_parameters()
        groups = [{"params": [p for _, p in roles[role]], "lr": c[lr]} for role, lr in
                  (("backbone", "lr"), ("classifier", "head_lr"))]  # fmt: skip
        optimizer = method.wrap(torch.optim.Adam(groups))
        entropies, triplets, rates = [], [], []
        for at in range(2 * c["epochs"]):
            for group, lr in zip(optimizer.param_groups, ("lr", "head_lr"), strict=True):
                group["lr"] = c[lr] * recipe.lr_factor(at // 2)
                group["eps"] = 1e-8 / (1 - 0.999 ** (at + 1)) ** 0.5  # there it is added before the bias correction
            rates.append([group["lr"] for group in optimizer.param_groups])
            images, labels = recording.batch(task, at)
            features = method.features(images)
            entropy, triplet = method.task_loss(features, labels)[0], method.triplet(features, labels)
            entropies.append(entropy.detach())
            triplets.append(triplet.detach())
            loss, _ = method.loss(images, labels)
            assert abs(loss - entropy - c["lambda"] * triplet) < 1e-12
            optimizer.zero_grad()
            loss.backward()
            if at == 0:
                for key, parameter in factors().items():
                    recording.near(f"{name}.step0.gradient.{key}", parameter.grad, tolerance)
                recording.near(f"{name}.step0.gradient.head.weight", head.weight.grad, tolerance)
            optimizer.step()
            if at == 0:
                for key, parameter in factors().items():
                    recording.near(f"{name}.after_step0.{key}", parameter, LATER)
        recording.near(f"{name}.cross_entropy", torch.stack(entropies), LATER)
        recording.near(f"{name}.triplet", torch.stack(triplets), LATER)
        recording.near(f"{name}.learning_rates", torch.tensor(rates, dtype=torch.float64), FIRST)
        for key, parameter in factors().items():
            recording.near(f"{name}.final.{key}", parameter, LATER)
        recording.near(f"{name}.final.head.weight", head.weight, LATER)
        recording.near(f"{name}.final.head.bias", head.bias, LATER)
        method.fit_classifier(recording.batches(task))
        recording.near(f"{name}.class_means", method.classifier.means(), LATER)
        with torch.no_grad():
            images = recording["test.images"]
            recording.near(f"{name}.test.features", method.features(images), LATER)
            # of vectors of length 1; the released code adds 1e-8 to the length of the feature
            squares = 2 - 2 * method.predict(images)
            recording.near(f"{name}.test.squared_distances_to_means", squares, LATER)
    assert not recording.left(
        "gradient", "after_", "entropy", "triplet", "rates", "final", ".test.", "means", "covariance", "singular",
        "projector", "kept",
    )  # fmt: skip


def learned(family, tasks, steps=15, **options):
    """The method in the middle of the last task, and its optimizer."""
    method = new_method("lora-drs", family, rank=4, **options)
    for task in range(tasks):
        batch = task_data(task, 2, seed=task)
        method.start_task(Task(task, 2, 2 * task, seed=task))
        optimizer = optimizer_of(method)
        method.start_epoch(0, lambda batch=batch: [batch])
        for _ in range(steps):
            step(method, optimizer, batch)
        if task < tasks - 1:
            method.fit_classifier([batch])
    return method, optimizer, batch


@pytest.mark.parametrize("variant", ["paper", "public-code"])
@pytest.mark.parametrize("family", ["vit_nano", "defocus_mamba_nano"])
def test_updates_stay_inside_and_a_state_goes_on(family, variant):
    method, optimizer, batch = learned(family, 2, steps=2, variant=variant, share=0.9)
    assert 0 < min(method.free().values()) < 1
    before = {name: parameter.detach().clone() for name, parameter in method.current_changes().items()}
    other = METHODS.get("lora-drs")(new_method("lora-drs", family).model, method.setup)
    other.load_state_dict(method.state_dict())
    other.load_task_state_dict(method.task_state_dict())
    theirs = optimizer_of(other)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(method, optimizer, batch)
    step(other, theirs, batch)
    for name, parameter in method.current_changes().items():
        assert torch.equal(parameter, other.current_changes()[name])
    for index, place in enumerate(method.changes.places):
        dense = method.space.spaces[place.layer_name].projector(1.0, "none").dense()
        moved = (method.current_changes()[f"{index}.A"] - before[f"{index}.A"]).detach()
        assert moved.abs().max() > 1e-6
        torch.testing.assert_close(moved @ dense.to(moved), moved, rtol=0, atol=1e-6)
        moved = (method.current_changes()[f"{index}.B"] - before[f"{index}.B"]).detach()
        if place.inputs == place.outputs:
            torch.testing.assert_close(dense.to(moved) @ moved, moved, rtol=0, atol=1e-6)
    state, _ = method.for_answers(method.state_dict(), method.task_state_dict())
    assert not any("basis" in name for name in state) and len(state) < len(method.state_dict())


@pytest.mark.parametrize("family", ["vit_nano", "vim_nano"])
def test_it_learns(family):
    method, _, batch = learned(family, 2)
    method.fit_classifier([batch])
    assert accuracy(method, range(2)) > 0.5  # chance is 0.25


def test_the_triplet_loss_by_hand():
    f = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]], dtype=torch.float64)
    labels, known = torch.tensor([4, 4, 5]), torch.tensor([True, False])
    means = torch.tensor([[0.0, -2.0], [0.0, 2.0]], dtype=torch.float64)
    # the first image: sqrt 2 to its class, 2 to the other and sqrt 2 to the known mean; the second: sqrt 2, sqrt 2, 2;
    # the third, alone in its class: 1e-6 (0), sqrt 2, sqrt 2
    expected = (0.5 + 0.5 + 0.0) / 3
    found = augmented_triplet(f, labels, means, known, margin=0.5)
    assert abs(found - expected) < 1e-5
    alone = augmented_triplet(f[:2], labels[:2], means[:0], known[:0], margin=0.5)
    assert abs(alone) < 1e-12


def test_a_mistake_gets_one_sentence():
    with pytest.raises(UserError, match=r"lora-drs: options\.rank 33 is too large for blocks\.0\.attn\.qkv\.k with 32"):
        new_method("lora-drs", "vit_nano", rank=33)
    with pytest.raises(UserError, match="share must be above 0 and at most 1"):
        new_method("lora-drs", "vit_nano", share=0.0)
    model = new_method("lora-drs", "vit_nano").model
    with pytest.raises(UserError, match="'lora-drs' trains with class means: leave classifier at auto"):
        METHODS.get("lora-drs")(model, Setup(classifier="separate"))
