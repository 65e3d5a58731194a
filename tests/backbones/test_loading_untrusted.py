"""Weights from files that are foreign, hostile or damaged: nothing is run, and what is refused gets its sentence."""

import argparse
import builtins
import io
import os
import pickle
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from loading_help import same
from safetensors.torch import save_file

from mambacl.backbones import convert, load_weights
from mambacl.errors import UserError

# Foreign classes


@pytest.fixture
def foreign(monkeypatch):
    """A module with a configuration class, as the public trainers save one."""
    module = types.ModuleType("yacs_like.config")

    class CfgNode(dict):
        def __init__(self, values=(), frozen=True):
            super().__init__(values)
            self.frozen = frozen

    class Meter:
        def __init__(self):
            self.total = 3.0

        def __setstate__(self, state):
            raise AssertionError("the file's class was run")

    for kind in (CfgNode, Meter):
        kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
        setattr(module, kind.__name__, kind)
    package = types.ModuleType("yacs_like")
    package.config = module
    monkeypatch.setitem(sys.modules, "yacs_like", package)
    monkeypatch.setitem(sys.modules, "yacs_like.config", module)
    return module


def test_foreign_objects_become_inert_and_are_named(foreign, source, target, tmp_path):
    contents = {
        "config": foreign.CfgNode({"MODEL": foreign.CfgNode({"NAME": "x"}), "TRAIN": [1, 2]}),
        "meter": foreign.Meter(),
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
        "max_accuracy": np.float64(82.0),
        "path": Path("somewhere"),
        "kind": foreign.Meter,
        "model": source.state_dict(),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }
    torch.save(contents, tmp_path / "w.pth")
    del sys.modules["yacs_like"], sys.modules["yacs_like.config"]
    account = load_weights(target, tmp_path / "w.pth")
    assert same(target, source.state_dict())
    assert {"yacs_like.config.CfgNode", "yacs_like.config.Meter", "argparse.Namespace"} <= set(account.inert)
    assert "yacs_like.config.CfgNode" in str(account) and "yacs_like" not in sys.modules


# Hostile files


class Runs:
    """Pickles as the call of a function, with a state and items to put into its result."""

    def __init__(self, function, *arguments, state=None, items=None):
        self.parts = (function, arguments, state, None, iter(items) if items else None)

    def __reduce__(self):
        return self.parts


def nested_archive(touch):
    """The bytes of a whole checkpoint whose own pickle is hostile."""
    buffer = io.BytesIO()
    torch.save({"model": Runs(os.system, touch)}, buffer)
    return buffer.getvalue()


# Each makes a plain unpickler create the marker file; text becomes a pickle by hand, anything else by pickle.dumps.
HOSTILE = {
    "os.system": lambda marker: Runs(os.system, f"touch {marker}"),
    "subprocess": lambda marker: Runs(subprocess.check_call, ["touch", str(marker)]),
    "eval": lambda marker: Runs(builtins.eval, f"open({str(marker)!r}, 'w').close()"),
    "exec": lambda marker: Runs(builtins.exec, f"open({str(marker)!r}, 'w').close()"),
    "open": lambda marker: Runs(builtins.open, str(marker), "w"),
    "method by getattr": lambda marker: Runs(Path.touch, marker),
    "deep in lists": lambda marker: {"model": [1, (2, [Runs(os.system, f"touch {marker}")])]},
    "argument of a call": lambda marker: Runs(print, Runs(os.system, f"touch {marker}"), ""),
    "state of an object": lambda marker: Runs(OrderedDict, state={"x": Runs(os.system, f"touch {marker}")}),
    "items of an object": lambda marker: Runs(OrderedDict, items=[("x", Runs(os.system, f"touch {marker}"))]),
    "pickle in a pickle": lambda marker: Runs(pickle.loads, pickle.dumps(Runs(os.system, f"touch {marker}"))),
    "PyTorch's loader": lambda marker: Runs(torch.storage._load_from_bytes, nested_archive(f"touch {marker}")),
    "GLOBAL and REDUCE": lambda marker: f"cposix\nsystem\n(S'touch {marker}'\ntR.",
    "Python 2 names": lambda marker: f'c__builtin__\neval\n(S\'open("{marker}", "w")\'\ntR.',
    "INST": lambda marker: f"(S'touch {marker}'\nios\nsystem\n.",
    "OBJ": lambda marker: f"(cos\nsystem\nS'touch {marker}'\no.",
    "call after a harmless one": lambda marker: f"ccollections\nOrderedDict\n)R0cos\nsystem\n(S'touch {marker}'\ntR.",
}


