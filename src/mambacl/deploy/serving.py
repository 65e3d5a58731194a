"""Starts the server: the socket first, then the model, then one process or several."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mambacl.deploy.serve_options import ServeOptions
from mambacl.errors import UserError

BACKLOG = 2048  # connections that wait to be accepted
HEALTH = 60  # seconds after which a worker that does not react is replaced


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens. Clients that come while the model is loading wait."""
    try:
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError):
        raise UserError(
            f"The host '{host}' is not known: give an address of this machine, or 0.0.0.0 for all."
        ) from None
    found = socket.socket(kind, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise UserError(_no_port(error, host, port)) from None
    found.set_inheritable(True)
    return found


def _no_port(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} of {host} is in use: choose another with --port, or stop the program that uses it."
    if error.errno == errno.EACCES:
        return f"Port {port} needs more rights than you have: choose one from 1024 on with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine: choose another with --host, or 0.0.0.0 for all."
    return f"The server cannot listen on {host}, port {port} ({error.strerror}): choose others."


def serve(options: ServeOptions, listening: socket.socket, loading: AbstractContextManager[None] | None = None) -> None:
    """Serves until SIGTERM or Ctrl+C, then answers what is under way. Needs the extra `serve`. `loading` is open while
    the model is loaded, to tell the user."""
    with _rate_file(options) as shared:
        run = _one if shared.workers == 1 else _several
        run(shared, listening, loading or nullcontext())


def _one(options: ServeOptions, listening: socket.socket, loading: AbstractContextManager[None]) -> None:
    with loading:
        import torch
        import uvicorn

        from mambacl.deploy.current import CurrentModel
        from mambacl.deploy.server import create_app

        torch.set_num_threads(options.threads)
        current = CurrentModel(options.model, options.device, options.poll, options.unknown)
    server = uvicorn.Server(uvicorn.Config(create_app(options, current), **_settings(options)))

    def stop(*_: Any) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _say(options, listening, len(current.served.predictor.classes))
        server.run([listening])  # has its own handlers; at the end it raises the signal again, for `stop`
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _several(options: ServeOptions, listening: socket.socket, loading: AbstractContextManager[None]) -> None:
    with loading:
        import uvicorn
        from uvicorn.supervisors import Multiprocess

        from mambacl.deploy.loading import load
        from mambacl.deploy.server import VARIABLE
        from mambacl.training.build import pick_device

        pick_device(options.device)
        model = load(options.model, "cpu")  # finds a mistake here once, not in each worker
        if options.unknown is not None:
            model.rejecting(options.unknown)
        classes = len(model.classes)
    os.environ[VARIABLE] = options.as_text()
    config = uvicorn.Config(
        "mambacl.deploy.server:app_from_environment",
        factory=True,
        workers=options.workers,
        timeout_worker_healthcheck=HEALTH,
        **_settings(options),
    )
    _say(options, listening, classes)
    Multiprocess(config, [listening]).run()


def _settings(options: ServeOptions) -> dict[str, Any]:
    return {
        "log_config": None, "access_log": False, "lifespan": "on", "ws": "none", "backlog": BACKLOG,
        "server_header": False, "timeout_graceful_shutdown": int(2 * options.timeout) + 5,
    }  # fmt: skip


def _say(options: ServeOptions, listening: socket.socket, classes: int) -> None:
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(
        f"http://{shown}:{port} answers with {options.name or options.model}, {classes} classes; Ctrl+C stops it.",
        flush=True,
    )


@contextmanager
def _rate_file(options: ServeOptions) -> Iterator[ServeOptions]:
    """A file in which several workers count requests together."""
    if options.rate is None or options.workers == 1:
        yield options
        return
    from mambacl.deploy.rate import RateLimit

    with tempfile.TemporaryDirectory(prefix="mambacl-serve-") as folder:
        file = Path(folder) / "requests"
        RateLimit.make_file(file)
        yield dataclasses.replace(options, rate_file=str(file))
