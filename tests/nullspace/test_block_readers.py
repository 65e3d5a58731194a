"""Every block reader: what it finds and sees, and that updates in the exact null space leave old outputs alone."""

import pytest
import torch
from block_models import MODELS, PlainMamba, build, output
from nullspace_help import hooks
from tolerance import rounding
from torch import nn

from mambacl.errors import UserError
from mambacl.nullspace import BLOCK_READERS, PAPER_KINDS, NullSpace
from mambacl.nullspace.block_readers import find_blocks
from mambacl.nullspace.statistics import value, watching


def outputs_of_blocks(model, space, batch):
    """What each protected block gives out."""
    found, handles = {}, []
    for block in space.selection.blocks:
        handles.append(
            block.module.register_forward_hook(lambda _, __, y, name=block.name: found.__setitem__(name, y.detach()))
        )
    with torch.no_grad():
        found["model"] = output(model, batch)
    for handle in handles:
        handle.remove()
    return found


def drift(before, after):
    return max(((after[name] - before[name]).norm() / before[name].norm()).item() for name in before)


def rounding_of(steps):
    """What the rounding of float32 weights at every step does to an output, a sum over some 256 products."""
    return rounding(256 * steps)


def train(model, optimizer, inputs, steps):
    generator = torch.Generator().manual_seed(3)
    wanted = None
    for step in range(steps):
        y = output(model, inputs(1000 + step, 4))
        if wanted is None:
            wanted = torch.randn(y.shape, generator=generator)
        optimizer.zero_grad()
        (y - wanted).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", MODELS)
def test_it_finds_the_blocks_and_their_parts(name):
    model, inputs, count = build(name)
    space = NullSpace(model)
    assert len(space.selection.blocks) == count and all(block.selective for block in space.selection.blocks)
    assert {part.kind for _, part in space.selection.parts()} >= set(PAPER_KINDS)
    named = dict(model.named_parameters())
    for _, part in space.selection.parts():  # every part is a view of its parameter
        assert part.of(named[part.parameter]).data_ptr() >= named[part.parameter].data_ptr()
        matrix = part.matrix(named[part.parameter])
        assert torch.equal(part.restored(matrix, part.of(named[part.parameter]).shape), part.of(named[part.parameter]))
    space.consolidate([inputs(0), inputs(1)])
    assert set(space.projectors()) == {protection.name for protection in space.selection.protections}
    assert hooks(model) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_exact_setting_leaves_old_outputs_alone(name):
    """100 steps on other inputs, in float32; without protection a few are enough to move the outputs."""
    drifts = {}
    for setting, steps in (("exact", 100), ("free", 10)):
        model, inputs, _ = build(name)
        space = NullSpace(model, "exact", eta=1.0)
        if setting == "free":
            space = NullSpace(model, space.setting.without_projection())
        old = inputs(0)
        space.consolidate([old])
        before = outputs_of_blocks(model, space, old)
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        train(model, space.wrap(torch.optim.Adam(space.parameters(), lr=1e-3)), inputs, steps)
        drifts[setting] = drift(before, outputs_of_blocks(model, space, old))
        if setting == "exact":
            moved = {n for n, p in model.named_parameters() if (p - start[n]).norm() > 1e-3 * start[n].norm()}
            assert len(moved) >= 2, "nothing was learned, so nothing is shown"
    assert drifts["exact"] < rounding_of(100) < 1e-3 < drifts["free"]


@pytest.mark.parametrize("name", MODELS)
def test_both_maps_of_delta_may_train_and_nothing_moves(name):
    model, inputs, _ = build(name)
    space = NullSpace(model, "exact", W_dt={"trains": True})
    old = inputs(0)
    space.consolidate([old])
    before = outputs_of_blocks(model, space, old)
    train(model, space.wrap(torch.optim.Adam(space.parameters(), lr=1e-3)), inputs, steps=20)
    assert drift(before, outputs_of_blocks(model, space, old)) < rounding_of(20)


@pytest.mark.parametrize("name", MODELS)
def test_with_every_layer_trained_the_whole_model_stays(name):
    model, inputs, _ = build(name)
    space = NullSpace(model, "exact", layers="all")
    kinds = {protection.part.kind for protection in space.selection.protections}
    assert {"linear", "conv", "W_dt"} - kinds <= ({"W_dt"} if name == "Mamba2" else set())
    old = inputs(0)
    space.consolidate([old])
    with torch.no_grad():
        before = output(model, old)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, space.wrap(torch.optim.Adam(space.parameters(), lr=1e-3)), inputs, steps=20)
    with torch.no_grad():
        after, elsewhere = output(model, old), output(model, inputs(5))
    assert ((after - before).norm() / before.norm()).item() < rounding_of(20)
    assert not torch.equal(elsewhere, before)
    others = set(start) - {part.parameter for _, part in space.selection.parts()}
    assert others and all(torch.equal(model.get_parameter(n), start[n]) for n in others)  # fixed after the first task


