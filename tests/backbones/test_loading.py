"""Weights from files: every tensor accounted for."""

import argparse
import dataclasses
import os
import re
import shlex
from collections import OrderedDict

import pytest
import torch
from loading_help import same
from safetensors.torch import load_file, save_file

from mambacl.backbones import convert, create_model, load_weights
from mambacl.backbones.loading import read_weights
from mambacl.cli import main
from mambacl.errors import UserError

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
    with pytest.raises(UserError, match=r"holds: network, epoch\. `mambacl convert .* --key NAME` reads") as caught:
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
