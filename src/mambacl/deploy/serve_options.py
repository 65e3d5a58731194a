"""The options of `mambacl serve`, and the errors that its clients see. Imports neither PyTorch nor the server."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass

from mambacl.deploy.hub_files import is_address


@dataclass(frozen=True)
class ServeOptions:
    model: str
    """a run folder, or an exported file"""
    name: str = ""
    """how the user named it, such as hf://OWNER/NAME; default: its path"""
    device: str = "auto"
    threads: int = 1
    """for computing, per worker"""
    workers: int = 1
    max_bytes: int = 20_000_000
    """of a request"""
    max_pixels: int = 50_000_000
    """of an image"""
    rate: float | None = None
    """requests per second and client; None: no limit"""
    rate_file: str | None = None
    """where workers share the count of requests"""
    timeout: float = 30.0
    """seconds to read a request, and again to answer it"""
    batch: int = 32
    """images that are predicted together, at most"""
    unknown: float | None = None
    """share of images of known classes that may be called unknown, if a request names no threshold"""
    poll: float = 1.0
    """seconds between two looks for a newer model"""

    @property
    def shown(self) -> str:
        """For clients, without folders of this machine."""
        return self.name if is_address(self.name) else os.path.basename(os.path.abspath(self.model))

    def as_text(self) -> str:
        """For the environment of a worker."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> ServeOptions:
        return cls(**json.loads(text))


class Refusal(Exception):
    """A request that gets an error: one sentence, with an HTTP status. `unread`: the client may still be sending."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None, unread: bool = False) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers, self.unread = status, sentence, headers or {}, unread