def test_features_are_those_of_the_scan(golden_model):
    """x, delta, B and C of Vim's two directions and of VMamba's four, as recorded from the public code."""
    for family, calls in (("vim_tiny_like", 2), ("vmamba_s2_like", 4), ("mambavision_T_like", 1)):
        model, tensors, _ = golden_model(family)
        block, seen = find_blocks(model)[0], {}
        show = lambda _, features, seen=seen: seen.update({k: value(features, k) for k in features})  # noqa: E731
        with watching([block], show), torch.no_grad():
            model(tensors["input"])
        if family == "vmamba_s2_like":
            for k in range(calls):
                width = seen["x"].shape[-1]
                recorded = tensors["scan_f32/0/delta"][:, k * width : (k + 1) * width].mT
                torch.testing.assert_close(seen[f"scan{k}"][1], recorded, rtol=2e-4, atol=2e-5)
            continue
        for call, suffix in enumerate(("", "_b")[:calls]):
            for ours, theirs in {"x": "u", "delta": "delta", "B": "B", "C": "C"}.items():
                recorded = tensors[f"scan_f32/{call}/{theirs}"]
                recorded = (recorded.squeeze(1) if recorded.dim() == 4 else recorded).mT
                torch.testing.assert_close(seen[ours + suffix], recorded, rtol=2e-4, atol=2e-5)


def test_vmambas_directions_share_one_covariance_of_x():
    space = NullSpace(build("vmamba")[0], "exact")
    features = {p.label for p in space.selection.protections if p.part.kind in ("W_delta", "W_B", "W_C")}
    assert features == {"x"}
    assert len({p.label for p in space.selection.protections if p.part.kind == "A"}) == 4  # but each its own delta


def test_vims_directions_have_their_own():
    space = NullSpace(build("vim")[0])
    features = {p.label for p in space.selection.protections}
    assert {"x", "x(x_b)", "delta-x", "delta-x(x_b, delta_b)", "delta", "delta(delta_b)", "out"} == features


def test_a_fused_path_that_hides_the_features_is_refused():
    model, inputs, _ = build("mamba_ssm")
    space = NullSpace(model)
    model[2].fused = True
    with pytest.raises(UserError, match=r"^2 ran, but its feature .* was not recorded: a fused kernel bypasses"):
        space.consolidate([inputs(0)])
    assert space.tasks == 0 and hooks(model) == 0


def test_rows_of_mamba2s_gate_and_input_stay():
    model, inputs, _ = build("Mamba2")
    space = NullSpace(model)
    start = model.backbone.layers[0].mixer.in_proj.weight.detach().clone()
    train(model, space.wrap(torch.optim.Adam(space.parameters(), lr=1e-2)), inputs, steps=2)
    same = (model.backbone.layers[0].mixer.in_proj.weight == start).all(1)
    assert same[:128].all() and not same[128:].any()  # the gate and x (64 each), then B, C and delta


def test_a_block_reader_of_another_package(monkeypatch):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = PlainMamba()

        def forward(self, x):
            return self.inner(x)

    from mambacl.nullspace import Block, Part

    def own(module, name):
        if not isinstance(module, Own):
            return None

        def show(record):
            return [module.inner.out_proj.register_forward_pre_hook(lambda _, args: record({"out": args[0]}))]

        return Block(name, module, (Part("out", f"{name}.inner.out_proj.weight"),), show)

    monkeypatch.setattr(BLOCK_READERS, "_entries", {"own": own})
    space = NullSpace(nn.Sequential(Own()), "exact")
    space.consolidate([torch.randn(1, 8, 16)])
    assert list(space.projectors()) == ["0.inner.out_proj.weight"]


def test_a_package_of_the_old_entry_point_group_is_found(monkeypatch, tmp_path):
    """It knows the registry by its old name, too."""
    (tmp_path / "old_package.py").write_text(
        "from mambacl.nullspace import ADAPTERS\nADAPTERS.add('old', lambda module, name: None)\n"
    )
    installed = tmp_path / "old_package-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: old-package\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[mambacl.adapters]\nold = old_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(BLOCK_READERS, "_entries", dict(BLOCK_READERS._entries))
    monkeypatch.setattr(BLOCK_READERS, "_loaded", False)
    assert {"old", "vim"} <= set(BLOCK_READERS.names())
