"""Preparing: resumable, verified, within its folder, and nothing of the user's is touched."""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO

import pytest
from data_help import LISTS, contents, image_bytes, make_tar, make_zip, needs_lists

from mambacl import files
from mambacl.cli import main
from mambacl.data import SOURCES, Download, Source, prepare
from mambacl.data.preparing import unpack
from mambacl.errors import UserError
from mambacl.files import PART, locked

FILES = {f"imagenet-r/n0{c}/a {i}.jpg": 10 * c + i for c in range(3) for i in range(4)}


def sha(path: Path) -> str:
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small ImageNet-R and its lists, which the package takes for the public one."""
    store = tmp_path / "store"
    store.mkdir()
    make_tar(store / "imagenet-r.tar", {name: image_bytes(seed) for name, seed in FILES.items()})
    names = [name.removeprefix("imagenet-r/") for name in FILES]
    (store / "imagenet_r_train.txt").write_text("\n".join(n for n in names if "a 0" not in n))
    (store / "imagenet_r_val.txt").write_text("\n".join(n for n in names if "a 0" in n))
    lists = tuple(
        Download(f"http://127.0.0.1:9/{name}", sha(store / name), False, "lists")
        for name in ("imagenet_r_train.txt", "imagenet_r_val.txt")
    )
    archive = Download("http://127.0.0.1:9/imagenet-r.tar", sha(store / "imagenet-r.tar"))
    monkeypatch.setitem(SOURCES, "imagenet-r", Source("small", "", (3, 9, 3), (archive,), lists))
    return store


def test_from_files_at_hand(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, root = contents(store), tmp_path / "a new" / "root"
    words = ["--root", str(root), "--source", str(store / "imagenet-r.tar"), "--lists", str(store)]
    assert main(["data", "prepare", "imagenet-r", *words]) == 0
    assert "3 classes, 9 training and 3 test images" in capsys.readouterr().out
    assert contents(store) == before  # nothing moved
    assert {name for name in contents(root) if name.startswith("imagenet-r/")} == set(FILES)
    assert main(["data", "check", "imagenet-r", "--root", str(root)]) == 0
    (root / "imagenet-r" / "n01" / "mine.txt").write_text("a note")
    after = contents(root)
    assert prepare("imagenet-r", root, [store], store).class_names == ["n00", "n01", "n02"]  # a folder of archives
    assert contents(root) == after
    for path in (store / "imagenet-r.tar", root / "imagenet-r"):  # what is whole needs no archive
        assert path.exists()
    prepare("imagenet-r", root, lists=store)
    (root / "imagenet-r" / "n01" / "a 2.jpg").unlink()
    assert main(["data", "prepare", "imagenet-r", *words]) == 0
    assert "1 files written, 11 already existed" in capsys.readouterr().out and contents(root) == after


def test_images_that_lie_there_already_need_only_lists(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    unpack(store / "imagenet-r.tar", root)
    before = contents(root)
    assert len(prepare("imagenet-r", root, lists=store).train.labels) == 9  # there is no server to ask
    assert {name: data for name, data in contents(root).items() if not name.startswith("lists/")} == before


def test_an_archive_that_lacks_listed_images(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tar(tmp_path / "a.tar", {name: image_bytes(seed) for name, seed in list(FILES.items())[:-2]})
    archive = Download("http://127.0.0.1:9/imagenet-r.tar", sha(tmp_path / "a.tar"))
    monkeypatch.setitem(SOURCES, "imagenet-r", replace(SOURCES["imagenet-r"], downloads=(archive,)))
    words = ["--root", str(tmp_path / "root"), "--source", str(tmp_path / "a.tar"), "--lists", str(store)]
    assert main(["data", "prepare", "imagenet-r", *words]) == 1
    assert "2 images are missing" in capsys.readouterr().out


def test_a_wrong_archive_or_list_is_refused(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (tmp_path / "other.tar").write_bytes(b"something else")
    with pytest.raises(UserError, match=r"other\.tar is not imagenet-r\.tar \(SHA256"):
        prepare("imagenet-r", root, [tmp_path / "other.tar"], store)
    with pytest.raises(UserError, match=r"nor contains one of imagenet-r\.tar"):
        prepare("imagenet-r", root, [root], store)
    with pytest.raises(UserError, match=r"clipart \(1\)\.zip neither is nor contains one of clipart\.zip"):
        (tmp_path / "clipart (1).zip").write_bytes(b"")
        prepare("domainnet-345", root, [tmp_path / "clipart (1).zip"], store)
    with pytest.raises(UserError, match="does not exist"):
        prepare("imagenet-r", root, [tmp_path / "none.tar"], store)
    with pytest.raises(UserError, match=r"--lists takes a folder with imagenet_r_train\.txt"):
        prepare("imagenet-r", tmp_path / "b", [store], tmp_path)
    (root / "lists" / "imagenet_r_val.txt").write_text("my own")
    with pytest.raises(UserError, match="move it away"):
        prepare("imagenet-r", root, [store], store)
    assert (root / "lists" / "imagenet_r_val.txt").read_text() == "my own"


def test_a_file_of_the_users_is_not_overwritten(store: Path, tmp_path: Path) -> None:
    mine = tmp_path / "root" / "imagenet-r" / "n01" / "a 2.jpg"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    with pytest.raises(UserError, match=r"a 2\.jpg already exists and differs from"):
        prepare("imagenet-r", tmp_path / "root", [store], store)
    assert mine.read_bytes() == b"mine" and len(list((tmp_path / "root" / "imagenet-r").rglob("*.jpg"))) == 1


def test_a_link_to_nothing_is_not_replaced(store: Path, tmp_path: Path) -> None:
    for name in ("imagenet-r/n01/a 2.jpg", "lists/imagenet_r_val.txt"):
        root = tmp_path / name.replace("/", " ")
        mine = root / name
        mine.parent.mkdir(parents=True)
        mine.symlink_to("away")
        with pytest.raises(UserError, match="is a dangling link"):
            prepare("imagenet-r", root, [store], store)
        assert mine.is_symlink() and not list(root.rglob("a 1.jpg"))


@needs_lists
def test_the_public_lists_are_taken_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tar(tmp_path / "empty.tar", {"imagenet-r/README.txt": b"images"})
    archive = Download("http://127.0.0.1:9/imagenet-r.tar", sha(tmp_path / "empty.tar"))
    monkeypatch.setitem(SOURCES, "imagenet-r", replace(SOURCES["imagenet-r"], downloads=(archive,)))
    dataset = prepare("imagenet-r", tmp_path / "root", [tmp_path / "empty.tar"], LISTS)
    assert (len(dataset.train.labels), len(dataset.test.labels)) == (24000, 6000)
    assert contents(tmp_path / "root" / "lists").items() <= contents(LISTS).items()


# Interruptions


def test_a_disk_that_fills(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, copied = tmp_path / "root", 0

    def full(source: IO[bytes], out: IO[bytes], length: int = 0) -> None:
        nonlocal copied
        copied += 1
        out.write(source.read(3))
        if copied > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        out.write(source.read())

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "copyfileobj", full)
        with pytest.raises(UserError, match=r"The disk is full at .*: free some space and repeat the command"):
            prepare("imagenet-r", root, [store], store)
    written = contents(root)
    assert len(written) == 6 and not list(root.rglob(PART))  # two lists, four images, no half of one
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)
        patch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=10))
        with pytest.raises(UserError, match="GB free, but"):
            prepare("imagenet-r", root, [store], store)
    assert len(prepare("imagenet-r", root, [store], store).train.labels) == 9
    assert {name: contents(root)[name] for name in written} == written


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_device_that_is_full(store: Path, tmp_path: Path) -> None:
    """The system's own error, in the middle of the third class."""
    root = tmp_path / "root"
    (root / "imagenet-r" / "n02").mkdir(parents=True)
    (root / "imagenet-r" / "n02" / PART).symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"The disk is full at .*n02"):
        prepare("imagenet-r", root, [store], store)
    assert not list(root.rglob(PART)) and len(list(root.rglob("*.jpg"))) == 8
    assert len(prepare("imagenet-r", root, [store], store).train.labels) == 9


