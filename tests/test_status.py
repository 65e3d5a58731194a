"""The temporary line on a terminal while the user waits."""

import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mambacl import log, status
from mambacl.log import logger
from mambacl.status import AFTER, ERASE, counted, draw, duration, hidden, working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def line(self) -> str:
        """What is to be seen in the last line."""
        return self.getvalue().rpartition("\n")[2].rpartition(ERASE)[2]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test sets; the thread does not draw meanwhile."""
    now = [0.0]
    monkeypatch.setattr(status, "EVERY", 1e9)
    monkeypatch.setattr(status.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(status.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(status, "_keep_drawing", lambda first: None)
    return now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    screen = Terminal()
    for module in (status, log):  # pytest replaces sys.stderr itself
        monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=screen))
    yield screen
    assert screen.line() == "", "the line goes when the work ends"


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0:00"), (42, "0:42"), (725, "12:05"), (11220, "3:07:00"), (-3, "0:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_words_and_after_a_moment_the_time(terminal: Terminal, clock: list[float]) -> None:
    with status.status("loading the model"):
        assert terminal.line() == "loading the model ..."
        clock[0] = 65.0
        draw()
        assert terminal.line() == "loading the model ... 1:05"


def test_items_are_counted_with_the_time_left(terminal: Terminal, clock: list[float]) -> None:
    seen = []
    for item in counted(range(6), 6):
        draw()
        seen.append(terminal.line())
        clock[0] += 1.5
        assert item == len(seen) - 1
    assert seen[:2] == ["", ""] and seen[2] == "2 of 6 images, 0:06 left" and seen[5] == "5 of 6 images, 0:02 left"


def test_without_a_total_the_time_passed_is_shown(terminal: Terminal, clock: list[float]) -> None:
    for _ in counted(range(3), 0, "MiB"):
        clock[0] += 2 * AFTER
        draw()
    assert "2 MiB, 0:12" in terminal.getvalue()


def test_the_innermost_work_is_shown_and_a_bar_alone(terminal: Terminal, clock: list[float]) -> None:
    with status.status("outside"):
        with status.status("inside"):
            assert terminal.line() == "inside ..."
        assert terminal.line() == "outside ..."
        with hidden():
            assert terminal.line() == ""
        assert terminal.line() == "outside ..."


def test_stages_of_work(terminal: Terminal, clock: list[float]) -> None:
    with working("loading", "measuring") as show:
        assert terminal.line() == "loading ..."
        for _ in show(range(2), 2):
            clock[0] += 3.0
            draw()
            assert "loading" not in terminal.line()
        assert terminal.line() == "measuring ..." and "1 of 2 images, 0:06 left" in terminal.getvalue()


def test_a_message_is_not_written_into_the_line(terminal: Terminal, clock: list[float]) -> None:
    handlers, logging.getLogger().handlers = logging.getLogger().handlers, []
    try:
        with status.status("loading"):
            logger.info("a message")
            assert terminal.getvalue().endswith(f"loading ...{ERASE}a message\n")
    finally:
        logging.getLogger().handlers = handlers


def test_nothing_is_shown_elsewhere_or_if_only_warnings_are_wanted(
    capsys: pytest.CaptureFixture[str], terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with status.status("loading"):
            assert list(counted(range(3), 3)) == [0, 1, 2]
    finally:
        logger.setLevel(level)
    monkeypatch.undo()
    with status.status("loading"):
        assert list(counted(range(3), 3)) == [0, 1, 2]
    assert not terminal.getvalue() and not capsys.readouterr().err


def test_the_line_is_drawn_while_a_call_computes(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "EVERY", 0.01)
    monkeypatch.setattr(status, "AFTER", 0.0)
    end = time.monotonic() + 10
    with status.status("computing"):
        while "computing ... 0:00" not in terminal.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert "computing ... 0:00" in terminal.getvalue()


def test_an_error_removes_the_line(terminal: Terminal, clock: list[float], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), status.status("reading"):
        (tmp_path / "gone").read_text()
