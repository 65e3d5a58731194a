"""Export to ONNX, OpenVINO and pt2: the same scores in a process that does not have mambacl."""

import errno
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from shipping_help import BACKBONES, elsewhere, needs, pictures, predictor
from tolerance import assert_near, rounding

from mambacl.classifiers import CLASSIFIERS
from mambacl.deploy import foreign, shipping
from mambacl.deploy.graph import Scores, exported, in_float64
from mambacl.deploy.onnx_graph import softplus
from mambacl.deploy.plain_classifiers import plain_classifier
from mambacl.deploy.predictor import Predictor
from mambacl.deploy.shipping import Shipped, ship
from mambacl.errors import UserError
from mambacl.ops import scan_tokens
from mambacl.ops.scan_traced import FORMS, traced

RIDGE: dict[str, Any] = {
    "method": "analytic", "features": {"mirror": "both"}, "classifier_options": {"width": 63},
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_timed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "MOST", shipping.FEWEST)


def shipped(
    model: Predictor, folder: Path, to: str, images: list[torch.Tensor] | None = None, **options: Any
) -> Shipped:
    path = folder / f"model{foreign.FORMATS[to].suffix}"
    return ship(model, path, to, images or pictures(8), "random", **{"batch": 2, **options})


def check(model: Predictor, folder: Path, to: str, preprocessing: bool = False, **options: Any) -> Shipped:
    """Ships a model and compares what it answers elsewhere, at three batch sizes."""
    done = shipped(model, folder, to, preprocessing=preprocessing, **options)
    given = torch.stack(pictures(8, seed=5))
    images = given.permute(0, 2, 3, 1).contiguous() if preprocessing else model.transforms.normalize(given)
    expected = model.scores(model.transforms.normalize(given))
    batches = [images[:3], images[3:4], images]
    found = elsewhere(done.files[-1], to, [batch.numpy() for batch in batches], folder)
    terms = Scores(model, preprocessing).terms()
    size = expected[expected.isfinite()].abs().max().item()
    for scores, wanted in zip(found, (expected[:3], expected[3:4], expected), strict=True):
        assert_near(scores, wanted, terms, f"batch of {len(wanted)}", size)
    assert done.same_answers == done.images == 8 and 0 <= done.difference <= done.allowed < 1e-3 * size
    assert done.images_per_second > 0 and done.our_images_per_second > 0 and done.source == "random"
    assert done.bytes == sum(Path(file).stat().st_size for file in done.files)
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]
    if to != "pt2":
        here = str(Path(shipping.__file__).parents[2]).encode()
        assert not any(here in Path(file).read_bytes() for file in done.files)  # no path of this machine
    return done


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "defocus" else pytest.mark.long) for name in BACKBONES]
)
def test_onnx_of_each_family(family: str, tmp_path: Path) -> None:
    needs("onnx")
    check(predictor(family, method="frozen"), tmp_path, "onnx")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, options", [("sd-lora", {"rank": 4}), pytest.param("bilora", {"frequencies": 30}, marks=pytest.mark.long)]
)
def test_pt2_of_changed_layers(method: str, options: dict[str, int], tmp_path: Path) -> None:
    """What a method adds to the backbone is exported and counts in the check in float64."""
    model = predictor("vim", method=method, options=options)
    with torch.no_grad():
        for name, parameter in model.method.tuning.modules.named_parameters():
            if name.endswith(("B", "coefficients")):
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    check(model, tmp_path, "pt2")


@pytest.mark.slow
@pytest.mark.extras
def test_onnx_of_ridge_with_depths_mirror_and_preprocessing(tmp_path: Path) -> None:
    needs("onnx")
    import onnx

    model = predictor("vim", **RIDGE)
    assert len(model.method.reader.indices) == 2 and len(model.method.views(torch.zeros(1, 3, 2, 2))) == 2
    done = check(model, tmp_path, "onnx", preprocessing=True, form="loop")
    stored = onnx.load(done.files[0])
    text = {entry.key: entry.value for entry in stored.metadata_props}
    assert_described(text, model)
    assert json.loads(text["mambacl.export"])["views"] == 2
    assert {node.op_type for node in stored.graph.node} >= {"Scan", "Cos", "Sin"}
    assert {opset.domain for opset in stored.opset_import} == {""}
    assert stored.graph.input[0].type.tensor_type.shape.dim[0].dim_param  # dynamic


def assert_described(text: dict[str, str], model: Predictor) -> None:
    assert json.loads(text["classes"]) == model.classes and json.loads(text["card"]) == model.description.card
    assert json.loads(text["preprocessing"]) == model.description.preprocessing and text["licence"] == "MIT"
    about = json.loads(text["mambacl.export"])
    assert about["input"] == "uint8 (n, height, width, 3), RGB" and about["scores"] == "estimates of the probabilities"