@contextmanager
def as_anybody() -> Iterator[None]:
    """Without the rights of an administrator, whom no permission stops."""
    administrator = os.geteuid() == 0
    if administrator:
        os.seteuid(65534)
    try:
        yield
    finally:
        if administrator:
            os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions are otherwise here")
def test_a_root_without_permission_to_write(store: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as place:  # the tests' own folder is closed to others
        os.chmod(place, 0o755)
        root, sources = Path(place) / "root", Path(place) / "store"
        shutil.copytree(store, sources)
        root.mkdir()
        root.chmod(0o555)
        for folder in (root, root / "deeper"):
            with (
                as_anybody(),
                pytest.raises(UserError, match=r"cannot be written \(Permission denied\): choose a folder"),
            ):
                prepare("imagenet-r", folder, [sources], sources)
        assert not list(root.iterdir())
        prepare("imagenet-r", Path(place) / "other", [sources], sources)
        for folder in [path for path in (Path(place) / "other").rglob("*") if path.is_dir()]:
            folder.chmod(0o555)
        with as_anybody():  # what is whole needs no writing
            assert len(prepare("imagenet-r", Path(place) / "other", lists=sources).train.labels) == 9
        for folder in [path for path in (Path(place) / "other").rglob("*") if path.is_dir()]:
            folder.chmod(0o755)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_root_that_may_not_be_written(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    for owner, name in ((Path, "mkdir"), (files.os, "replace")):
        with monkeypatch.context() as patch, pytest.raises(UserError, match="cannot be written"):
            patch.setattr(owner, name, refuse)
            prepare("imagenet-r", tmp_path / "root", [store], store)
        (tmp_path / "root").mkdir(exist_ok=True)
    assert not contents(tmp_path / "root")
    (tmp_path / "file").write_text("")
    for root, sentence in ((tmp_path / "file", "is a file, but must be a folder"), ("", "root is empty")):
        with pytest.raises(UserError, match=sentence):
            prepare("imagenet-r", root, [store], store)


def test_two_at_once(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with locked(root / ".lock"), pytest.raises(UserError, match="Another process"):
        prepare("imagenet-r", root, [store], store)


# Downloads


class Server(ThreadingHTTPServer):
    store: Path
    breaks_at: int | None = None  # a download that begins at 0 breaks off there
    asked: list[str]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.server.store / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data, begun = path.read_bytes(), self.headers.get("Range")
        self.server.asked.append(f"{path.name} {begun}")
        start = int(begun.removeprefix("bytes=").rstrip("-")) if begun else 0
        if start >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if begun else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        stop = self.server.breaks_at if not begun and path.suffix == ".tar" else None
        self.wfile.write(data[start:stop])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.store, server.asked = store, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    base, source = f"http://127.0.0.1:{server.server_port}", SOURCES["imagenet-r"]
    parts = {"downloads": source.downloads, "lists": source.lists}
    moved = {key: tuple(replace(one, url=f"{base}/{one.name}") for one in part) for key, part in parts.items()}
    monkeypatch.setitem(SOURCES, "imagenet-r", replace(source, **moved))
    yield server
    server.shutdown()
    server.server_close()


def test_downloads_are_continued(server: Server, tmp_path: Path) -> None:
    root, server.breaks_at = tmp_path / "root", 1000
    with pytest.raises(UserError, match=r"stopped after 1000 of .* bytes: try again to continue it"):
        prepare("imagenet-r", root)
    assert (root / "downloads" / "imagenet-r.tar.part").stat().st_size == 1000
    assert len(prepare("imagenet-r", root).test.labels) == 3
    assert server.asked[-1] == "imagenet-r.tar bytes=1000-"
    assert (root / "downloads" / "imagenet-r.tar").exists() and not list(root.rglob("*.part"))
    count = len(server.asked)
    prepare("imagenet-r", root)
    assert len(server.asked) == count  # nothing is fetched twice


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_device_that_is_full_while_downloading(server: Server, tmp_path: Path) -> None:
    downloads = tmp_path / "root" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / "imagenet-r.tar.part").symlink_to("/dev/full")
    with pytest.raises(UserError, match="The disk is full at"):
        prepare("imagenet-r", tmp_path / "root", lists=server.store)
    (downloads / "imagenet-r.tar.part").unlink()
    assert len(prepare("imagenet-r", tmp_path / "root").test.labels) == 3


def test_a_download_that_was_whole_already(server: Server, tmp_path: Path) -> None:
    downloads = tmp_path / "root" / "downloads"
    downloads.mkdir(parents=True)
    shutil.copy(server.store / "imagenet-r.tar", downloads / "imagenet-r.tar.part")  # killed before it got its name
    assert len(prepare("imagenet-r", tmp_path / "root").test.labels) == 3


def test_a_download_that_is_something_else(server: Server, tmp_path: Path) -> None:
    (server.store / "imagenet-r.tar").write_bytes(b"an apology")
    with pytest.raises(UserError, match="was deleted"):
        prepare("imagenet-r", tmp_path / "root")
    assert not list((tmp_path / "root" / "downloads").iterdir())
    (server.store / "imagenet-r.tar").unlink()
    with pytest.raises(UserError, match=r"Could not download .* give its path with --source"):
        prepare("imagenet-r", tmp_path / "root")


def test_without_a_network(store: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Could not download .*imagenet_r_train\.txt .* with --lists"):
        prepare("imagenet-r", tmp_path / "root")


def test_another_address(server: Server, store: Path, tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{server.server_port}/copy.tar"
    shutil.copy(store / "imagenet-r.tar", store / "copy.tar")
    assert len(prepare("imagenet-r", tmp_path / "root", [address], store).test.labels) == 3
    assert server.asked == ["copy.tar None"]


# Archives


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