def write_archive(path, data, records=()):
    """A checkpoint in PyTorch's zip layout around a hand-made pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for name, content in dict(records).items():
            archive.writestr(f"archive/{name}", content)


@pytest.mark.parametrize("trick", HOSTILE)
def test_nothing_in_a_file_is_run(trick, target, tmp_path):
    marker, path = tmp_path / "marker", tmp_path / "w.pth"
    content = HOSTILE[trick](marker)
    data = content.encode() if isinstance(content, str) else pickle.dumps(content, protocol=2)
    write_archive(path, data)
    with pytest.raises(UserError, match=r"no weights|damaged"):
        load_weights(target, path)
    with pytest.raises(UserError):
        convert(path, tmp_path / "w.safetensors")
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists()  # the same bytes do run elsewhere


def test_hostile_objects_beside_good_weights_are_inert_and_named(source, target, tmp_path):
    marker = tmp_path / "marker"
    payload = Runs(os.system, f"touch {marker}", state={"a": Runs(builtins.eval, "1")})
    torch.save({"epoch": payload, "model": source.state_dict(), "hooks": [payload]}, tmp_path / "w.pth")
    account = load_weights(target, tmp_path / "w.pth")
    assert same(target, source.state_dict()) and not marker.exists()
    assert {name.rsplit(".", 1)[-1] for name in account.inert} == {"system", "eval"}


def test_a_file_cannot_reach_through_a_harmless_name(target, tmp_path):
    marker = tmp_path / "marker"
    dotted = b"\x80\x04\x8c\x0bcollections\x8c\x1aOrderedDict.__init__.__self__\x93)R."
    for data in (dotted, f"ccollections\nOrderedDict.__reduce__\n(S'{marker}'\ntR.".encode()):
        write_archive(tmp_path / "w.pth", data)
        with pytest.raises(UserError):
            load_weights(target, tmp_path / "w.pth")
    assert not marker.exists()


# Damage


def test_a_missing_file_is_named(target, tmp_path):
    with pytest.raises(UserError, match=r"no weights file .*w\.pth; give the path"):
        load_weights(target, tmp_path / "w.pth")
    with pytest.raises(UserError, match="is a folder; give the path"):
        load_weights(target, tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused_with_the_remedy(keep, source, target, tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"model": source.state_dict()}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    with pytest.raises(UserError, match="download it again"):
        load_weights(target, path)


@pytest.mark.parametrize("where", ["data.pkl", "data/0", "data/5"])
def test_a_flipped_byte_is_noticed(where, source, target, tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"model": source.state_dict()}, path)
    with zipfile.ZipFile(path) as archive:
        content = next(archive.read(name) for name in archive.namelist() if name.endswith("/" + where))
    damaged = bytearray(path.read_bytes())
    position = bytes(damaged).index(content) + len(content) // 2
    damaged[position] ^= 0x20
    path.write_bytes(damaged)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(UserError, match="download it again"):
        load_weights(target, path)
    assert same(target, before)


def test_the_old_format_of_pytorch_is_refused_with_the_remedy(source, target, tmp_path):
    torch.save({"model": source.state_dict()}, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"PyTorch 1\.6 or newer.*save it as safetensors"):
        load_weights(target, tmp_path / "w.pth")


def test_other_zip_files_are_refused(target, tmp_path):
    with zipfile.ZipFile(tmp_path / "w.pth", "w") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(UserError, match=r"has no data\.pkl"):
        load_weights(target, tmp_path / "w.pth")


def test_big_endian_files_are_refused(target, tmp_path):
    write_archive(tmp_path / "w.pth", pickle.dumps({}), {"byteorder": "big"})
    with pytest.raises(UserError, match="big-endian"):
        load_weights(target, tmp_path / "w.pth")


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff" * 40])
def test_damaged_safetensors_are_refused_with_the_remedy(content, target, tmp_path):
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="download it again"):
        load_weights(target, tmp_path / "w.safetensors")


def test_a_truncated_safetensors_file_is_refused(source, target, tmp_path):
    path = tmp_path / "w.safetensors"
    save_file(source.state_dict(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="download it again"):
        load_weights(target, path)


class Storage:
    """Stands for the archive's record 0."""


class Stored:
    """A tensor over that storage, in any shape."""

    def __init__(self, *geometry):
        self.geometry = geometry

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, (Storage(), *self.geometry, False, OrderedDict())


class ArchivePickler(pickle.Pickler):
    def persistent_id(self, value):
        return ("storage", torch.FloatStorage, "0", "cpu", 4) if isinstance(value, Storage) else None


@pytest.mark.parametrize(
    "offset, size, stride",
    [
        (0, (100,), (1,)),
        (90, (4,), (1,)),
        (0, (2,), (1 << 40,)),
        (0, (1 << 70,), (1,)),
        (-1, (2,), (1,)),
        (0, (-2,), (1,)),
        (0, (2, 2), (1,)),
        (0, ("2",), (1,)),
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(offset, size, stride, target, tmp_path):
    buffer = io.BytesIO()
    ArchivePickler(buffer, protocol=2).dump({"model": {"cls_token": Stored(offset, size, stride)}})
    write_archive(tmp_path / "w.pth", buffer.getvalue(), {"data/0": b"\0" * 16})
    with pytest.raises(UserError, match="damaged"):
        load_weights(target, tmp_path / "w.pth")
