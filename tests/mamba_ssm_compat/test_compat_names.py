"""mambacl under mamba-ssm's import names: found by every way that libraries look for it, and gone again; its docs."""

import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from mambacl import mamba_ssm_compat as compat
from mambacl.errors import UserError
from mambacl.mamba_ssm_compat.names import MODULES, VERSIONS

ROOTS = ["mamba_ssm", "causal_conv1d", "selective_scan_cuda", "selective_scan_cuda_core", "selective_scan_cuda_oflex"]
PAGE = Path(__file__).parents[2] / "docs" / "compat.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


@pytest.fixture
def installed():
    with compat.installed():
        yield


def present() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in ROOTS]


def test_importing_changes_nothing():
    code = (
        "import sys, importlib.util, mambacl.mamba_ssm_compat\n"
        f"assert not [name for name in sys.modules if name.partition('.')[0] in {ROOTS}]\n"
        "assert not [finder for finder in sys.meta_path if 'compat' in type(finder).__module__]\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_public_ways_to_import(installed):
    from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
    from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn as again
    from mamba_ssm import Mamba, mamba_inner_fn, selective_scan_fn
    from mamba_ssm.modules.mamba_simple import Mamba as simple
    from mamba_ssm.ops.selective_scan_interface import bimamba_inner_fn, mamba_inner_fn_no_out_proj, selective_scan_ref
    from mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_fn, rms_norm_fn
    from mamba_ssm.ops.triton.layernorm import RMSNorm as older
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    from mamba_ssm.utils.generation import GenerationMixin, InferenceParams
    from mamba_ssm.utils.hf import load_config_hf, load_state_dict_hf

    assert simple is Mamba is compat.Mamba and older is RMSNorm is compat.RMSNorm and again is causal_conv1d_fn
    assert selective_scan_fn is compat.selective_scan_fn and mamba_inner_fn is compat.mamba_inner_fn
    assert callable(selective_scan_ref) and bimamba_inner_fn is compat.bimamba_inner_fn
    assert mamba_inner_fn_no_out_proj is compat.mamba_inner_fn_no_out_proj
    assert (layer_norm_fn, rms_norm_fn) == (compat.layer_norm_fn, compat.rms_norm_fn)
    assert selective_state_update is compat.selective_state_update
    assert causal_conv1d_update is compat.causal_conv1d_update
    assert (
        InferenceParams(4, 2).key_value_memory_dict == {} and callable(load_state_dict_hf) and callable(load_config_hf)
    )
    with pytest.raises(UserError, match="transformers"):
        GenerationMixin().generate()


def test_submodules_are_attributes(installed):
    import mamba_ssm

    assert mamba_ssm.ops.triton.selective_state_update.selective_state_update is compat.selective_state_update
    assert mamba_ssm.modules.mamba_simple.Mamba(8)(torch.zeros(1, 3, 8)).shape == (1, 3, 8)


@pytest.mark.parametrize("name", MODULES)
def test_a_spec_is_found(name, installed):
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.name == name and "mambacl" in spec.origin
    assert importlib.reload(sys.modules[name]).__spec__.loader is not None


def test_versions_are_found(installed):
    for name, version in VERSIONS.items():
        assert importlib.metadata.version(name) == version
        assert importlib.metadata.version(name.replace("_", "-")) == version
        assert importlib.import_module(name).__version__ == version
        assert importlib.metadata.packages_distributions()[name] == [name]
    assert importlib.metadata.version("torch")  # others are found as before
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("mamba_ssm_of_another_kind")


def test_what_is_not_provided_is_absent(installed):
    import mamba_ssm

    assert not hasattr(mamba_ssm, "Mamba2") and importlib.util.find_spec("mamba_ssm.modules.mamba2") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mamba_ssm.ops.triton.ssd_combined")


def test_twice_is_once_and_nothing_stays():
    before, hooks = set(sys.modules), list(sys.meta_path)
    compat.install()
    module = sys.modules["mamba_ssm"]
    compat.install()
    assert sys.modules["mamba_ssm"] is module and len(sys.meta_path) == len(hooks) + 1
    compat.uninstall()
    compat.uninstall()
    assert not present() and sys.meta_path == hooks and not set(ROOTS) & set(sys.modules) - before
    assert importlib.util.find_spec("mamba_ssm") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("causal-conv1d")


def test_blocks_within_one_another():
    with compat.installed():
        with compat.installed():
            pass
        assert "mamba_ssm" in sys.modules
    assert not present()


def test_another_mamba_ssm_is_left_in_place(monkeypatch):
    other, below = types.ModuleType("mamba_ssm"), types.ModuleType("mamba_ssm.modules.mamba2")
    monkeypatch.setitem(sys.modules, "mamba_ssm", other)
    monkeypatch.setitem(sys.modules, "mamba_ssm.modules.mamba2", below)
    with pytest.raises(UserError, match=r"mamba_ssm is already imported.*force=True"):
        compat.install()
    assert sys.modules["mamba_ssm"] is other and "causal_conv1d" not in sys.modules
    with compat.installed(force=True):
        assert sys.modules["mamba_ssm"].Mamba is compat.Mamba and "mamba_ssm.modules.mamba2" not in sys.modules
    assert sys.modules["mamba_ssm"] is other and sys.modules["mamba_ssm.modules.mamba2"] is below


def test_transformers_answers_that_it_is_there():
    utils = pytest.importorskip("transformers.utils.import_utils")
    before = utils.is_mamba_ssm_available
    with compat.installed():
        assert utils.is_mamba_ssm_available() and utils.is_causal_conv1d_available()
    assert utils.is_mamba_ssm_available is before


def test_a_model_of_the_hub_in_a_folder(tmp_path):
    from mambacl.mamba_ssm_compat.hub import load_config_hf, load_state_dict_hf

    (tmp_path / "config.json").write_text('{"d_model": 8}')
    torch.save({"a": torch.arange(3.0)}, tmp_path / "pytorch_model.bin")
    assert load_config_hf(str(tmp_path)) == {"d_model": 8}
    state = load_state_dict_hf(str(tmp_path), device="cpu", dtype=torch.float64)
    assert torch.equal(state["a"], torch.arange(3.0).double())


@pytest.mark.parametrize("block", BLOCKS, ids=[str(i) for i in range(len(BLOCKS))])
@pytest.mark.slow
def test_a_block_runs(block):
    if "transformers import" in block:
        pytest.importorskip("transformers")
    subprocess.run([sys.executable, "-c", block], check=True)


def test_every_name_in_the_table_is_there():
    rows = re.findall(r"^\| (`(?:mamba_ssm|causal_conv1d|selective_scan_cuda).*?) \| (.*?) \|$", PAGE.read_text(), re.M)
    assert len(rows) == 8
    for names, contents in rows:
        first, *others = re.findall(r"`(.*?)`", names)
        modules = [first] + [
            first + name if name.startswith("_") else f"{first.rpartition('.')[0]}.{name}" for name in others
        ]
        there = {name for module in modules for name in MODULES[module]}
        functions = set(re.findall(r"`(\w+)`", contents)) - {"step", "allocate_inference_cache", "bimamba_type"}
        assert functions <= there, functions - there
