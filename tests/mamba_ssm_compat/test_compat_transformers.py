"""transformers' own Mamba, FalconMamba and Jamba on mambacl's functions: the same numbers as on their slow path."""

import functools
import subprocess
import sys
from collections import Counter
from importlib import import_module

import pytest
import torch
from compat_help import DEVICES
from torch import nn

from mambacl import mamba_ssm_compat as compat
from mambacl.errors import UserError
from mambacl.mamba_ssm_compat import hugging_face

transformers = pytest.importorskip("transformers")

WIDTH, STATES, TOKENS, VOCABULARY, LAYERS = 16, 4, 9, 23, 2
COMMON = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "pad_token_id": 0}
MAMBA = {**COMMON, "state_size": STATES, "time_step_rank": 3, "use_bias": True, "initializer_range": 0.4}
JAMBA = {
    **COMMON,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 2,
    "mamba_d_state": STATES,
    "mamba_dt_rank": 3,
    "initializer_range": 0.4,
}
FAMILIES = {
    "mamba": ("Mamba", MAMBA, LAYERS),  # class, configuration, blocks that scan
    "falcon_mamba": ("FalconMamba", MAMBA, LAYERS),
    "jamba": ("Jamba", JAMBA, LAYERS // 2),
}
# Roundings in a row, in the worst case: each layer's sums over its inner width (twice), over states, taps and tokens.
TERMS = 8 * LAYERS * (4 * WIDTH + STATES + 4 * TOKENS + VOCABULARY)


@pytest.fixture(autouse=True)
def restored():
    yield
    compat.restore_transformers()


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def model(family, device):
    name, options, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in made.parameters():  # no bias and no D that a wrong path could leave out unseen
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.to(device).eval()


@pytest.fixture
def calls(monkeypatch):
    """How often each of mambacl's functions was called; they run as ever."""
    counted = Counter()
    for name, (function, parameters) in hugging_face._REPLACEMENTS.items():

        @functools.wraps(function)
        def through(function=function, **kwargs):
            counted[function.__name__] += 1
            return function(**kwargs)

        monkeypatch.setitem(hugging_face._REPLACEMENTS, name, (through, parameters))
    return counted


def tokens(device, padded):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (2, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :3], mask[0, :3] = 0, 0  # on the left, as for generation
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def run(model, inputs):
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    shown = logits * inputs["attention_mask"][..., None]
    (shown.square().sum() / 100).backward()
    found = {"logits": shown.detach()}
    found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


def assert_agree(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        allowed = TERMS * torch.finfo(torch.float32).eps * max(value.abs().max().item(), 1e-3)
        error = (found[name] - value).abs().max().item()
        assert error <= allowed, f"{name}: off by {error:.3g} of {allowed:.3g}"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_logits_and_gradients_are_those_of_the_slow_path(family, device, model, calls, training, padded):
    model.train(training)
    inputs = tokens(device, padded)
    wanted = run(model, inputs)
    assert not calls
    changed = compat.accelerate_transformers(model)
    assert changed == [f"transformers.models.{family}.modeling_{family}"]
    found = run(model, inputs)
    blocks = FAMILIES[family][2]
    assert calls == {"selective_scan_fn": blocks, "causal_conv1d_fn": blocks}
    assert_agree(found, wanted)


@pytest.mark.parametrize("padded", [False, True])
def test_generation_is_that_of_the_slow_path(family, device, model, calls, padded):
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    wanted = model.generate(**tokens(device, padded), **options)
    assert not calls
    compat.accelerate_transformers()
    found = model.generate(**tokens(device, padded), **options)
    blocks = FAMILIES[family][2]
    assert calls["selective_scan_fn"] == calls["causal_conv1d_fn"] == blocks
    assert (
        calls["selective_state_update"] == calls["causal_conv1d_update"] == 5 * blocks
    )  # the first token is the scan's
    assert torch.equal(found.sequences, wanted.sequences)
    assert_agree(dict(enumerate(found.logits)), dict(enumerate(wanted.logits)))


def test_another_activation_keeps_its_own_convolution(calls):
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**MAMBA, hidden_act="gelu")).eval()
    wanted = run(model, tokens("cpu", True))
    compat.accelerate_transformers(model)
    assert_agree(run(model, tokens("cpu", True)), wanted)
    assert calls == {"selective_scan_fn": LAYERS}


def test_it_is_done_once_and_undone():
    modules = [import_module(f"transformers.models.{name}.modeling_{name}") for name in FAMILIES]
    before = [vars(module).copy() for module in modules]
    assert compat.accelerate_transformers() == compat.accelerate_transformers() == [m.__name__ for m in modules]
    for module, had in zip(modules, before, strict=True):
        assert module.mamba_selective_scan is not had["mamba_selective_scan"]
    compat.restore_transformers()
    compat.restore_transformers()
    assert [vars(module) for module in modules] == before


@pytest.mark.slow
def test_names_installed_first_are_taken_without_more():
    code = (
        "from mambacl import mamba_ssm_compat\n"
        "mamba_ssm_compat.install()\n"
        "import torch, mambacl.mamba_ssm_compat.scan as scan\n"
        "real, calls = scan.selective_scan, []\n"
        "scan.selective_scan = lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1]\n"
        "from transformers import MambaConfig, MambaModel\n"
        f"model = MambaModel(MambaConfig(**{MAMBA}))\n"
        "for training in (False, True):\n"
        "    model.train(training)(torch.ones(1, 5, dtype=torch.long)).last_hidden_state.sum().backward()\n"
        f"assert len(calls) == 2 * {LAYERS}, calls"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_models_and_other_versions_are_refused(monkeypatch):
    with pytest.raises(UserError, match="no block of transformers' Mamba"):
        compat.accelerate_transformers(nn.Linear(2, 2))
    falcon = import_module("transformers.models.falcon_mamba.modeling_falcon_mamba")
    original = falcon.mamba_selective_scan
    with monkeypatch.context() as context:
        context.delattr(falcon, "mamba_selective_scan")
        with pytest.raises(UserError, match=rf"transformers {transformers.__version__} has no mamba_selective_scan"):
            compat.accelerate_transformers()
    with monkeypatch.context() as context:
        context.setattr(falcon, "mamba_selective_scan", lambda tokens, steps: None)
        with pytest.raises(UserError, match=r"works with transformers 5\.15 to 5\.22"):
            compat.accelerate_transformers()
    assert falcon.mamba_selective_scan is original
    assert not hugging_face._originals  # Mamba's own, which was looked at first, is as it was
