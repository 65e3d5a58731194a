"""LGCL: its two terms, its texts from a file or a stand-in, and that it learns."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tiny_stream_help import accuracy, images_of, learn, task_labels, tiny_vit

from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.methods.lgcl import guidance
from mambacl.tuning.text_features import StoredTexts, random_direction, sentence

NAMES = ("cat", "dog", "cow", "ant")
PLAIN = {"stand_in": "random", "pool": 2}


def cosine(a, b):
    return ((a * b).sum() / (a.norm() * b.norm())).item()


@pytest.fixture
def texts(tmp_path):
    """Embeddings of four classes, with the first task's own."""
    tensors = {name: torch.randn(16, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(NAMES)}
    tensors["A photo of cat or dog."] = torch.ones(16)
    save_file(tensors, tmp_path / "texts.safetensors")
    return SimpleNamespace(path=tmp_path / "texts.safetensors", tensors=tensors)


def test_sentences_and_embeddings(texts):
    assert sentence(["cat"]) == "A photo of cat." and sentence(NAMES[:2]) == "A photo of cat or dog."
    stored = StoredTexts(texts.path, 16)
    ours = {name: tensor.double() for name, tensor in texts.tensors.items()}
    assert torch.equal(stored.of_class("cow"), ours["cow"])
    assert torch.equal(stored.of_task(NAMES[:2]), torch.ones(16, dtype=torch.float64))
    cow, ant = (ours[name] / ours[name].norm() for name in NAMES[2:])
    torch.testing.assert_close(stored.of_task(NAMES[2:]), (cow + ant) / 2)


def test_directions_without_text():
    one = random_direction(3, 8, seed=1)
    assert torch.equal(one, random_direction(3, 8, seed=1)) and abs(one.norm().item() - 1) < 1e-6
    assert not torch.equal(one, random_direction(4, 8, seed=1))
    assert not torch.equal(one, random_direction(3, 8, seed=2))


def test_guidance_by_hand():
    found, own, other = (torch.randn(3, 5, dtype=torch.float64) for _ in range(3))
    near = sum(1 - cosine(found[i], own[i]) for i in range(3)) / 3
    far = sum(cosine(found[i], other[i]) for i in range(3)) / 3
    assert guidance(found, own, None).item() == pytest.approx(near, rel=1e-12)
    assert guidance(found, own, other).item() == pytest.approx(near + far, rel=1e-12)


@pytest.mark.parametrize("variant", ["paper", "public-code"])
def test_the_loss_by_hand(variant, texts):
    """DualPrompt's loss and the two terms; with two tasks of which one is earlier, the negatives of tasks are known."""
    options = {"text": str(texts.path), "variant": variant, "pool": 2, "task_weight": 0.5, "class_weight": 0.25}
    setup = Setup(options=options, tasks=2, class_names=NAMES)
    method = METHODS.get("lgcl")(tiny_vit(double=True), setup)
    plain = METHODS.get("dualprompt")(method.model, Setup(options={"variant": variant, "pool": 2}))
    ours = {name: tensor.double() for name, tensor in texts.tensors.items()}
    for task, classes in enumerate((2, 1)):
        for one in (method, plain):
            one.start_task(Task(task, classes, 2 * task, seed=task))
            one.heads.double()
        plain.load_state_dict(method.state_dict())
        plain.heads.double()
        images, labels = images_of(0, 4)
        images, labels = images.double(), labels if task == 0 else torch.full((4,), 2)
        torch.manual_seed(3)
        found, _ = method.loss(images, labels)
        expected = plain.loss(images, labels)[0].item()
        feature, key = plain.prompted(images, task)[0], method.pools[0].keys[task]
        cow = ours["cow"] / ours["cow"].norm()
        expected += 0.5 * (1 - cosine(key, ours["A photo of cat or dog."] if task == 0 else cow))
        near = sum(1 - cosine(f, ours[NAMES[label]]) for f, label in zip(feature, labels, strict=True)) / 4
        if task:
            expected += 0.5 * cosine(key, ours["A photo of cat or dog."])
            torch.manual_seed(3)
            torch.randint(1, (4,))
            drawn = torch.randint(2, (4,))
            near += sum(cosine(f, ours[NAMES[n]]) for f, n in zip(feature, drawn, strict=True)) / 4
        if task or variant == "paper":
            expected += 0.25 * near
        assert found.item() == pytest.approx(expected, rel=1e-9)


def test_it_learns_and_follows_the_texts():
    method, losses = learn("lgcl", {**PLAIN, "class_weight": 1.0, "task_weight": 1.0}, epochs=20)
    for task in range(2):
        assert losses[task][-1][1] < losses[task][0][1] - 0.1
        assert accuracy(method, task, task_labels(task)) >= 0.9
    _, tasks = method.embeddings()
    before = METHODS.get("lgcl")(tiny_vit(), Setup(options=PLAIN, tasks=2))
    for task in range(2):  # keys move towards their text
        assert cosine(method.pools[0].keys[task], tasks[task]) > cosine(before.pools[0].keys[task], tasks[task])


def test_it_says_what_the_texts_are(texts):
    drawn = METHODS.get("lgcl")(tiny_vit(), Setup(options=PLAIN))
    assert "Random directions stand in for text embeddings" in drawn.overview()
    read = METHODS.get("lgcl")(tiny_vit(), Setup(options={"text": str(texts.path)}))
    assert str(texts.path) in read.overview()


def test_mistakes(texts, tmp_path):
    def build(names=NAMES, **options):
        return METHODS.get("lgcl")(tiny_vit(), Setup(options=options, tasks=2, class_names=names))

    for options in ({}, {"text": str(texts.path), "stand_in": "random"}):
        with pytest.raises(UserError, match=r"lgcl needs text embeddings.*set options\.text to a file.*stand_in"):
            build(**options)
    with pytest.raises(UserError, match=r"nowhere\.safetensors does not exist"):
        build(text=str(tmp_path / "nowhere.safetensors"))
    with pytest.raises(UserError, match="has no text embedding named 'yak': add one for each class"):
        build(("cat", "yak"), text=str(texts.path))
    save_file({"cat": torch.zeros(768)}, tmp_path / "wide.safetensors")
    with pytest.raises(UserError, match=r"'cat' in .* must be 16 finite values.*not \(768,\): use a text encoder of"):
        build(("cat",), text=str(tmp_path / "wide.safetensors"))
    with pytest.raises(UserError, match=r"lgcl: a pool of 1 is too small for 2 tasks"):
        build(stand_in="random", pool=1)
    method = build((), text=str(texts.path))
    method.start_task(Task(0, 2, 0, seed=0))
    with pytest.raises(UserError, match="names of the new classes are not known here"):
        method.loss(*images_of(0, 4))
