"""Reads the images of an HTTP request, within limits on bytes and time."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mambacl.deploy.serve_options import Refusal

LINGER = 2.0  # seconds in which a refused upload is read and dropped, so that its sender sees the answer
MOST_FILES = 1000
NO_IMAGE = "The request has no image: send it as the body, or as multipart files."
BODY = "image"  # the name of an image that came without one


@dataclass(frozen=True)
class Question:
    """What a client asks beside its images."""

    top: int = 1
    unknown_below: float | None = None
    unknown: float | None = None

    @classmethod
    def of(cls, request: Request) -> Question:
        for name in request.query_params:
            if name not in ("top", "unknown", "unknown_below"):
                raise Refusal(400, f"There is no parameter '{name}': use top, unknown and unknown_below.")
        try:
            top = int(request.query_params.get("top", "1"))
        except ValueError:
            top = 0
        if top < 1:
            raise Refusal(400, "top must be a whole number, at least 1.")
        below, share = (_share(request.query_params.get(name), name) for name in ("unknown_below", "unknown"))
        if below is not None and share is not None:
            raise Refusal(400, "unknown and unknown_below exclude each other: send one.")
        return cls(top, below, share)


def _share(text: str | None, name: str) -> float | None:
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not (0 <= found <= 1 and (found < 1 or name == "unknown_below")):
        raise Refusal(400, f"{name} must be a number between 0 and 1.")
    return found


async def images_of(request: Request, max_bytes: int, timeout: float) -> list[tuple[str, bytes]]:
    """The images with their names, still encoded. The body is an image, or a form with files."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:  # refused before any of it is read
        raise _too_large(max_bytes, unread=True)
    limited = Request(request.scope, _counted(request.receive, max_bytes))
    try:
        found = await asyncio.wait_for(_read(limited), timeout)
    except asyncio.TimeoutError:
        raise Refusal(408, f"The request did not arrive within {timeout:g} seconds: send it faster.") from None
    if not found:
        raise Refusal(400, NO_IMAGE)
    return found


async def _read(request: Request) -> list[tuple[str, bytes]]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        body = await request.body()
        return [(BODY, body)] if body else []
    try:
        async with request.form(max_files=MOST_FILES, max_fields=MOST_FILES) as form:
            files = [part for _, part in form.multi_items() if isinstance(part, UploadFile)]
            return [(file.filename or BODY, await file.read()) for file in files]
    except HTTPException as error:
        raise Refusal(400, f"The form cannot be read ({str(error.detail).rstrip('.')}): send it again.") from None


def _counted(receive: Receive, most: int) -> Receive:
    """Refuses a request without a length, or with a wrong one, as soon as it is too long."""
    read = 0

    async def counted() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > most:
            raise _too_large(most, message.get("more_body", False))
        return message

    return counted


def _too_large(most: int, unread: bool) -> Refusal:
    words = f"The request has more than {most / 1e6:g} MB, the most that is accepted: send less at a time."
    return Refusal(413, words, unread=unread)


class JsonResponse(Response):
    """Escapes all but ASCII, because a class name can hold any character."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__((json.dumps(content) + "\n").encode(), status, headers)


class ErrorResponse(JsonResponse):
    """One sentence. What is left of the request is dropped for a moment after it was sent: if the connection were
    closed at once, a client that still writes might never read the sentence."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__({"error": refusal.sentence}, refusal.status, refusal.headers)
        self.lingers = refusal.unread

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.lingers or any(name == b"expect" for name, _ in scope["headers"]):
            await super().__call__(scope, receive, send)
            return
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        end = time.monotonic() + LINGER
        more = True
        while more and (left := end - time.monotonic()) > 0:
            try:
                message = await asyncio.wait_for(receive(), left)
            except asyncio.TimeoutError:
                break
            more = message["type"] == "http.request" and message.get("more_body", False)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
