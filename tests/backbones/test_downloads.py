"""Public weights from their addresses: checked, cached, continued after an interruption."""

import dataclasses
import hashlib
import io
import os
import threading
import urllib.error

import pytest
import torch

from mambacl.backbones import create_model, load_weights
from mambacl.backbones.loading import cache_folder, weights_file
from mambacl.backbones.registry import MODELS, PublicWeights
from mambacl.errors import UserError


class Response(io.BytesIO):
    """What urlopen gives: bytes, headers and a status."""

    def __init__(self, content, length=None, status=200):
        super().__init__(content)
        self.headers = {"Content-Length": str(len(content) if length is None else length)}
        self.status = status


@pytest.fixture
def cache(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setenv("MAMBACL_CACHE", str(folder))
    return folder


class Network:
    """Answers every request with `response`, a function or an error, and remembers what was asked for."""

    def __init__(self):
        self.response, self.asked = None, []

    def urlopen(self, request, **_):
        self.asked.append(request.full_url)
        self.range = request.get_header("Range")
        if isinstance(self.response, Exception):
            raise self.response
        return self.response()


@pytest.fixture
def network(monkeypatch):
    answering = Network()
    monkeypatch.setattr("urllib.request.urlopen", answering.urlopen)
    return answering


@pytest.fixture
def entry(source):
    """A size with public weights, and their bytes."""
    buffer = io.BytesIO()
    torch.save({"model": source.state_dict()}, buffer)
    content = buffer.getvalue()
    weights = PublicWeights(url="https://example.org/v1/tiny.pth", sha256=hashlib.sha256(content).hexdigest())
    return dataclasses.replace(MODELS.get("defocus_mamba"), name="tiny", weights={"in1k": weights}), content


def left(folder):
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_offline_a_public_size_gives_one_clear_error(cache, network):
    network.response = urllib.error.URLError("Name or service not known")
    small = {"depth": 1, "embed_dim": 8, "mamba": {"intermediate_size": 64}}
    with pytest.raises(UserError) as caught:
        create_model("defocus_mamba_base", pretrained=True, **small)
    message = str(caught.value)
    assert "releases/download/v1.0/defocus_mamba_base_cls.pth" in message and "Name or service not known" in message
    assert f"put it at {cache / 'defocus_mamba_base_cls.pth'}" in message
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert left(cache) == []


def test_a_download_is_kept_checked_and_made_once(cache, network, entry, target):
    size, content = entry
    network.response = lambda: Response(content)
    path = weights_file(size)
    assert path == cache / "tiny.pth" and path.read_bytes() == content and left(cache) == ["tiny.pth"]
    assert weights_file(size) == path and network.asked == ["https://example.org/v1/tiny.pth"]
    load_weights(target, path)


def test_a_file_put_into_the_cache_by_hand_is_used(cache, network, entry):
    network.response = urllib.error.URLError("offline")
    cache.mkdir()
    (cache / "tiny.pth").write_bytes(entry[1])
    assert weights_file(entry[0]).read_bytes() == entry[1] and network.asked == []


def test_a_file_with_another_checksum_is_not_kept(cache, network, entry):
    network.response = lambda: Response(b"something else")
    with pytest.raises(UserError, match=r"is not the expected one .sha256:.*deleted: try again, or fetch it"):
        weights_file(entry[0])
    assert left(cache) == []


def test_a_short_download_is_continued(cache, network, entry):
    size, content = entry
    network.response = lambda: Response(content[:-10], length=len(content))
    with pytest.raises(UserError, match=rf"stopped after {len(content) - 10} of {len(content)} bytes: try again"):
        weights_file(size)
    assert left(cache) == ["tiny.pth.part"]
    network.response = lambda: Response(content[-10:], status=206)
    assert weights_file(size).read_bytes() == content and network.range == f"bytes={len(content) - 10}-"
    assert left(cache) == ["tiny.pth"]


def test_a_server_that_cannot_continue_starts_over(cache, network, entry):
    size, content = entry
    cache.mkdir()
    (cache / "tiny.pth.part").write_bytes(b"an older attempt")
    network.response = lambda: Response(content)
    assert weights_file(size).read_bytes() == content and network.range == "bytes=16-"


def test_without_a_checksum_nothing_is_continued(cache, network, entry):
    size, content = entry
    size = dataclasses.replace(size, weights={"in1k": dataclasses.replace(size.weights["in1k"], sha256=None)})
    cache.mkdir()
    (cache / "tiny.pth.part").write_bytes(b"an older attempt")
    network.response = lambda: Response(content)
    assert weights_file(size).read_bytes() == content and network.range is None


def test_a_broken_connection(cache, network, entry):
    class Breaking(Response):
        def read(self, size=-1):
            if self.tell():
                raise ConnectionResetError("connection reset by peer")
            return super().read(4)

    size, content = entry
    network.response = lambda: Breaking(content)
    with pytest.raises(UserError, match=r"connection reset by peer\): try again, or fetch it elsewhere"):
        weights_file(size)
    assert left(cache) == ["tiny.pth.part"] and (cache / "tiny.pth.part").read_bytes() == content[:4]


def test_two_processes_download_one_after_the_other(cache, network, entry):
    """The second waits for the first, and finds its file."""
    size, content = entry
    waiting = threading.Thread(target=weights_file, args=(size,))

    def answer():
        waiting.start()
        return Response(content)

    network.response = answer
    assert weights_file(size).read_bytes() == content
    waiting.join()
    assert len(network.asked) == 1 and left(cache) == ["tiny.pth"]


@pytest.mark.parametrize("name", ["defocus_mamba_tiny", "defocus_mamba_small"])
def test_sizes_without_public_weights_say_so(name, cache, network):
    with pytest.raises(UserError, match=f"no public weights for '{name}'; give the path of your own"):
        weights_file(MODELS.get(name))
    assert network.asked == []


def test_packaged_weights_need_no_network(cache, network):
    assert weights_file(MODELS.get("defocus_mamba_nano")).is_file() and network.asked == []


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MAMBACL_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("MAMBACL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "mambacl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "mambacl"
