"""A server in another process, and images to send to it."""

import http.client
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_help import fewer_test_images, picture
from PIL import Image
from small_run import CONFIG

import mambacl

LONGEST = 120  # seconds


def small_run(out: Path) -> Path:
    with fewer_test_images(10):
        mambacl.train(CONFIG, method="analytic", classifier_options={"width": 64}, out=str(out))
    return out


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, format=kind)
    return out.getvalue()


def photos(count: int) -> list[bytes]:
    return [encoded(picture(seed, (20 + seed, 31))) for seed in range(count)]


class Server:
    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process, self.url = process, url
        self.port = int(url.rpartition(":")[2])

    def get(self, path: str) -> dict[str, Any]:
        """Over a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONGEST)
        connection.request("GET", path)
        content = json.loads(connection.getresponse().read())
        connection.close()
        return content

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LONGEST)


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Server]:
    """The command itself, on a free port."""
    command = [sys.executable, "-m", "mambacl", "serve", str(model), "--port", "0", "--device", "cpu", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert first.startswith("http://127.0.0.1:"), first + process.stdout.read()
        yield Server(process, first.split()[0])
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()
