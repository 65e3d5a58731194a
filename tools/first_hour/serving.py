"""`mambacl serve` under fifty clients, with a newer task in between, and with bad requests."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hour import LONGEST, Hour, PartFailed
from images import broken_image, large_png
from updating import answers

TIE = 1e-4  # between the two best classes: rounding can exchange them
AFTER = 3.0  # seconds for which the clients go on with the new model
TOO_MANY = 30_000_000  # bytes


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """Status and content, over a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONGEST)
        connection.request(method, path, body)
        answer = connection.getresponse()
        content = json.loads(answer.read())
        connection.close()
        return answer.status, content

    def health(self) -> dict[str, Any]:
        return self.ask("GET", "/health")[1]


def serve(hour: Hour) -> None:
    served = shutil.copytree(hour.deployed, hour.work / "served")
    old = answers(hour, served)
    with running(hour, served) as server:
        outcome, versions = under_load(hour, server, served)
        new = answers(hour, served)
        judge(hour, outcome, {versions[0]: old, versions[1]: new})
        bad_requests(hour, server, served)
        server.process.send_signal(signal.SIGTERM)
        hour.check("SIGTERM ends it with exit code 0", server.process.wait(60) == 0, server.process.returncode)
    broken_model(hour)


def under_load(hour: Hour, server: Server, served: Path) -> tuple[dict[str, Any], tuple[str, str]]:
    """Fifty clients ask while the run learns three classes. Returns their answers, and both versions."""
    before = server.health()
    stop, out = hour.work / "stop", hour.work / "answers.json"
    url = f"http://127.0.0.1:{server.port}"
    shutil.copy(Path(__file__).parent / "inside" / "clients.py", hour.work)
    clients = subprocess.Popen(
        [hour.python, hour.work / "clients.py", url, "test-photos", stop, out], cwd=hour.work, env=hour.variables()
    )
    try:
        hour.works("the run learns meanwhile", hour.mambacl("learn", served, "--new", "more-photos"))
        until(lambda: server.health()["version"] != before["version"], "the new model")
        after = server.health()
        time.sleep(AFTER)
        stop.touch()
        clients.wait(LONGEST)
    finally:
        clients.kill()
        clients.wait()
    hour.check("the new model has three more classes", len(after["classes"]) == len(before["classes"]) + 3, after)
    return json.loads(out.read_text(encoding="utf-8")), (before["version"], after["version"])


def judge(hour: Hour, outcome: dict[str, Any], by_version: dict[str, list[dict[str, Any]]]) -> None:
    """Each answer must be that of the model whose version it names."""
    found, lost = outcome["answers"], outcome["lost"]
    speed = len(found) / outcome["seconds"]
    hour.check(f"50 clients: of {len(found)} requests, {speed:.0f} per second, none is lost", not lost, lost[:3])
    expected = {version: {row["file"]: row for row in rows} for version, rows in by_version.items()}
    counts = {version: sum(answer["version"] == version for answer in found) for version in expected}
    enough = min(counts.values()) > 50 and sum(counts.values()) == len(found)
    hour.check(f"both models answered: {' and '.join(map(str, counts.values()))} requests", enough, counts)
    wrong = []
    for answer in found:
        right = expected[answer["version"]][answer["file"]]["predictions"]
        tie = right[0]["probability"] - right[1]["probability"] < TIE
        if answer["row"]["predictions"][0]["class"] != right[0]["class"] and not tie:
            wrong.append(answer)
    hour.check("each answer is that of `predict`", not wrong, wrong[:2])


def bad_requests(hour: Hour, server: Server, served: Path) -> None:
    good = next(hour.tests.rglob("*.png")).read_bytes()
    expected = server.ask("POST", "/predict", good)
    for what, status, body in (
        ("an upload of 200 megapixels", 413, large_png()),
        ("an upload of 30 MB", 413, bytes(TOO_MANY)),
        ("a broken image", 422, broken_image(hour.photos)),
        ("text", 415, b"hello"),
        ("nothing", 400, b""),
    ):
        found, content = server.ask("POST", "/predict", body)
        sentence = set(content) == {"error"} and content["error"].endswith(".") and "\n" not in content["error"]
        hour.check(f"bad input: {what} gets the status {status} and a sentence", found == status and sentence, content)
        hour.check(f"bad input: after {what} it still answers", server.ask("POST", "/predict", good) == expected)
    found, content = server.ask("POST", "/predict?top=x", good)
    hour.check("bad input: a wrong parameter gets the status 400", found == 400 and "top" in content["error"], content)
    port = str(server.port)
    hour.refuses("a port in use", lambda: hour.mambacl("serve", served, "--port", port), served, mentions=port)
    hour.refuses("no model", lambda: hour.mambacl("serve", "nowhere", "--port", "0"))
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf")
    hour.check("bad input: after half a request it still answers", server.ask("POST", "/predict", good) == expected)


def broken_model(hour: Hour) -> None:
    """A file that is replaced by half of it: the server goes on with the model it has."""
    file, good = hour.work / "served.safetensors", next(hour.tests.rglob("*.png")).read_bytes()
    hour.works("a model is exported", hour.mambacl("export", "deployed", "--out", file))
    with running(hour, file) as server:
        expected = server.ask("POST", "/predict", good)
        half = hour.work / "half"
        half.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        half.replace(file)
        until(lambda: server.health()["status"] == "old model", "that the file is broken")
        hour.check("bad input: half a model file; it says why", bool(server.health()["reload_error"]))
        hour.check("bad input: half a model file; it still answers", server.ask("POST", "/predict", good) == expected)


@contextmanager
def running(hour: Hour, model: Path) -> Iterator[Server]:
    log = open(hour.work / "server.log", "a", encoding="utf-8")  # noqa: SIM115
    process = subprocess.Popen(
        [*hour.command, "serve", str(model), "--port", "0"],
        cwd=hour.work, env=hour.variables(), stdout=subprocess.PIPE, stderr=log, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        hour.need(f"{model.name} is served", first.startswith("http://127.0.0.1:"), first)
        yield Server(process, int(first.split()[0].rpartition(":")[2]))
    finally:
        process.kill()
        process.wait()
        log.close()
    text = (hour.work / "server.log").read_text(encoding="utf-8")
    hour.check("the server's log has no traceback", "Traceback" not in text, text[-500:])


def until(happens: Callable[[], bool], words: str) -> None:
    end = time.monotonic() + 120
    while not happens():
        if time.monotonic() > end:
            raise PartFailed(f"waited for {words}")
        time.sleep(0.1)