@pytest.mark.long
@pytest.mark.extras
@pytest.mark.parametrize("form", FORMS)
def test_onnx_of_each_form(form: str, tmp_path: Path) -> None:
    needs("onnx")
    import onnx

    done = check(predictor("defocus", method="frozen"), tmp_path, "onnx", form=form)
    assert done.form == form and list(done.images_per_second_by_form) == [form]
    kinds = [node.op_type for node in onnx.load(done.files[0]).graph.node]
    assert kinds.count("Scan") == (2 if form == "loop" else 0)  # one per block


@pytest.mark.long
@pytest.mark.extras
@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize("fast", ["loop", "chunked"])
def test_the_fastest_form_is_written(to: str, fast: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(to)
    measured, batches = shipping.per_second, []

    def slowed(calls: Any, batch: int) -> dict[str, float]:
        batches.append(batch)
        found = measured(calls, batch)
        return {form: speed * (1e6 if form == fast else 1) for form, speed in found.items()}

    monkeypatch.setattr(shipping, "per_second", slowed)
    done = check(predictor("defocus", method="frozen"), tmp_path, to, batch=5)
    assert done.form == fast and list(done.images_per_second_by_form) == ["loop", "chunked"]
    assert done.images_per_second == max(done.images_per_second_by_form.values()) and batches == [5, 5]
    graph = Path(done.files[-1]).read_bytes()
    assert ((b"Scan" if to == "onnx" else b"TensorIterator") in graph) == (fast == "loop")


def test_calls_are_timed_in_turns() -> None:
    order: list[str] = []
    found = shipping.per_second({name: partial(order.append, name) for name in "ab"}, 4)
    assert order == [*"aabb", *"ab" * shipping.FEWEST] and all(speed > 0 for speed in found.values())


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.parametrize("family", BACKBONES)
def test_openvino_of_each_family(family: str, tmp_path: Path) -> None:
    needs("openvino")
    import openvino

    model = predictor(family, **RIDGE)
    done = check(model, tmp_path, "openvino", preprocessing=True)
    assert [Path(file).suffix for file in done.files] == [".bin", ".xml"]
    stored = openvino.Core().read_model(done.files[1])
    text = {name: stored.get_rt_info(["mambacl", name]).astype(str) for name in shipping.described(model, True)}
    assert_described(text, model)


@pytest.mark.long
@pytest.mark.parametrize("family", BACKBONES)
def test_pt2_of_each_family(family: str, tmp_path: Path) -> None:
    check(predictor(family, method="frozen"), tmp_path, "pt2")


@pytest.mark.long
def test_pt2_of_ridge_and_its_metadata(tmp_path: Path) -> None:
    model = predictor("defocus", **RIDGE)
    done = check(model, tmp_path, "pt2", preprocessing=True)
    text = {foreign.PT2_TEXT: ""}
    torch.export.load(done.files[0], extra_files=text)
    assert_described(json.loads(text[foreign.PT2_TEXT]), model)


# Parts


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 10, 17])
@pytest.mark.parametrize("reverse", [False, True])
def test_traced_scans_agree_with_the_scan(groups: int, length: int, reverse: bool) -> None:
    draw = torch.Generator().manual_seed(length)
    u, delta = torch.randn(2, 3, length, 8, generator=draw, dtype=torch.float64)
    B, C = torch.randn(2, 3, length, groups, 4, generator=draw, dtype=torch.float64)
    A, D = torch.rand(8, 4, generator=draw, dtype=torch.float64), torch.rand(8, generator=draw, dtype=torch.float64)
    options: Any = {"log_A": True, "softplus": True, "reverse": reverse, "D": D, "z": delta, "bias": D}
    expected = scan_tokens(u, delta, A, B, C, "reference", **options)
    for form in ("unrolled", "chunked"):
        with traced(form):
            for found, wanted in zip(scan_tokens(u, delta, A, B, C, **options), expected, strict=True):
                assert_near(found, wanted, 4 * 4 * length, form)


CLASSIFIER_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("ridge", "nearest-mean", "lda", "gaussian", "separate", "cosine", "aligned", "kac")),
    ("nearest-mean", {"by": "angle"}),
    ("kac", {"variant": "paper"}),
    ("ridge", {"width": 33}),
    ("ridge", {"width": 0}),
    ("ridge", {"width": 40, "activation": "gelu"}),
    ("ridge", {"rule": "acil", "width": 40}),
    ("ridge", {"rule": "ranpac", "width": 40, "blocks": 2}),
    ("gaussian", {"unit": "features", "tukey": 0.5, "correlation": True}),
    ("gaussian", {"unit": "distance", "log_det": True}),
]


def test_plain_classifiers_are_tested() -> None:
    assert {name for name, _ in CLASSIFIER_OPTIONS} == set(CLASSIFIERS.names())


