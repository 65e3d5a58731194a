"""The server in this process: answers, limits, errors, and when it changes its model."""

import asyncio
import dataclasses
import io
import json
import shutil
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_help import fails
from data_help import fewer_test_images, picture, write_images
from PIL import Image
from serving_help import encoded, photos, small_run
from small_run import CONFIG

import mambacl
from mambacl.cli import main
from mambacl.cli.serving import MOST_PIXELS
from mambacl.deploy.rate import RateLimit
from mambacl.deploy.serve_options import Refusal, ServeOptions
from mambacl.deploy.uploads import decoded
from mambacl.errors import UserError

pytest.importorskip("fastapi")
pytest.importorskip("python_multipart")
from fastapi.testclient import TestClient

from mambacl.deploy.batching import Batcher
from mambacl.deploy.current import CurrentModel, version_of
from mambacl.deploy.server import create_app

pytestmark = pytest.mark.extras


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="module")
def current(run: Path) -> CurrentModel:
    return CurrentModel(str(run), "cpu", poll=3600)


def client_of(current: CurrentModel, **options: Any) -> Any:
    app = create_app(ServeOptions(model=str(current.place), **options), current)
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture
def client(current: CurrentModel) -> Iterator[Any]:
    with client_of(current) as made:
        yield made


def refused(response: Any, status: int, words: str) -> None:
    content = response.json()
    assert response.status_code == status and list(content) == ["error"], content
    assert words in content["error"] and content["error"].endswith(".") and "\n" not in content["error"]


# Answers


