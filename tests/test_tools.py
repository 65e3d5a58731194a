"""The scripts in tools/: what they accept and what they do not."""

import io
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Imports modules of tools/ by name, as if from their folders, and forgets them afterwards."""
    monkeypatch.syspath_prepend(str(TOOLS / "first_hour"))
    monkeypatch.syspath_prepend(str(TOOLS))
    loaded = []

    def by_name(name: str) -> ModuleType:
        loaded.append(name)
        return __import__(name)

    yield by_name
    for name in loaded:
        del sys.modules[name]


def test_how_input_is_refused(load) -> None:
    hour = load("hour")

    def fault(code: int, err: str, out: str = "") -> str:
        return hour.refusal_fault(hour.Done(("mambacl",), code, out, err))

    assert fault(2, "mambacl: The folder is empty: add images.\n") == ""
    assert "accepted" in fault(0, "mambacl: The folder is empty.")
    assert "signal 9" in fault(-9, "mambacl: A sentence.")
    assert "traceback" in fault(1, "mambacl: A sentence.", "Traceback (most recent call last):")
    assert "2 lines" in fault(1, "mambacl: One.\nmambacl: Two.")
    assert "0 lines" in fault(1, "")
    assert "sentence" in fault(1, "Killed")


def test_a_refusal_that_changes_a_file_fails(load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hour = load("hour")
    (tmp_path / "run").mkdir()
    kept = tmp_path / "run" / "results.json"
    kept.write_text("1")
    first = hour.Hour(tmp_path, tmp_path)
    refused = hour.Done(("mambacl",), 2, "", "mambacl: No.")

    def changes() -> object:
        kept.write_text("2")
        return refused

    first.refuses("a", lambda: refused, tmp_path / "run")
    first.refuses("b", changes, tmp_path / "run")
    first.refuses("c", lambda: refused, mentions="--test")
    first.refuses("d", lambda: refused, absent=kept)
    assert [check.result for check in first.checks] == ["passed", "failed", "failed", "failed"]
    assert "it changed files" in capsys.readouterr().out
    with pytest.raises(hour.PartFailed):
        first.works("e", refused)


def test_the_large_image_is_one(load) -> None:
    data = load("images").large_png(80, 10)
    assert Image.open(io.BytesIO(data)).convert("L").getextrema() == (0, 0)
    assert Image.open(io.BytesIO(data)).size == (80, 10)


def test_packages_do_not_show_who_packed_them_and_when(load) -> None:
    build = load("build_packages")
    sdists, wheels = [], []
    for time, owner, names in (
        (1e9, "ada", ("p/b", "p/a", "p-1.dist-info/RECORD")),
        (1.1e9, "bob", ("p-1.dist-info/RECORD", "p/a", "p/b")),
    ):
        tar, zipped = io.BytesIO(), io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w:gz") as packed, zipfile.ZipFile(zipped, "w") as wheel:
            for name in names:
                info = tarfile.TarInfo(name)
                info.size, info.mtime, info.uname, info.mode = len(name), time, owner, 0o600
                packed.addfile(info, io.BytesIO(name.encode()))
                wheel.writestr(zipfile.ZipInfo(name, (2000 + len(owner), 1, int(time % 7) + 1, 0, 0, 0)), name)
        sdists.append(build.plain_sdist(tar.getvalue(), 1_700_000_000))
        wheels.append(build.plain_wheel(zipped.getvalue(), 1_700_000_000))
    assert sdists[0] == sdists[1] and wheels[0] == wheels[1]
    with tarfile.open(fileobj=io.BytesIO(sdists[0])) as packed:
        assert [member.name for member in packed] == ["p-1.dist-info/RECORD", "p/a", "p/b"]
        assert packed.extractfile("p/a").read() == b"p/a"
    with zipfile.ZipFile(io.BytesIO(wheels[0])) as wheel:
        assert wheel.namelist() == ["p/a", "p/b", "p-1.dist-info/RECORD"] and wheel.read("p/b") == b"p/b"
        assert {info.date_time for info in wheel.infolist()} == {(2023, 11, 14, 22, 13, 20)}