@pytest.mark.parametrize(("name", "options"), CLASSIFIER_OPTIONS, ids=str)
def test_plain_classifiers_have_the_same_scores(name: str, options: dict[str, Any]) -> None:
    draw = torch.Generator().manual_seed(3)
    features, labels = torch.randn(60, 6, generator=draw), torch.arange(60) % 3
    classifier = CLASSIFIERS.get(name)(6, **options)
    for first in (0, 3):
        classifier.add_task(3)
        if classifier.updates:
            classifier.update(features + first + labels[:, None], labels + first)
            classifier.finish_task()
    classifier.add_task(2)  # classes without images
    given = 3 * torch.randn(5, 6, generator=draw)
    with torch.no_grad():
        expected, found = classifier.scores(given), plain_classifier(classifier)(given)
    assert expected.shape == (5, 8) and torch.equal(found.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    weights = [tensor.abs().max() for tensor in plain_classifier(classifier).state_dict().values() if tensor.dim() == 2]
    size = max(expected[finite].abs().max().item(), *(float(w) for w in weights if w.isfinite()), 1.0)
    assert_near(found[finite], expected[finite], 64, name, size)


def test_softplus_has_a_small_relative_error() -> None:
    x = torch.linspace(-40, 40, 1001)
    relative = (softplus(x).double() / torch.nn.functional.softplus(x.double(), threshold=100) - 1).abs().max().item()
    assert relative < rounding(4)


def test_scores_in_float64_leave_the_model_unchanged() -> None:
    model = predictor("defocus", method="ease")
    module, images = Scores(model, False), model.transforms.normalize(torch.stack(pictures(2)))
    before = model.scores(images)
    with torch.no_grad(), in_float64(module):
        exact = module(images.double())
    assert exact.dtype == torch.float64 and torch.equal(model.scores(images), before)
    assert_near(before, exact, module.terms(), size=1.0)


# Refusals


def test_other_scores_are_refused_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, wrong = predictor(method="frozen"), predictor(method="frozen")
    with torch.no_grad():
        next(p for name, p in wrong.method.model.named_parameters() if "out_proj" in name)[0, 0] += 0.5
    monkeypatch.setattr(shipping, "exported", lambda _, form: exported(Scores(wrong, False), form))
    with pytest.raises(UserError, match=r"differ from ours by .* nothing was written"):
        shipped(model, tmp_path, "pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer", [float("nan"), float("inf")])
def test_nan_and_infinite_scores_are_refused(answer: float) -> None:
    model = predictor(method="frozen")
    images = torch.stack(pictures(2))
    found, allowed, _ = shipping.compared(
        model, Scores(model, False), lambda x: torch.full((len(x), 6), answer), images
    )
    assert not found <= allowed


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = predictor(method="frozen")
    program = exported(Scores(model, False), "chunked")
    monkeypatch.setattr(shipping, "exported", lambda *_: program)
    path = tmp_path / "model.pt2"
    path.write_bytes(b"mambacl.export of yesterday")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shipping.os, "replace", full)
        with pytest.raises(UserError, match="disk is full"):
            shipped(model, tmp_path, "pt2")

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data")

    with monkeypatch.context() as patch:
        patch.setattr(torch.export, "save", refuse)
        with pytest.raises(UserError, match=r"could not be written as pt2 .*check the free space"):
            shipped(model, tmp_path, "pt2")
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"] and path.read_bytes().endswith(b"yesterday")


def test_what_cannot_be_traced_is_refused() -> None:
    model = predictor(method="frozen")
    module = Scores(model, False)
    module.predict = lambda images: torch.zeros(int(images.sum()), 6)
    with pytest.raises(UserError, match="'frozen' with the classifier 'separate' cannot be traced"):
        exported(module, "chunked")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "find_spec", lambda name: None)
    for to in ("onnx", "openvino"):
        with pytest.raises(UserError, match=rf"needs the package {to}.*mambacl\[{to}\]"):
            shipping.checked(to, Path(f"a{foreign.FORMATS[to].suffix}"))
    assert shipping.checked("pt2", Path("a.pt2")).name == "pt2"


def test_pt2_has_no_loop() -> None:
    with pytest.raises(UserError, match="A file for pt2 has no loops: choose --form chunked"):
        shipping.checked("pt2", Path("a.pt2"), "loop")


@pytest.mark.extras
def test_an_operator_without_a_translation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("onnx")

    class Odd(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvalsh(x)

    program = torch.export.export(Odd(), (torch.eye(3),))
    with pytest.raises(UserError, match="cannot translate an operator of this model to ONNX"):
        foreign._onnx_bytes(program, {})
    monkeypatch.setattr(foreign, "LARGEST_ONNX", -1)
    with pytest.raises(UserError, match="at most 2 GB: use --to pt2"):
        foreign._onnx_bytes(program, {})
