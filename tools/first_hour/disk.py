"""A full disk: a small file system in memory where that is allowed, else a limit on the size of files."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hour import Done, Hour, digest
from training import results
from updating import answers

MEGABYTE = 1 << 20


@dataclass
class SmallDisk:
    place: Path
    mounted: bool
    megabytes: float

    def before(self) -> Callable[[], None] | None:
        """What limits a process, if the place itself does not."""
        most = int(self.megabytes * MEGABYTE)
        return None if self.mounted else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    def grow(self) -> None:
        self.megabytes = 1000
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,size=1000m", str(self.place)], check=True)


@contextmanager
def small_disk(hour: Hour, megabytes: float) -> Iterator[SmallDisk]:
    place = hour.work / "small-disk"
    place.mkdir()
    mounted = False
    if os.geteuid() == 0 and shutil.which("mount"):
        command = ["mount", "-t", "tmpfs", "-o", f"size={int(megabytes * 1024)}k", "tmpfs", str(place)]
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield SmallDisk(place, mounted, megabytes)
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)
        shutil.rmtree(place)


def full_disk(hour: Hour) -> None:
    train_on_a_full_disk(hour, 3, "before the training")
    train_on_a_full_disk(hour, 14, "while it trains")
    learn_on_a_full_disk(hour)
    write_on_a_full_disk(hour)
    if Path("/dev/full").exists():
        say_to_a_full_disk(hour)


def train_on_a_full_disk(hour: Hour, megabytes: float, when: str) -> None:
    """Then there is room again, and the run continues."""
    with small_disk(hour, megabytes) as disk:
        run = disk.place / "run"
        words = ("images", "--quiet", "--stream.root", "photos", "--stream.tasks", "3", "--out", run)
        hour.refuses(f"the disk is full {when}", lambda: hour.mambacl("train", *words, before=disk.before()),
                     hour.photos, mentions="full")  # fmt: skip
        disk.grow()
        hour.works(f"full {when}: the same command continues it", hour.mambacl("train", *words))
        same = results(run)["correct"] == results(hour.deployed)["correct"]
        hour.check(f"full {when}: the counts are those of a run with room", same, results(run)["correct"])


def learn_on_a_full_disk(hour: Hour) -> None:
    size = sum(path.stat().st_size for path in hour.deployed.rglob("*") if path.is_file()) / MEGABYTE
    with small_disk(hour, size + 2) as disk:
        run = shutil.copytree(hour.deployed, disk.place / "run")
        if not disk.mounted:
            disk.megabytes = 1
        words = ("learn", run, "--new", "more-photos")
        hour.refuses("`learn` on a full disk", lambda: hour.mambacl(*words, before=disk.before()), run)
        hour.check("it answers as before", answers(hour, run) == answers(hour, hour.deployed))
        disk.grow()
        hour.works("with room, it learns", hour.mambacl(*words))


def write_on_a_full_disk(hour: Hour) -> None:
    with small_disk(hour, 0.06) as disk:
        (disk.place / "filler").write_bytes(bytes(48 << 10))
        before, small = digest(disk.place), disk.place

        def refused(what: str, *words: str | Path) -> None:
            def work() -> Done:
                return hour.mambacl(*words, before=disk.before())

            hour.refuses(f"{what} on a full disk", work, hour.deployed, small)

        refused("`export`", "export", "deployed", "--out", small / "model.safetensors")
        refused("`export --to onnx`", "export", "deployed", "--to", "onnx", "--out", small / "model.onnx")
        refused("`export --to openvino`", "export", "deployed", "--to", "openvino", "--out", small / "model.xml")
        refused("`predict --out`", "predict", "deployed", "test-photos", "--top", "7", "--out", small / "answers.json")
        refused("`report`", "report", "deployed", "--out", small / "report")
        words = ("compare", "deployed", "deployed", "--test", "test-photos", "--page", small / "update.html")
        refused("`compare --page`", *words)
        left = [path.name for path in small.iterdir()]
        hour.check("nothing is left behind there", digest(small) == before and left in (["filler"],), left)


def say_to_a_full_disk(hour: Hour) -> None:
    words = ("predict", "deployed", "test-photos", "--json")
    hour.refuses("standard output on a full disk", lambda: hour.mambacl(*words, out=Path("/dev/full")), hour.deployed)
