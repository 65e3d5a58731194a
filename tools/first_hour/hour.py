"""What every part of the first hour uses: commands in the new environment, and checks."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
INSIDE = Path(__file__).resolve().parent / "inside"  # scripts that run in the new environment
LONGEST = 1800  # seconds for one command: only what hangs takes so long, even on a busy machine
LONGEST_INSTALL = 3600  # PyTorch is 5 GB: a slow line is no fault of the package
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float = 0.0

    def __str__(self) -> str:
        last = " / ".join(self.err.strip().splitlines()[-3:])
        return f"`{' '.join(self.words)}` exited with {self.code}: {last or 'nothing on standard error'}"


@dataclass(frozen=True)
class Check:
    part: str
    what: str
    result: str
    words: str = ""
    """why it failed or was skipped"""
    seconds: float = 0.0
    """since the check before it"""


class PartFailed(Exception):
    """The rest of a part makes no sense."""


def refusal_fault(done: Done) -> str:
    """What is wrong with the way in which a command refused bad input; empty if it said one sentence and failed."""
    lines = done.err.strip().splitlines()
    if done.code == 0:
        return "it was accepted"
    if done.code < 0:
        return f"it was ended by signal {-done.code}"
    if "Traceback" in done.out + done.err:
        return "it printed a traceback"
    if len(lines) != 1:
        return f"it printed {len(lines)} lines to standard error"
    if not re.fullmatch(r"mambacl: .+[.)]", lines[0]):
        return "it did not print a sentence"
    return ""


def digest(place: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder, hidden ones included."""
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    return {str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@dataclass
class Hour:
    work: Path
    """the folder that the user works in"""
    environment: Path
    """with mambacl; the repository is not on its path"""
    seed: int = 0
    """of the random moments"""
    further: Mapping[str, str] = field(default_factory=dict)
    """environment variables of a trial with an existing environment"""
    checks: list[Check] = field(default_factory=list)
    part: str = ""
    since: float = field(default_factory=time.monotonic)

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    @property
    def command(self) -> list[str]:
        """mambacl itself; in a trial the package can be on the path only"""
        return [str(self.python), "-m", "mambacl"] if self.further else [str(self.environment / "bin" / "mambacl")]

    # What the user has; "own images" makes these

    @property
    def photos(self) -> Path:
        return self.work / "photos"

    @property
    def more(self) -> Path:
        """three new classes"""
        return self.work / "more-photos"

    @property
    def tests(self) -> Path:
        """test images of old and new classes"""
        return self.work / "test-photos"

    @property
    def run(self) -> Path:
        """the run that learns"""
        return self.work / "runs" / "photos"

    @property
    def deployed(self) -> Path:
        """a copy of it, which stays as it is"""
        return self.work / "deployed"

    # Commands

    def variables(self) -> dict[str, str]:
        """Nothing of the developer's shell: neither the repository nor another environment."""
        ours = ("PYTHON", "VIRTUAL_ENV", "MAMBACL_", "OMP_", "CUDA_VISIBLE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        home = self.work / "home"
        home.mkdir(exist_ok=True)
        path = f"{self.environment / 'bin'}{os.pathsep}{kept.get('PATH', '')}"
        return {**kept, "PATH": path, "HOME": str(home), "PYTHONNOUSERSITE": "1", **self.further}

    def call(
        self, words: Sequence[str | Path], stdin: str = "", out: Path | None = None,
        before: Callable[[], None] | None = None, variables: Mapping[str, str] | None = None, longest: float = LONGEST,
    ) -> Done:  # fmt: skip
        """Runs a command in the work folder. `out` takes its standard output; `before` runs in the new process."""
        typed = tuple(map(str, words))
        began = time.monotonic()
        with open(out, "w") if out is not None else _pipe() as target:
            done = subprocess.run(
                typed, input=stdin, stdout=target, stderr=subprocess.PIPE, text=True, cwd=self.work,
                env=dict(variables or self.variables()), timeout=longest, preexec_fn=before,
            )  # fmt: skip
        return Done(typed, done.returncode, done.stdout or "", done.stderr, time.monotonic() - began)

    def mambacl(
        self, *words: str | Path, stdin: str = "", out: Path | None = None, before: Callable[[], None] | None = None
    ) -> Done:
        done = self.call([*self.command, *words], stdin, out, before)
        typed = ("mambacl", *done.words[len(self.command) :])
        return Done(typed, done.code, done.out, done.err, done.seconds)

    def script(self, name: str, *words: str | Path) -> Done:
        """Runs one of the scripts in `inside`, as a file outside the repository: a script's folder is on its path."""
        copy = self.work / "scripts" / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((INSIDE / name).read_bytes())
        return self.call([self.python, copy, *words])

    # Checks

    def check(self, what: str, good: bool, words: object = "") -> bool:
        now = time.monotonic()
        made = Check(self.part, what, PASSED if good else FAILED, "" if good else str(words), now - self.since)
        self.note(made)
        self.since = now
        return good

    def skip(self, what: str, words: str) -> None:
        self.note(Check(self.part, what, SKIPPED, words))

    def note(self, check: Check) -> None:
        self.checks.append(check)
        mark = {PASSED: "ok     ", FAILED: "FAILED ", SKIPPED: "skipped"}[check.result]
        words = f": {check.words}" if check.words else ""
        print(f"{mark} {check.part}: {check.what}{words} ({check.seconds:.1f} s)", flush=True)

    def need(self, what: str, good: bool, words: object = "") -> None:
        """A check without which the rest of the part makes no sense."""
        if not self.check(what, good, words):
            raise PartFailed(what)

    def works(self, what: str, done: Done) -> Done:
        """The command must succeed."""
        self.need(what, done.code == 0 and "Traceback" not in done.err, done)
        return done

    def refuses(
        self, what: str, done_by: Callable[[], Done], *unchanged: Path, mentions: str = "", absent: Path | None = None
    ) -> None:
        """Bad input: one sentence, an exit code other than 0, and the same bytes as before in each of `unchanged`."""
        before = [digest(place) for place in unchanged]
        done = done_by()
        fault = refusal_fault(done)
        if not fault and mentions not in done.err:
            fault = f"it does not mention '{mentions}'"
        if not fault and [digest(place) for place in unchanged] != before:
            fault = "it changed files"
        if not fault and absent is not None and absent.exists():
            fault = f"it left {absent}"
        self.check(f"bad input: {what}", not fault, f"{fault}; {done}")


@contextmanager
def _pipe() -> Iterator[int]:
    yield subprocess.PIPE
