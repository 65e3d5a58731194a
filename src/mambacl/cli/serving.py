"""The command serve."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

from mambacl.cli.deploy import Model, Share, check_model
from mambacl.config import Device
from mambacl.deploy.hub_files import from_address, is_address
from mambacl.errors import UserError
from mambacl.options import Must, at_least, between
from mambacl.status import status

MOST_PIXELS = 178_956_970  # Pillow refuses larger images
Positive = Must("be finite and more than 0", lambda value: 0 < value < float("inf"))


def serve(
    run: Model,
    *,
    host: Annotated[str, "address to listen on; 0.0.0.0 for all of this machine's"] = "127.0.0.1",
    port: Annotated[int, "0 picks a free one", between(0, 65535)] = 8000,
    workers: Annotated[int, "processes, each with the model", at_least(1)] = 1,
    unknown: Share = None,
    batch: Annotated[int, "images of requests that arrive together, predicted at once", at_least(1)] = 32,
    rate: Annotated[float | None, "requests per second from a client; more get the status 429", Positive] = None,
    max_bytes: Annotated[int, "of a request", at_least(1)] = 20_000_000,
    max_pixels: Annotated[int, "of an image", between(1, MOST_PIXELS)] = 50_000_000,
    timeout: Annotated[float, "seconds to read a request, and again to answer it", Positive] = 30.0,
    device: Annotated[Device, "where to compute: auto, cpu, cuda, cuda:N"] = "auto",
    threads: Annotated[int | None, "to compute with, per worker; default: the cores", at_least(1)] = None,
) -> None:
    """answer over HTTP, with a page to drop images on: `mambacl serve RUN --port 8000`

    POST images to /predict. A newer task of the run, or a rollback, is picked up without a lost request."""
    check_model(run)
    require("serve", "fastapi", "uvicorn", "python_multipart")
    from mambacl.deploy.serve_options import ServeOptions
    from mambacl.deploy.serving import bound
    from mambacl.deploy.serving import serve as serve_until_stopped
    from mambacl.diagnosis import usable_cores

    if is_address(run):
        with status("downloading the model"):
            file = str(from_address(run))
    else:
        file = run
    options = ServeOptions(
        model=file,
        name=run,
        device=device,
        threads=threads or max(1, usable_cores() // workers),
        workers=workers,
        max_bytes=max_bytes,
        max_pixels=max_pixels,
        rate=rate,
        timeout=timeout,
        batch=batch,
        unknown=unknown,
    )
    with bound(host, port) as listening:
        serve_until_stopped(options, listening, status("loading the model"))


def require(extra: str, *packages: str) -> None:
    """Refuses if a package of an extra is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError(f"`mambacl {extra}` needs {missing[0]}: pip install 'mambacl[{extra}]'.")
