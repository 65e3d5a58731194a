"""Unpacking: within its folder, whole files only, continued after a kill."""

import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from data_help import contents, make_tar, make_zip

from mambacl.data.preparing import unpack
from mambacl.errors import UserError


@pytest.mark.parametrize(
    "name", ["../out.txt", "/tmp/mambacl-out.txt", "a/../../out.txt", "C:\\out.txt", "..\\out.txt"]
)
@pytest.mark.parametrize("make", [make_tar, make_zip])
def test_an_archive_that_would_write_outside(tmp_path: Path, name: str, make: object) -> None:
    archive, root = tmp_path / "archive", tmp_path / "root"
    root.mkdir()
    make(archive, {"first.txt": b"1", name: b"2"})  # type: ignore[operator]
    with pytest.raises(UserError, match="would write outside"):
        unpack(archive, root)
    assert not list(root.iterdir()) and not (tmp_path / "out.txt").exists()
    assert not Path("/tmp/mambacl-out.txt").exists()


def test_links_in_an_archive_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        link = tarfile.TarInfo("inside")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as zipped:
        info = zipfile.ZipInfo("inside")
        info.external_attr = 0o120777 << 16
        zipped.writestr(info, "/etc")
    for archive in ("a.tar", "a.zip"):
        with pytest.raises(UserError, match="'inside'"):
            unpack(tmp_path / archive, root)
    assert not list(root.iterdir())


@pytest.mark.parametrize("compression", ["gz", "bz2", "xz"])
def test_a_damaged_archive(tmp_path: Path, compression: str) -> None:
    archive = tmp_path / "a.tar"
    make_tar(archive, {f"{i}": os.urandom(3000) for i in range(5)}, compression)
    archive.write_bytes(archive.read_bytes()[:9000])
    with pytest.raises(UserError, match="damaged"):
        unpack(archive, tmp_path)
    archive.write_bytes(b"words")
    with pytest.raises(UserError, match="neither a zip nor a tar"):
        unpack(archive, tmp_path)


KILLED = """
import sys
from pathlib import Path
from mambacl.data.preparing import unpack
unpack(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_killed_and_continued(tmp_path: Path) -> None:
    files = {f"d{i % 7}/{i}.bin": bytes([i % 251]) * 5000 for i in range(4000)}
    make_zip(tmp_path / "a.zip", files)
    root = tmp_path / "root"
    root.mkdir()
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "a.zip", root])
    deadline = time.monotonic() + 60
    while not (root / "d3").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = list(root.rglob("*.bin"))
    assert 0 < len(there) < len(files)
    assert all(path.read_bytes() == files[str(path.relative_to(root))] for path in there)  # each is whole
    written, present = unpack(tmp_path / "a.zip", root)
    assert present == len(there) and written == len(files) - present
    assert contents(root) == files  # nothing else is left