def test_answers_are_those_of_predict_json(
    client: Any, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for file, data in zip(files, photos(3), strict=True):
        file.write_bytes(data)
    capsys.readouterr()
    words = [*map(str, files), "--top", "3", "--json", "--device", "cpu", "--unknown-below", "0.4"]
    assert main(["predict", str(run), *words]) == 0
    rows = json.loads(capsys.readouterr().out)
    sent = [("file", (str(file), file.read_bytes())) for file in files]
    response = client.post("/predict?top=3&unknown_below=0.4", files=sent)
    assert response.status_code == 200 and response.json() == rows
    for file, row in zip(files, rows, strict=True):  # one at a time, as the body
        [found] = client.post("/predict?top=3&unknown_below=0.4", content=file.read_bytes()).json()
        assert [best["class"] for best in found["predictions"]] == [best["class"] for best in row["predictions"]]
        assert found["file"] == "image" and found["unknown"] == row["unknown"]


def test_a_share_to_reject_becomes_a_threshold(client: Any, current: CurrentModel) -> None:
    rates = current.served.predictor.rejecting(0.2)
    [image] = photos(1)
    [asked] = client.post("/predict?unknown=0.2", content=image).json()
    with client_of(current, unknown=0.2) as usual:
        [found] = usual.post("/predict", content=image).json()
        [own] = usual.post("/predict?unknown_below=0.001", content=image).json()
    assert found == asked and found["calibrated"] and client.get("/health").json()["calibrated"]
    assert found["unknown_below"]["threshold"] == round(rates.threshold, 6)
    assert found["unknown"] == (found["predictions"][0]["probability"] < rates.threshold)
    assert own["unknown_below"]["threshold"] == 0.001 and not own["unknown"]
    refused(client.post("/predict?unknown=0.2&unknown_below=0.4", content=image), 400, "exclude each other")


def test_a_model_without_calibration_is_refused_if_images_are_to_be_called_unknown(tmp_path: Path) -> None:
    with fewer_test_images(10):
        options = {"method": "analytic", "classifier_options": {"width": 64}, "features": {"kept": 0}}
        mambacl.train({**CONFIG, **options}, out=str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"not calibrated, because .* --features\.kept 500"):
        CurrentModel(str(tmp_path / "run"), "cpu", 3600, unknown=0.05)
    with client_of(CurrentModel(str(tmp_path / "run"), "cpu", 3600)) as client:
        refused(client.post("/predict?unknown=0.05", content=photos(1)[0]), 400, "not calibrated")
        assert not client.get("/health").json()["calibrated"]


def test_a_bad_file_does_not_stop_the_others(client: Any) -> None:
    [good] = photos(1)
    response = client.post("/predict", files=[("a", ("a.png", good)), ("b", ("b.txt", b"words"))])
    first, second = response.json()
    assert response.status_code == 200 and first["predictions"] and "error" not in first
    assert second["file"] == "b.txt" and second["error"].startswith("b.txt is no image") and len(second) == 2


def test_health_and_readiness(client: Any, run: Path) -> None:
    about, model = client.get("/health").json(), mambacl.load(run, "cpu")
    assert about["classes"] == model.classes and about["tasks"] == 3 and about["status"] == "ok"
    assert about["version"] == client.post("/predict", content=photos(1)[0]).headers["x-model-version"]
    assert about["model"] == "small" and about["limits"]["max_pixels"] == ServeOptions("").max_pixels
    assert str(run) not in json.dumps(about) and client.get("/ready").json() == {"ready": True}


def test_the_page_needs_nothing_else(client: Any) -> None:
    response = client.get("/")
    assert response.headers["content-type"].startswith("text/html") and "<title>small</title>" in response.text
    assert "http:" not in response.text and "https:" not in response.text and "default-src 'none'" in response.text
    for path in ("/docs", "/redoc", "/openapi.json"):
        refused(client.get(path), 404, "There is no page")


# Errors


def test_what_is_no_image_is_refused(client: Any) -> None:
    [good] = photos(1)
    for body, status, words in (
        (b"", 400, "has no image"),
        (b"only words", 415, "is no image that can be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", 415, "is no image"),
        (good[: len(good) // 2], 422, "is broken (image file is truncated"),
        (encoded(picture(0, (40, 40)), "JPEG")[:400], 422, "is broken"),
    ):
        refused(client.post("/predict", content=body), status, words)
    refused(client.post("/predict", files=[("a", ("a.png", b""))]), 422, "a.png is empty")
    refused(client.post("/predict", files=[("a", ("a.png", b"x")), ("b", ("b", b"y"))]), 415, "a.png is no image")
    form = {"content-type": "multipart/form-data; boundary=a"}
    refused(client.post("/predict", content=b"--a\r\nnothing", headers=form), 400, "The ")
    refused(client.post("/predict", data={"a": "b"}, files=[]), 415, "no image")
    for query in ("top=0", "top=x", "unknown_below=2", "unknown_below=nan", "unknown=1", "unknown=x", "k=3"):
        refused(client.post(f"/predict?{query}", content=good), 400, query.partition("=")[0])
    refused(client.get("/predict"), 405, "POST images to /predict")


def png_header(width: int, height: int) -> bytes:
    """A PNG file that says it is this large, without its pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    about = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", about) + chunk(b"IDAT", b"")


@pytest.mark.parametrize("size", [(20_000, 10_000), (40_000, 40_000)])
def test_too_many_pixels_are_refused_before_they_are_decoded(client: Any, size: tuple[int, int]) -> None:
    """Decoding this file would fail: it has no pixels."""
    refused(client.post("/predict", content=png_header(*size)), 413, "at most 50 million are accepted")
    refused(client.post("/predict", content=png_header(100, 100)), 422, "is broken")


def test_a_limit_on_pixels_is_exact(current: CurrentModel) -> None:
    assert decoded("a", encoded(picture(0, (10, 12))), 120).shape == (3, 10, 12)
    with pytest.raises(Refusal, match=r"0\.0 million pixels"):
        decoded("a", encoded(picture(0, (10, 12))), 119)


def test_every_usual_format_is_read() -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        assert decoded("a", encoded(picture(0, (16, 17)), kind), 1000).shape == (3, 16, 17)
    rotated = Image.new("RGB", (6, 4))
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    rotated.save(out, format="JPEG", exif=exif)
    assert decoded("a", out.getvalue(), 100).shape == (3, 6, 4)


def test_too_many_bytes_are_refused_before_they_are_read(current: CurrentModel) -> None:
    read = []

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            read.append(1)
            yield bytes(100)

    with client_of(current, max_bytes=1000) as client:
        refused(client.post("/predict", content=bytes(1001)), 413, "more than 0.001 MB")
        refused(client.post("/predict", content=chunks()), 413, "more than 0.001 MB")
        refused(client.post("/predict", files=[("a", ("a", bytes(1000)))]), 413, "more than 0.001 MB")
        refused(client.post("/predict", content=bytes(1000)), 415, "no image")


def test_a_refusal_does_not_wait_for_the_body(current: CurrentModel) -> None:
    """The length is enough. The body never comes."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        assert sent, "the body was read first"
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    app = client_of(current, max_bytes=1000).app
    scope = {
        "type": "http", "method": "POST", "path": "/predict", "raw_path": b"/predict", "query_string": b"",
        "headers": [(b"content-length", b"1000000000000")], "client": ("a", 1), "server": ("b", 2), "scheme": "http",
        "http_version": "1.1", "root_path": "",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 413 and b"more than" in sent[1]["body"] and sent[-1]["more_body"] is False


def test_a_slow_answer_is_given_up(current: CurrentModel, monkeypatch: pytest.MonkeyPatch) -> None:
    going = threading.Event()
    monkeypatch.setattr(current.served.predictor, "answers", lambda *_, **__: going.wait(60))
    with client_of(current, timeout=0.2) as client:
        refused(client.post("/predict", content=photos(1)[0]), 504, "no answer within 0.2 seconds")
        monkeypatch.undo()
        going.set()
        assert client.post("/predict", content=photos(1)[0]).status_code in (200, 504)


def test_a_failure_is_one_sentence(current: CurrentModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with client_of(current) as client:
        monkeypatch.setattr(current.served.predictor, "answers", fail)
        refused(client.post("/predict", content=photos(1)[0]), 500, "The server failed (RuntimeError)")
        monkeypatch.undo()
        assert client.post("/predict", content=photos(1)[0]).status_code == 200


# The rate


def test_a_client_that_asks_too_often_waits(current: CurrentModel) -> None:
    with client_of(current, rate=0.1) as client:
        assert client.post("/predict", content=photos(1)[0]).status_code == 200
        response = client.post("/predict", content=photos(1)[0])
        refused(response, 429, "Too many requests: try again in 10 s")
        assert response.headers["retry-after"] == "10" and client.get("/health").status_code == 200


def test_the_rate_is_per_second_and_client_and_shared_by_processes(tmp_path: Path) -> None:
    RateLimit.make_file(tmp_path / "shared")
    for limits in ([RateLimit(3)], [RateLimit(3, tmp_path / "shared"), RateLimit(3, tmp_path / "shared")]):
        passed = 0
        for step in range(1000):  # ten seconds, ten times too fast
            passed += limits[step % len(limits)].wait("a", 100 + step / 100) == 0
        assert passed == 3 + 29  # a burst of three, then three per second
        assert limits[0].wait("b", 100) == 0
        assert 0 < limits[-1].wait("a", 109.9) <= 1 / 3
        for limit in limits:
            limit.close()


# Batches


def test_requests_that_come_together_are_one_batch_and_keep_their_answers(current: CurrentModel) -> None:
    model = current.served.predictor
    raw = [decoded("a", data, 10**6) for data in photos(9)]
    images = [model.transform(image) for image in raw]
    sizes: list[int] = []
    whole = model.answers

    def counted(inputs: torch.Tensor, top: int) -> Any:
        sizes.append(len(inputs))
        return whole(inputs, top)

    async def together(size: int) -> list[Any]:
        batcher = Batcher(size)
        found = await asyncio.gather(*(batcher.predict(model, [image], 1 + n % 3) for n, image in enumerate(images)))
        await batcher.close()
        return [answer for [answer] in found]

    alone = [model.predict(image, 3)[0] for image in raw]
    model.answers = counted  # type: ignore[method-assign]
    try:
        found = {size: asyncio.run(together(size)) for size in (1, 4, 32)}
    finally:
        del model.answers
    assert sizes == [1] * 9 + [4, 4, 1] + [9]
    for answers in found.values():
        for n, (answer, expected) in enumerate(zip(answers, alone, strict=True)):
            top = 1 + n % 3
            assert answer.classes == expected.classes[:top]
            assert answer.probabilities == pytest.approx(expected.probabilities[:top], abs=1e-3)


def test_a_request_keeps_the_model_it_began_with(current: CurrentModel) -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name, self.sizes = name, []

        def answers(self, inputs: torch.Tensor, top: int) -> list[Any]:
            self.sizes.append(len(inputs))
            return [mambacl.deploy.Prediction((self.name,), (1.0,)) for _ in inputs]

    async def ask() -> list[str]:
        batcher, old, new = Batcher(8), Named("old"), Named("new")
        image = torch.zeros(3, 4, 4)
        asked = [batcher.predict(model, [image], 1) for model in (old, old, new, old, new)]  # type: ignore[arg-type]
        found = await asyncio.gather(*asked)
        await batcher.close()
        assert old.sizes == [2, 1] and new.sizes == [1, 1]
        return [answer.name for [answer] in found]

    assert asyncio.run(ask()) == ["old", "old", "new", "old", "new"]


# A newer model


def test_a_newer_task_a_rollback_and_a_broken_model(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    current = CurrentModel(str(copy), "cpu", poll=3600)
    first = current.served
    assert current.refresh() and current.served is first
    write_images([tmp_path / "new" / "heron" / f"{i}.png" for i in range(3)])
    mambacl.learn(copy, tmp_path / "new", device="cpu")
    assert current.refresh() and current.served.predictor.classes[-1] == "heron"
    second = current.served
    assert second.version != first.version

    state = next((copy / "learned").glob("*.safetensors"))
    state.rename(tmp_path / "away")
    (copy / "learned.json").touch()
    assert not current.refresh() and current.served is second
    with client_of(current) as client:
        about = client.get("/health").json()
        assert about["status"] == "old model" and "is missing" in about["reload_error"]
        assert client.post("/predict", content=photos(1)[0]).status_code == 200
    (tmp_path / "away").rename(state)
    assert current.refresh() and current.error is None and current.served is second
    mambacl.rollback(copy, 3)
    assert current.refresh() and current.served.version == first.version


def test_a_version_is_of_the_model_and_not_of_its_file(run: Path, tmp_path: Path) -> None:
    predictor = mambacl.load(run, "cpu")
    predictor.save(tmp_path / "model.safetensors")
    assert version_of(mambacl.load(tmp_path / "model.safetensors", "cpu")) == version_of(predictor)
    other = dataclasses.replace(predictor.description, classes=predictor.classes[::-1])
    assert version_of(type(predictor)(predictor.method, predictor.transforms, other, predictor.device)) != version_of(
        predictor
    )


def test_an_exported_file_that_is_replaced_is_loaded(run: Path, tmp_path: Path) -> None:
    mambacl.load(run, "cpu").save(tmp_path / "model.safetensors")
    current = CurrentModel(str(tmp_path / "model.safetensors"), "cpu", poll=3600)
    before = current.served
    predictor = mambacl.load(run, "cpu")
    with torch.no_grad():
        predictor.method.classifier.weights.mul_(2)
    predictor.save(tmp_path / "model.safetensors")
    assert current.refresh() and current.served.version == version_of(predictor) != before.version


# The command


def test_mistakes_on_the_command_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = fails(capsys, "serve", str(run), "--port", str(port))
        assert f"Port {port} of 127.0.0.1 is in use: choose another with --port" in words
    (tmp_path / "model.pt").write_bytes(b"something")
    for workers in ("1", "2"):
        words = fails(capsys, "serve", str(tmp_path / "model.pt"), "--port", "0", "--workers", workers)
        assert "is not a model that mambacl exported" in words
    assert "does not exist" in fails(capsys, "serve", str(tmp_path / "gone"))
    assert "must be at least 0 and at most 65535" in fails(capsys, "serve", str(run), "--port", "70000")
    assert 2 * (Image.MAX_IMAGE_PIXELS or 0) in (MOST_PIXELS, MOST_PIXELS + 1)
    assert "at most 178956970" in fails(capsys, "serve", str(run), "--max-pixels", "300000000")
    assert "more than 0" in fails(capsys, "serve", str(run), "--rate", "0")
    assert "not an address of this machine" in fails(capsys, "serve", str(run), "--host", "192.0.2.1")


def test_a_missing_extra_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mambacl.cli.serving.find_spec", lambda name: None if name == "uvicorn" else object())
    assert "`mambacl serve` needs uvicorn: pip install 'mambacl[serve]'." in fails(capsys, "serve", str(run))
