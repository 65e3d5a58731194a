"""`mambacl serve` as a process: many clients, a newer model under load, workers, a stop."""

import http.client
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_help import write_images
from serving_help import LONGEST, Server, photos, serving, small_run

import mambacl

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from mambacl.deploy import clients
from mambacl.deploy.clients import ask, differing

pytestmark = [pytest.mark.extras, pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(scope="module")
def unchanged(trained: Path) -> Iterator[Server]:
    """A server whose model stays the same."""
    with serving(trained, "--max-bytes", "1000000") as started:
        yield started


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    with serving(run) as started:
        yield started


def expected(run: Path, images: list[bytes], folder: Path) -> list[tuple[str, ...]]:
    """What a `Predictor` says about each image on its own."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"{number}.png" for number in range(len(images))]
    for file, data in zip(files, images, strict=True):
        file.write_bytes(data)
    return [answer.classes for answer in mambacl.load(run, "cpu").predict(files, top=3, batch_size=1)]


def until(happens, words: str) -> None:
    end = time.monotonic() + LONGEST
    while not happens():
        assert time.monotonic() < end, words
        time.sleep(0.05)


def test_fifty_clients_lose_nothing_and_get_the_models_answers(
    unchanged: Server,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = photos(8)
    outcome = ask(unchanged.url, images, clients=50, enough=4)
    assert not outcome.lost and len(outcome.answers) == 200
    assert not differing(outcome, expected(trained, images, tmp_path / "images"))
    assert len(differing(outcome, [["nothing"]] * len(images))) == 200
    # the same by hand
    words = ["--clients", "5", "--requests", "2", "--model", str(trained)]
    files = [str(file) for file in sorted((tmp_path / "images").iterdir())]
    monkeypatch.setattr(sys, "argv", ["clients", unchanged.url, *files, *words])
    assert clients.main() == 0 and "0 lost, 0 answered otherwise" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["clients", "http://127.0.0.1:9", *files, *words])
    assert clients.main() == 1 and "10 lost" in capsys.readouterr().out


def test_a_client_that_sends_too_much_still_gets_its_sentence(unchanged: Server) -> None:
    """It writes all of it before it reads."""
    for headers in ({}, {"Transfer-Encoding": "chunked"}):
        connection = http.client.HTTPConnection("127.0.0.1", unchanged.port, timeout=LONGEST)
        body = bytes(8_000_000)
        connection.request("POST", "/predict", iter([body]) if headers else body, headers, encode_chunked=bool(headers))
        response = connection.getresponse()
        assert response.status == 413 and b"more than 1 MB" in response.read()
        connection.close()
    assert unchanged.get("/ready") == {"ready": True}


def test_a_newer_task_is_picked_up_under_load(server: Server, run: Path, tmp_path: Path) -> None:
    images, before = photos(4), server.get("/health")
    write_images([tmp_path / "new" / "heron" / f"{i}.png" for i in range(4)])
    wanted = [before["tasks"] + 1, before["tasks"]]
    old = expected(run, images, tmp_path / "images")
    mambacl.learn(run, tmp_path / "new", device="cpu")  # before the clients: this process predicts, too
    new = expected(run, images, tmp_path / "images")
    mambacl.rollback(run, before["tasks"])
    until(lambda: server.get("/health")["version"] == before["version"], "the first model")

    def enough(sent: int) -> bool:
        return done[0] and sent >= 3

    done, seen = [False], []

    def change() -> None:
        for tasks in wanted:  # forward to the new task, and back
            mambacl.rollback(run, tasks)
            until(lambda: server.get("/health")["tasks"] == tasks, f"the model of {tasks} tasks")  # noqa: B023
            seen.append(server.get("/health"))
            time.sleep(0.3)
        done[0] = True

    thread = threading.Thread(target=change)
    thread.start()
    outcome = ask(server.url, images, clients=8, enough=enough)
    thread.join()
    assert not outcome.lost and [about["tasks"] for about in seen] == wanted
    assert "heron" in seen[0]["classes"] and seen[1]["version"] == before["version"] != seen[0]["version"]
    by_version = {before["version"]: old, seen[0]["version"]: new}
    assert {answer.version for answer in outcome.answers} == set(by_version)
    for answer in outcome.answers:
        best = [found["class"] for found in answer.row["predictions"]]
        assert best[0] == by_version[answer.version][answer.image][0]


def test_a_stop_answers_what_is_under_way(server: Server) -> None:
    [image] = photos(1)
    head = f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: {len(image)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), LONGEST) as connection:
        connection.sendall(head + image[:50])
        assert server.get("/ready") == {"ready": True}  # the server has begun to read by now
        server.process.terminate()
        until(lambda: _refused(server.port), "no new connections")
        connection.sendall(image[50:])
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    assert server.process.wait(LONGEST) == 0


def _refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return True
    return False


@pytest.mark.long
def test_two_workers_both_reload_and_share_the_rate(run: Path, tmp_path: Path) -> None:
    write_images([tmp_path / "new" / "heron" / f"{i}.png" for i in range(4)])
    with serving(run, "--workers", "2", "--rate", "0.01") as server:
        workers: dict[int, int] = {}

        def ask_for_health() -> None:
            about = server.get("/health")
            workers[about["worker"]] = about["tasks"]

        until(lambda: ask_for_health() or len(workers) == 2, "two workers")  # type: ignore[func-returns-value]
        before = set(workers.values())
        mambacl.learn(run, tmp_path / "new", device="cpu")
        until(lambda: ask_for_health() or set(workers.values()) == {4}, "both have the new task")  # type: ignore[func-returns-value]
        assert before == {3} and len(workers) == 2
        first = ask(server.url, photos(1), clients=6, enough=2)
        assert len(first.answers) == 1 and all("429" in words for words in first.lost) and len(first.lost) == 11
        assert server.stop() == 0
