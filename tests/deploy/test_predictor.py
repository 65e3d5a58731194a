"""A model loaded from a run or a file, without the data: it predicts what `mambacl evaluate` counts."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_help import fewer_test_images, make_tree
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from small_run import CONFIG
from tolerance import assert_near

import mambacl
from mambacl.deploy.predictor import Predictor
from mambacl.errors import UserError
from mambacl.scenarios import right
from mambacl.training.api import _at_task_end
from mambacl.training.folder import RunFolder

STORED = Path(__file__).parents[1] / "goldens" / "run_folder" / "interrupted"
RUNS: dict[str, dict[str, Any]] = {
    "mamba-cl": {},
    "mamba-cl-ridge": {"classifier": "ridge", "classifier_options": {"width": 64}},
    "sequential-aligned": {"method": "sequential", "classifier": "aligned"},
    "frozen-mean": {"method": "frozen", "classifier": "nearest-mean", "features": {"depths": "all"}},
    "analytic": {
        "method": "analytic",
        "classifier_options": {"width": 100, "state_limit": None},
        "features": {"mirror": "both"},
        "stream": {**CONFIG["stream"], "transforms": {"image_size": 16, "resize": 20, "interpolation": "bilinear"}},
    },
    "seq-adapter": {"method": "seq-adapter"},
    "ease": {"method": "ease"},
    "aper": {"method": "aper"},
    "slca-kac": {"method": "slca", "classifier": "kac"},
    "lda-in-tasks": {
        "method": "analytic",
        "classifier": "lda",
        "stream": {**CONFIG["stream"], "scenario": "task"},
    },
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run, trained once; one pass, because its accuracy does not matter."""
    done: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in done:
            out = tmp_path_factory.mktemp("runs") / name
            training = {**CONFIG["training"], "passes": 1, "decay_after": []}
            with fewer_test_images(10):
                mambacl.train({**CONFIG, "training": training, **RUNS[name]}, out=str(out))
            done[name] = out
        return done[name]

    return run


def without_data(run: Path, to: Path) -> Path:
    """A copy of a run that cannot open its data set."""
    copy = shutil.copytree(run, to)
    text = (copy / "config.yaml").read_text()
    assert "dataset: fashion-mnist-small" in text
    (copy / "config.yaml").write_text(text.replace("dataset: fashion-mnist-small", "dataset: gone"))
    return copy


