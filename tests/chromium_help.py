"""Opens pages in headless Chromium, through the DevTools protocol over a pipe: no other library is needed."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--disable-extensions", "--mute-audio",
    "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 60.0  # seconds for an answer


class Tab:
    """A page under control. `events` are all that the browser has reported."""

    def __init__(self, write: int, read: int) -> None:
        self.write, self.read, self.rest, self.number, self.session = write, read, b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (found := self._message()).get("id") != self.number:
            self.events.append(found)
        assert "error" not in found, found
        return found["result"]

    def wait_for(self, event: str) -> None:
        while not any(found.get("method") == event for found in self.events):
            self.events.append(self._message())

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self.rest:
            assert select.select([self.read], [], [], max(0.0, end - time.monotonic()))[0], "Chromium does not answer"
            part = os.read(self.read, 1 << 20)
            assert part, "Chromium has ended"
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Loads a page in a window of this size."""
        self.events.clear()
        mobile = width < 640
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def value(self, expression: str) -> Any:
        found = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move(self, x: float, y: float) -> None:
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def complaints(self) -> list[str]:
        """Errors and warnings of the page, and addresses that it asked for besides itself and what it contains."""
        self.value("0")  # what was under way has been reported
        found = []
        for event in self.events:
            params = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    found.append(str(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled":
                    found.append(str(params["args"]))
                case "Log.entryAdded":
                    found.append(params["entry"]["text"])
                case "Network.requestWillBeSent" if not params["request"]["url"].startswith(("file:", "data:")):
                    found.append(params["request"]["url"])
        return found

    def screenshot(self, path: Path, whole: bool = True) -> None:
        data = self("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        return base64.b64decode(self("Page.printToPDF", printBackground=True)["data"])


@contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """A tab of a new browser whose profile is an empty folder."""
    assert CHROMIUM is not None
    from_us, ours = os.pipe()
    theirs, to_us = os.pipe()

    def connect() -> None:
        # Above 4 first, because either end can already have one of the numbers that Chromium expects.
        import fcntl

        read, write = fcntl.fcntl(from_us, fcntl.F_DUPFD, 10), fcntl.fcntl(to_us, fcntl.F_DUPFD, 10)
        os.dup2(read, 3)
        os.dup2(write, 4)

    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(from_us)
    os.close(to_us)
    try:
        tab = Tab(ours, theirs)
        target = tab("Target.createTarget", url="about:blank")["targetId"]
        tab.session = tab("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab(f"{domain}.enable")
        yield tab
    finally:
        process.terminate()
        process.wait(20)
        os.close(ours)
        os.close(theirs)
