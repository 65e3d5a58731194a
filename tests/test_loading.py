"""Weights from files: every tensor accounted for, nothing of a file ever run."""

import argparse
import builtins
import dataclasses
import io
import os
import pickle
import re
import shlex
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mambacl.backbones import convert, create_model, load_weights
from mambacl.backbones.loading import read_weights
from mambacl.cli import main
from mambacl.errors import UserError


def same(model, state):
    own = model.state_dict()
    return all(torch.equal(own[name], tensor) for name, tensor in state.items())


# Layouts of public checkpoints


def prefixed(state):
    return OrderedDict((f"module.{name}", tensor) for name, tensor in state.items())


LAYOUTS = {
    "the state itself": lambda state: state,
    "under model": lambda state: {"model": state, "epoch": 3, "lr": 1e-3},
    "under state_dict": lambda state: {"state_dict": state, "arch": "defocus"},
    "under model_ema": lambda state: {"model_ema": state, "best": None},
    "nested": lambda state: {"model": {"state_dict": state}},
    "distributed": lambda state: {"model": prefixed(state)},
    "plain dict": lambda state: {"model": dict(state)},
    "parameters": lambda state: {"model": {name: torch.nn.Parameter(tensor) for name, tensor in state.items()}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_usual_layout_is_loaded_whole(layout, source, target, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(LAYOUTS[layout](source.state_dict()), path)
    account = load_weights(target, path)
    assert same(target, source.state_dict())
    assert sorted(account.loaded) == sorted(source.state_dict())
    assert account.missing == account.unexpected == account.reshaped == account.inert == []


def test_model_is_preferred_and_a_key_chooses_otherwise(source, target, tmp_path):
    path = tmp_path / "weights.pth"
    average = {name: tensor + 1 for name, tensor in source.state_dict().items()}
    torch.save({"model_ema": average, "model": source.state_dict()}, path)
    load_weights(target, path)
    assert same(target, source.state_dict())
    load_weights(target, path, key="model_ema")
    assert same(target, average)


def test_a_key_that_is_not_there_is_named_with_those_that_are(source, target, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"network": source.state_dict(), "epoch": 3}, path)
    with pytest.raises(UserError, match=r"holds: network, epoch\. `mambacl convert .* --key NAME` takes") as caught:
        load_weights(target, path)
    typed = shlex.split(re.search(r"`mambacl (.*)`", str(caught.value))[1].replace("NAME", "network"))
    assert main([str(tmp_path / "out.safetensors") if word == "OUT.safetensors" else word for word in typed]) == 0
    load_weights(target, tmp_path / "out.safetensors")
    assert same(target, source.state_dict())
    with pytest.raises(UserError, match="no weights under 'model_ema'"):
        load_weights(target, path, key="model_ema")
    load_weights(target, path, key="network")
    assert same(target, source.state_dict())


def test_safetensors_and_create_model_with_a_path(source, tiny_model, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(source.state_dict(), path)
    config = source.config
    options = {name: getattr(config, name) for name in ("img_size", "patch_size", "embed_dim", "depth", "use_aux_loss")}
    mamba = dataclasses.asdict(config.mamba)
    for given in (path, str(path)):
        model = create_model("defocus_mamba", num_classes=3, pretrained=given, mamba=mamba, **options)
        assert same(model, source.state_dict())


def test_safetensors_of_a_distributed_model_lose_their_prefix(source, target, tmp_path):
    save_file(prefixed(source.state_dict()), tmp_path / "w.safetensors")
    account = load_weights(target, tmp_path / "w.safetensors")
    assert same(target, source.state_dict()) and account.missing == account.unexpected == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_cast_to_the_models(dtype, source, target, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({name: tensor.to(dtype) for name, tensor in source.state_dict().items()}, path)
    load_weights(target, path)
    assert all(parameter.dtype == torch.float32 for parameter in target.parameters())
    assert same(target, {name: tensor.to(dtype).float() for name, tensor in source.state_dict().items()})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).T,
        torch.arange(12.0)[5:9],
        torch.arange(24.0).view(2, 3, 4)[:, 1],
        torch.tensor(7),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.ones(1).expand(4),
    ],
    ids=["transposed", "offset", "slice", "scalar", "empty", "bool", "expanded"],
)
def test_stored_tensors_are_read_as_pytorch_would(tensor, tmp_path):
    torch.save({"model": {"w": tensor, "again": tensor}}, tmp_path / "w.pth")
    tensors, inert = read_weights(tmp_path / "w.pth")
    assert inert == [] and tensors.keys() == {"w", "again"}
    assert tensors["w"].dtype == tensor.dtype and torch.equal(tensors["w"], tensor)


# The account


def test_a_head_with_another_number_of_classes_is_left_out_and_named(source, tiny_model, tmp_path):
    torch.save({"model": source.state_dict()}, tmp_path / "w.pth")
    model = tiny_model(num_classes=7)
    before = model.head.weight.detach().clone()
    account = load_weights(model, tmp_path / "w.pth")
    assert account.missing == account.unexpected == ["head.weight", "head.bias"]
    assert torch.equal(model.head.weight, before)
    assert "2 missing (head.weight, head.bias)" in str(account) and "tensors loaded from w.pth" in str(account)


def test_a_model_without_head_leaves_the_files_heads_over(tiny_model, tmp_path):
    source = tiny_model(num_classes=3, use_aux_loss=True)
    torch.save({"model": source.state_dict()}, tmp_path / "w.pth")
    account = load_weights(tiny_model(), tmp_path / "w.pth")
    assert account.missing == []
    assert sorted(account.unexpected) == ["head.bias", "head.weight", "head2.bias", "head2.weight"]


def test_layouts_that_differ_by_axes_of_one_are_reshaped(source, target, tmp_path):
    state = source.state_dict()
    state["cls_token"] = state["cls_token"].flatten()
    state["blocks.0.mixer.conv1d.weight"] = state["blocks.0.mixer.conv1d.weight"].squeeze(1)
    torch.save({"model": state}, tmp_path / "w.pth")
    account = load_weights(target, tmp_path / "w.pth")
    assert account.reshaped == ["cls_token", "blocks.0.mixer.conv1d.weight"]
    assert same(target, source.state_dict())


def adapting(model, adapt):
    model.adapt_state = adapt
    return model


def test_what_the_model_renames_and_drops_is_counted(source, target, tmp_path):
    state = source.state_dict()
    stored = {f"old.{name}": tensor for name, tensor in state.items()} | {"ema": torch.ones(2), "kept": torch.ones(3)}
    stored["old.cls_token"] = stored["old.cls_token"].flatten()
    torch.save(stored, tmp_path / "w.pth")

    def adapt(tensors):
        return {name.removeprefix("old."): tensor for name, tensor in tensors.items() if name != "ema"}

    account = load_weights(adapting(target, adapt), tmp_path / "w.pth")
    assert same(target, state)
    assert sorted(account.renamed) == sorted(state) and account.dropped == ["ema"]
    assert account.reshaped == ["cls_token"] and account.unexpected == ["kept"]
    said = f"{len(state)} renamed; 1 reshaped (cls_token); 1 dropped (ema); 0 missing; 1 unexpected (kept)."
    assert str(account).endswith(said)


def test_a_name_that_another_tensor_takes_over_is_dropped(source, target, tmp_path):
    state = source.state_dict()
    torch.save({**state, "better": state["norm.weight"] + 1}, tmp_path / "w.pth")

    def adapt(tensors):
        return {**without(tensors, "better"), "norm.weight": tensors["better"]}

    account = load_weights(adapting(target, adapt), tmp_path / "w.pth")
    assert account.renamed == account.dropped == ["norm.weight"] and account.reshaped == []
    assert torch.equal(target.norm.weight, state["norm.weight"] + 1)


def test_of_what_is_computed_anew_no_source_is_claimed(source, target, tmp_path):
    state = source.state_dict()
    torch.save({**without(state, "norm.weight"), "half": state["norm.weight"] / 2}, tmp_path / "w.pth")

    def adapt(tensors):
        return {**without(tensors, "half"), "norm.weight": 2 * tensors["half"]}

    account = load_weights(adapting(target, adapt), tmp_path / "w.pth")
    assert account.renamed == ["norm.weight"] and account.dropped == [] and same(target, state)


def without(state, name):
    return {key: tensor for key, tensor in state.items() if key != name}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda state: without(state, "blocks.1.mixer.A_log"), id="missing"),
        pytest.param(lambda state: {**state, "blocks.1.mixer.A_log": torch.zeros(64, 4)}, id="smaller"),
        pytest.param(lambda state: {**state, "blocks.1.mixer.A_log": torch.zeros(8, 64)}, id="transposed"),
    ],
)
def test_a_backbone_tensor_that_does_not_fit_is_an_error_and_changes_nothing(change, source, target, tmp_path):
    torch.save({"model": change(source.state_dict())}, tmp_path / "w.pth")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(UserError, match=r"lacks blocks\.1\.mixer\.A_log, or has them in another shape\. Check the"):
        load_weights(target, tmp_path / "w.pth")
    assert same(target, before)