@pytest.mark.parametrize("name", RUNS)
def test_a_run_and_its_file_predict_what_evaluate_counts(
    name: str, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    run = trained(name)
    predictor = mambacl.load(without_data(run, tmp_path / "copy"), "cpu")
    predictor.save(tmp_path / "model.safetensors")
    from_file = mambacl.load(tmp_path / "model.safetensors", "cpu")
    assert from_file.classes == predictor.classes
    folder = RunFolder(run)
    with fewer_test_images(10):
        parts, checkpoint = _at_task_end(folder, folder.config())
        names = [parts.stream.dataset.class_names[c] for c in parts.stream.class_order]
        sizes, counted = [len(task) for task in parts.stream.tasks], []
        for task in range(len(sizes)):
            correct = 0
            for images, labels in parts.stream.test_batches(task, 32):
                with torch.no_grad():
                    expected = parts.method.answer(images)
                for loaded in (predictor, from_file):
                    assert torch.equal(loaded.scores(images), expected)
                correct += int(right(expected, labels, folder.config().stream.scenario, sizes, task).sum())
            counted.append(correct)
            # from the raw image to the name
            index = int(parts.stream._test[task][0])
            raw = parts.stream.dataset.test.image(index)
            [(images, _)] = list(parts.stream.test_batches(task, 10**6))
            assert torch.equal(predictor.transform(raw), images[0])
            best = predictor.predict(raw, top=1)[0]
            assert best.name == names[int(predictor.scores(images[:1]).argmax())]
    assert predictor.classes == names and counted == checkpoint.position.correct[-1]


def test_an_unfinished_run_knows_the_classes_of_its_finished_tasks(tmp_path: Path) -> None:
    run = without_data(STORED, tmp_path / "run")
    predictor = mambacl.load(run)
    stream = json.loads((run / "stream.json").read_text())
    assert predictor.classes == [stream["class_names"][c] for c in stream["tasks"][0]]
    assert predictor.scores(torch.zeros(2, 3, 16, 16)).shape == (2, len(predictor.classes))


@pytest.fixture
def predictor(trained: Callable[[str], Path]) -> Predictor:
    return mambacl.load(trained("analytic"), "cpu")


def test_the_batch_does_not_change_predictions(predictor: Predictor) -> None:
    images = torch.randint(256, (7, 3, 24, 31), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    together, alone = predictor.predict(images, top=10), predictor.predict(images, top=10, batch_size=1)
    inputs = torch.stack([predictor.transform(image) for image in images])
    each = torch.cat([predictor.scores(row[None]) for row in inputs])
    added = float(predictor.method.classifier.weights.abs().sum(1).max())  # cosines and sines are at most 1
    assert_near(each, predictor.scores(inputs), 1000, size=2 * added)  # the sums of two blocks and the lift; two views
    for one, other in zip(together, alone, strict=True):
        assert one.name == other.name and one.probabilities == pytest.approx(other.probabilities, abs=1e-3)
        assert sum(one.probabilities) == pytest.approx(1) and sorted(one.classes) == sorted(predictor.classes)
        assert list(one.probabilities) == sorted(one.probabilities, reverse=True)


def test_every_kind_of_image_gives_the_same_answer(predictor: Predictor, tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (20, 17, 3), dtype=np.uint8)
    picture, tensor = Image.fromarray(array), torch.from_numpy(array).permute(2, 0, 1)
    picture.save(tmp_path / "a.png")
    file = tmp_path / "a.png"
    [expected] = predictor.predict(file)
    for given in (str(file), [file], picture, [picture], tensor, tensor[None], tensor / 255, tensor.double() / 255):
        assert predictor.predict(given) == [expected]
    assert len(predictor.predict([file, picture, tensor], batch_size=2)) == 3 and predictor.predict([]) == []
    assert len(expected.classes) == 5 and len(predictor.predict(file, top=99)[0].classes) == len(predictor.classes)


@pytest.mark.parametrize(
    "given, words",
    [
        (torch.zeros(3, 8, 8) + 2, "values from 0 to 1"),
        (torch.full((3, 8, 8), torch.nan), "values from 0 to 1"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), "uint8 or floating-point"),
        (torch.zeros(1, 8, 8), r"\(3, h, w\)"),
        (torch.zeros(3, 0, 8), r"\(3, h, w\)"),
        (7, "not int"),
        ([7], "not int"),
        ("missing.png", "missing.png is missing"),
        (Path(__file__), "cannot be read as an image"),
    ],
)
def test_what_is_no_image_is_refused(predictor: Predictor, given: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        predictor.predict(given)


def test_scores_can_be_differentiated_further(predictor: Predictor) -> None:
    """They are computed in inference mode, but do not stay tensors of that mode."""
    size = predictor.transforms.size
    scores = predictor.scores(torch.zeros(2, 3, size, size))
    assert not scores.is_inference() and not scores.requires_grad
    scale = torch.ones((), requires_grad=True)
    (scale * scores).sum().backward()
    assert_near(scale.grad, scores.sum(), scores.numel(), size=scores.abs().max().item())  # type: ignore[arg-type]


def test_scores_need_normalised_images(predictor: Predictor) -> None:
    for images in (torch.zeros(1, 3, 8, 8), torch.zeros(3, 16, 16), torch.zeros(1, 3, 16, 16, dtype=torch.uint8)):
        with pytest.raises(UserError, match="make them with `transform`"):
            predictor.scores(images)
    with pytest.raises(UserError, match="at least 1"):
        predictor.predict([], top=0)


def test_a_bad_image_does_not_stop_the_others(predictor: Predictor) -> None:
    good = torch.zeros(3, 8, 8, dtype=torch.uint8)
    found = list(predictor.predict_each([good, "missing.png", good, good], batch_size=2))
    names = [None if isinstance(answer, UserError) else answer.classes for answer in found]
    best = predictor.predict(good)[0].classes
    assert names == [best, None, best, best] and "missing.png is missing" in str(found[1])


def test_loading_leaves_random_numbers_alone(trained: Callable[[str], Path]) -> None:
    run = trained("mamba-cl")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    mambacl.load(run, "cpu")
    assert torch.equal(torch.rand(4), expected)


def test_domains_share_their_classes(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for domain in ("day", "night"):
        tree = make_tree(tmp_path / domain, ("ant", "bee", "cat"), train=4, test=4)
        for split in ("train", "test"):
            shutil.move(tree / split, root / split / domain)
    stream = {"dataset": "domain-folders", "root": str(root), "scenario": "domain", "transforms": {"image_size": 16}}
    config = {**CONFIG, "method": "analytic", "classifier_options": {"width": 40}, "stream": stream}
    run = mambacl.train(config, out=str(tmp_path / "run"))
    files = {domain: sorted((root / "test" / domain).rglob("*.png")) for domain in ("day", "night")}
    predictor = mambacl.load(run.folder)
    predictor.save(tmp_path / "model.safetensors")
    assert predictor.classes == ["ant", "bee", "cat"]
    for loaded in (predictor, mambacl.load(tmp_path / "model.safetensors")):
        counted = [
            sum(answer.name == file.parent.name for file, answer in zip(found, loaded.predict(found), strict=True))
            for found in files.values()
        ]
        assert counted == run.results["correct"][-1]


# The file


def test_the_file_describes_the_model(trained: Callable[[str], Path], tmp_path: Path) -> None:
    run = trained("analytic")
    path = tmp_path / "new" / "model.safetensors"
    mambacl.load(run).save(path)
    with safe_open(path, "pt") as file:
        text, names = file.metadata(), list(file.keys())
        gram = file.get_tensor("task.classifier/gram")
    assert json.loads(text["classes"]) == mambacl.load(run).classes and text["licence"] == "no pre-trained weights"
    steps = json.loads(text["preprocessing"])
    assert steps[0] == {"resize": 20, "interpolation": "bilinear"} and "mirror" in steps[-1]
    card = json.loads(text["card"])
    assert card["tasks"] == 3 and card["metrics"] == json.loads((run / "results.json").read_text())["metrics"]
    assert card["backbone"] == "defocus_mamba" and card["data"] == "fashion-mnist-small"
    assert not gram.numel() and any(name.startswith("backbone.") for name in names)
    assert str(tmp_path) not in json.dumps(text) and str(run) not in json.dumps(text)
    mambacl.load(run).save(path)  # an exported model can be replaced


def test_any_class_name_survives(trained: Callable[[str], Path], tmp_path: Path) -> None:
    run = shutil.copytree(trained("frozen-mean"), tmp_path / "run")
    stream = json.loads((run / "stream.json").read_text())
    names = ["猫", "a/b", "caf\udce9", 'quo"te', *stream["class_names"][4:]]
    (run / "stream.json").write_text(json.dumps({**stream, "class_names": names}))
    mambacl.load(run).save(tmp_path / "model.safetensors")
    assert sorted(mambacl.load(tmp_path / "model.safetensors").classes) == sorted(names)


def test_a_trained_parameter_is_stored_once(trained: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mambacl.load(trained("mamba-cl")).save(path)
    with safe_open(path, "pt") as file:
        names = list(file.keys())
    assert not any(name.startswith(("method.model.", "method.space.", "task.")) for name in names)
    assert sum(name.startswith("method.heads.") for name in names) == 6


def test_a_classifier_without_its_sums_refuses_updates(trained: Callable[[str], Path], tmp_path: Path) -> None:
    mambacl.load(trained("analytic")).save(tmp_path / "model.safetensors")
    classifier = mambacl.load(tmp_path / "model.safetensors").method.classifier
    with pytest.raises(UserError, match="only predict"):
        classifier.update(torch.zeros(1, classifier.num_features), torch.zeros(1, dtype=torch.int64))


def test_what_is_no_model_is_refused(trained: Callable[[str], Path], tmp_path: Path) -> None:
    run, other = trained("mamba-cl"), tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(2)}, other)
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "empty").mkdir()
    begun = shutil.copytree(run, tmp_path / "begun")
    for name in ("task-end", "last", "previous"):
        (begun / "checkpoints" / f"{name}.safetensors").unlink()
    for path, words in (
        (tmp_path / "gone", "gone does not exist"),
        (tmp_path / "empty", "is not a run folder"),
        (begun, "has not finished a task yet"),
        (other, "is not a model that mambacl exported"),
        (tmp_path / "text.safetensors", "is not a model that mambacl exported"),
        (run / "checkpoints" / "task-end.safetensors", "is not a model that mambacl exported"),
    ):
        with pytest.raises(UserError, match=words):
            mambacl.load(path)
    for path, words in ((other, "not an exported model"), (tmp_path / "model.bin", "end in .safetensors")):
        with pytest.raises(UserError, match=words):
            mambacl.load(run).save(path)


def test_a_damaged_file_is_refused(trained: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    predictor = mambacl.load(trained("mamba-cl"))
    predictor.save(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="do not match their checksum"):
        mambacl.load(path)
    config = dataclasses.replace(predictor.description.config, method="frozen")
    predictor.description = dataclasses.replace(predictor.description, config=config)
    predictor.save(tmp_path / "wrong.safetensors")
    with pytest.raises(UserError, match="do not fit its description"):
        mambacl.load(tmp_path / "wrong.safetensors")
