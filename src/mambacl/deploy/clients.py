"""Many clients at once, to try a server by hand and in tests: `python -m mambacl.deploy.clients URL IMAGE...`."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mambacl.errors import UserError


@dataclass(frozen=True)
class Answer:
    image: int
    """its place in the list of images"""
    row: dict[str, Any]
    version: str
    """of the model that answered"""


@dataclass
class Outcome:
    answers: list[Answer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """what went wrong with the requests that have no answer"""
    seconds: float = 0.0


def ask(url: str, images: Sequence[bytes], clients: int = 50, enough: Callable[[int], bool] | int = 10) -> Outcome:
    """Each client sends one image after the other over its own connection, all clients at once. `enough` is the number
    of requests per client, or says after how many a client stops."""
    place = urlsplit(url)
    outcome, lock = Outcome(), threading.Lock()
    ready = threading.Barrier(clients)

    def client(number: int) -> None:
        connection = http.client.HTTPConnection(place.hostname or "", place.port or 80, timeout=120)
        ready.wait()
        sent = 0
        while sent < enough if isinstance(enough, int) else not enough(sent):
            image = (number + sent) % len(images)
            sent += 1
            try:
                connection.request("POST", f"{place.path.rstrip('/')}/predict?top=3", images[image])
                response = connection.getresponse()
                content = json.loads(response.read())
                if response.status != 200:
                    raise ValueError(f"status {response.status}: {content['error']}")
                answer = Answer(image, content[0], response.headers["X-Model-Version"])
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                with lock:
                    outcome.lost.append(f"client {number}, request {sent}: {error!r}")
            else:
                with lock:
                    outcome.answers.append(answer)
        connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome.seconds = time.perf_counter() - started
    return outcome


def differing(outcome: Outcome, expected: Sequence[Sequence[str]]) -> list[str]:
    """The answers whose best class is not the expected one. `expected`: the classes of each image, the best first."""
    wrong = []
    for answer in outcome.answers:
        name, best = answer.row["predictions"][0]["class"], expected[answer.image][0]
        if name != best:
            wrong.append(f"image {answer.image}: {name} instead of {best}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mambacl.deploy.clients", description=ask.__doc__)
    parser.add_argument("url", help="such as http://127.0.0.1:8000")
    parser.add_argument("images", nargs="+", type=Path, help="image files")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--requests", type=int, default=10, help="per client")
    parser.add_argument("--model", help="a run or exported file whose answers the server's must equal")
    given = parser.parse_args()
    outcome = ask(given.url, [path.read_bytes() for path in given.images], given.clients, given.requests)
    wrong: list[str] = []
    if given.model is not None:
        from mambacl.deploy.loading import load

        try:
            wrong = differing(outcome, [answer.classes for answer in load(given.model).predict(given.images)])
        except UserError as error:
            parser.error(str(error))
    total = len(outcome.answers) + len(outcome.lost)
    print(
        f"{total} requests of {given.clients} clients in {outcome.seconds:.1f} s, {total / outcome.seconds:.0f} per "
        f"second: {len(outcome.lost)} lost, {len(wrong)} answered otherwise than expected"
    )
    for sentence in [*outcome.lost, *wrong][:10]:
        print(sentence, file=sys.stderr)
    return 1 if outcome.lost or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