def test_a_long_list_of_missing_tensors_is_cut(tiny_model, source, tmp_path):
    torch.save({"model": source.state_dict()}, tmp_path / "w.pth")
    with pytest.raises(UserError, match="and 6 more"):
        load_weights(tiny_model(depth=3), tmp_path / "w.pth")


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
    with pytest.raises(UserError, match="no weights file"):
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
    with pytest.raises(UserError, match=r"holds no data\.pkl"):
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


# convert


def test_convert_keeps_every_tensor(source, target, tmp_path):
    torch.save({"model": prefixed(source.state_dict()), "args": argparse.Namespace(a=1)}, tmp_path / "w.pth")
    destination = tmp_path / "new" / "folder" / "w.safetensors"
    account = convert(tmp_path / "w.pth", destination)
    assert sorted(account.loaded) == sorted(source.state_dict()) and account.inert == ["argparse.Namespace"]
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in load_file(destination).items())
    assert os.listdir(destination.parent) == ["w.safetensors"]
    load_weights(target, destination)
    assert same(target, source.state_dict())


def test_convert_takes_the_entry_that_the_key_names(source, tmp_path):
    torch.save({"model": {"w": torch.zeros(2)}, "model_ema": {"w": torch.ones(2)}}, tmp_path / "w.pth")
    convert(tmp_path / "w.pth", tmp_path / "w.safetensors", key="model_ema")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], torch.ones(2))


def test_convert_writes_safetensors_only(tmp_path):
    with pytest.raises(UserError, match=r"must end in \.safetensors"):
        convert(tmp_path / "w.pth", tmp_path / "w.pt")


def test_a_failed_convert_leaves_no_file(tmp_path):
    (tmp_path / "w.pth").write_bytes(b"junk")
    with pytest.raises(UserError):
        convert(tmp_path / "w.pth", tmp_path / "w.safetensors")
    assert os.listdir(tmp_path) == ["w.pth"]
