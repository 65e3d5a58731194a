"""The HTTP server: `create_app` makes it, `app_from_environment` in each worker process. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import math
import os
import time
import warnings
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mambacl.classifiers.calibration import Rates
from mambacl.deploy.batching import Batcher
from mambacl.deploy.current import CurrentModel, Served
from mambacl.deploy.predictor import Predictor
from mambacl.deploy.rate import RateLimit
from mambacl.deploy.requests import ErrorResponse, JsonResponse, Question, images_of
from mambacl.deploy.rows import as_row
from mambacl.deploy.serve_options import Refusal, ServeOptions
from mambacl.deploy.uploads import decoded
from mambacl.errors import UserError

VARIABLE = "MAMBACL_SERVE"  # the options, for worker processes
VERSION = "X-Model-Version"


def app_from_environment() -> FastAPI:
    options = ServeOptions.from_text(os.environ[VARIABLE])
    torch.set_num_threads(options.threads)
    return create_app(options, CurrentModel(options.model, options.device, options.poll, options.unknown))


def create_app(options: ServeOptions, current: CurrentModel) -> FastAPI:
    batcher: Batcher
    readers = ThreadPoolExecutor(options.threads, "read")  # bounds the large images in memory; only inputs wait
    rate = None if options.rate is None else RateLimit(options.rate, options.rate_file)
    page = _page(options)
    # Pillow would warn of large images, which have a limit here
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        nonlocal batcher
        batcher = Batcher(options.batch)
        current.start()
        yield
        await run_in_threadpool(current.close)
        await batcher.close()
        readers.shutdown(cancel_futures=True)
        if rate is not None:
            rate.close()

    app = FastAPI(lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        try:
            if rate is not None:
                _check_rate(rate, request)
            question = Question.of(request)
        except Refusal as refusal:
            refusal.unread = True
            raise
        files = await images_of(request, options.max_bytes, options.timeout)
        served = current.served
        try:
            rows = await asyncio.wait_for(_rows(served, files, question), options.timeout)
        except asyncio.TimeoutError:
            words = f"There was no answer within {options.timeout:g} seconds: try again later, or with fewer images."
            raise Refusal(504, words) from None
        return JsonResponse(rows, headers={VERSION: served.version})

    async def _rows(served: Served, files: list[tuple[str, bytes]], question: Question) -> list[dict[str, Any]]:
        """One row per file, as `mambacl predict --json` prints them. If no file can be read, the first one's error."""
        loop, model, most = asyncio.get_running_loop(), served.predictor, options.max_pixels
        read = await asyncio.gather(*(loop.run_in_executor(readers, _try_read, model, *file, most) for file in files))
        images = [image for image in read if not isinstance(image, Refusal)]
        if not images:
            raise read[0]
        below, rates = _threshold(model, question, options.unknown)
        answers = iter(await batcher.predict(model, images, question.top, below))
        return [
            as_row(
                name,
                UserError(image.sentence) if isinstance(image, Refusal) else next(answers),
                model.calibration is not None,
                rates,
            )
            for (name, _), image in zip(files, read, strict=True)
        ]

    @app.get("/")
    async def drop_page() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/health")
    async def health() -> JsonResponse:
        served = current.served
        about = served.predictor.description
        content = {
            "status": "ok" if current.error is None else "old model",
            "model": options.shown,
            "version": served.version,
            "tasks": about.card.get("tasks"),
            "classes": about.classes,
            "method": about.config.method,
            "backbone": about.config.backbone,
            "device": str(served.predictor.device),
            "calibrated": served.predictor.calibration is not None,
            "loaded": round(served.loaded, 3),
            "reload_error": current.error,
            "worker": os.getpid(),
            "limits": {name: getattr(options, name) for name in ("max_bytes", "max_pixels", "rate", "timeout")},
        }
        return JsonResponse(content)

    @app.get("/ready")
    async def ready() -> JsonResponse:
        return JsonResponse({"ready": True})

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> ErrorResponse:
        return ErrorResponse(error)

    @app.exception_handler(HTTPException)
    async def no_such_page(request: Request, error: HTTPException) -> ErrorResponse:
        if error.status_code == 405:
            sentence = f"{request.url.path} does not take {request.method}: POST images to /predict."
        else:
            sentence = f"There is no page {request.url.path}: POST images to /predict, or open / in a browser."
        return ErrorResponse(Refusal(error.status_code, sentence, dict(error.headers or {})))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> ErrorResponse:
        return ErrorResponse(Refusal(400, "The request ended early."))  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> ErrorResponse:
        return ErrorResponse(Refusal(500, f"The server failed ({type(error).__name__}): its log says more."))

    return app


def _check_rate(rate: RateLimit, request: Request) -> None:
    wait = rate.wait(request.client.host if request.client else "", time.monotonic())
    if wait:
        seconds = max(1, math.ceil(wait))
        raise Refusal(429, f"Too many requests: try again in {seconds} s.", {"Retry-After": str(seconds)})


def _threshold(model: Predictor, question: Question, usual: float | None) -> tuple[float, Rates | None]:
    """Below which an image is unknown, and the error rates, if the model knows them."""
    share = question.unknown if question.unknown is not None or question.unknown_below is not None else usual
    if share is not None:
        try:
            rates = model.rejecting(share)
        except UserError as error:
            raise Refusal(400, str(error)) from None
        return rates.threshold, rates
    below = question.unknown_below or 0.0
    return below, model.calibration.rates(below) if model.calibration and below else None


def _try_read(model: Predictor, name: str, data: bytes, max_pixels: int) -> Any:
    """The model's input, or a `Refusal`."""
    try:
        return model.transform(decoded(name, data, max_pixels))
    except Refusal as refusal:
        return refusal


def _page(options: ServeOptions) -> str:
    loader = PackageLoader("mambacl.deploy")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template("serve.html").render(name=options.shown, max_bytes=options.max_bytes)
