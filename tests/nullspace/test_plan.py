"""The plan: the paper's figures, and what is predicted against what is held."""

import itertools

import pytest
import torch
from block_models import build
from nullspace_help import images

from mambacl.backbones import create_model
from mambacl.cli import main
from mambacl.errors import UserError
from mambacl.nullspace import NullSpace
from mambacl.nullspace.plan import decomposition_seconds, make_plan, paper_projector_bytes, paper_values


def on_meta(name, **options):
    with torch.device("meta"):
        return create_model(name, num_classes=0, **options)


def test_the_papers_figures():
    assert round(paper_values(48, 2048, 145) / 1e6, 2) == 807.32
    sizes = [(48, 2048, 145), (64, 3072, 145), (80, 4096, 145)]
    assert [round(paper_projector_bytes(*size) / 1e9, 2) for size in sizes] == [0.81, 2.42, 5.37]


def test_defocus_large_takes_a_tenth_of_dense_projectors():
    plan = make_plan(NullSpace(on_meta("defocus_mamba_large_22k")), torch.empty(1, 3, 192, 192, device="meta"))
    assert (plan.blocks, plan.widths, plan.tokens) == (48, (2048,), (145,))
    assert plan.matrices == {2048: 192}  # W_delta and W_C share X
    assert plan.projector_bytes <= 0.25 * plan.dense_bytes
    assert plan.covariance_bytes == 192 * 2048**2 * 8
    assert plan.projection_flops < plan.dense_flops / 4


@pytest.mark.parametrize("name", ["defocus", "vim", "vmamba", "mambavision"])
@pytest.mark.parametrize("setting", ["paper", "exact"])
@pytest.mark.parametrize("layers", ["ssm", "all"])
def test_bytes_are_those_held(name, setting, layers):
    model, inputs, _ = build(name)
    space = NullSpace(model, setting, layers=layers, rank="fraction:0.75", covariances="cpu")
    plan = make_plan(space, inputs(0), protected=0.25)
    space.consolidate([inputs(0, 2)])
    assert plan.projector_bytes == pytest.approx(space.projected_step.nbytes(), rel=0.1)
    kept = {id(c): c.nbytes for one in space.memory.statistics for c in one.covariances.values()}
    assert plan.covariance_bytes == sum(kept.values()) and plan.by_place()["cpu"] == plan.covariance_bytes
    assert plan.by_place() == {"device": plan.projector_bytes, "cpu": plan.covariance_bytes, "disk": 0}


def test_a_file_is_as_large_as_planned(tiny_model, tmp_path):
    space = NullSpace(tiny_model(mamba={"intermediate_size": 256}), rank="fraction:0.75", keep_tasks=True)
    plan = make_plan(space, images(1), protected=0.25, tasks=3)
    for seed in range(3):
        space.consolidate([images(seed=seed)])
    space.save(tmp_path / "space.safetensors")
    assert plan.file_bytes == pytest.approx((tmp_path / "space.safetensors").stat().st_size, rel=0.1)


def test_half_precision_halves_the_projectors_only(tiny_model):
    plans = [make_plan(NullSpace(tiny_model(), storage=s), images(1)) for s in ("float32", "bfloat16")]
    assert plans[0].projector_bytes == 2 * plans[1].projector_bytes
    assert plans[0].covariance_bytes == plans[1].covariance_bytes


def test_kernels_need_less_memory_in_a_step(tiny_model):
    """The parameters as they were, and what the basis holds of the largest stack's changes."""
    space = NullSpace(tiny_model(), rank="fraction:0.75")
    plain, fast = (make_plan(space, images(1), protected=0.25, kernels=kernels) for kernels in (False, True))
    named = dict(space.model.named_parameters())
    parts = {p.name: p.part.matrix(named[p.part.parameter]).shape for p in space.selection.projected()}
    held = 4 * sum(shape.numel() for shape in parts.values())
    out = [shape for name, shape in parts.items() if "out_proj" in name]
    assert fast.step_bytes == held + 4 * len(out) * out[0][1] * round(0.25 * out[0][2])
    assert plain.step_bytes > fast.step_bytes + 4 * sum(shape.numel() for shape in out)


def test_time_grows_with_the_number_of_matrices(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr("mambacl.nullspace.plan.time.perf_counter", lambda: float(next(ticks)))  # each takes a second
    assert decomposition_seconds({64: 1}, torch.device("cpu")) == 1.0
    assert decomposition_seconds({64: 50, 96: 2, 16: 600}, torch.device("cpu")) == 50 + 2 + 600 / 256


def test_a_share_outside_its_range_is_refused(tiny_model):
    with pytest.raises(UserError, match="between 0 and 1"):
        make_plan(NullSpace(tiny_model()), images(1), protected=1.5)


def test_the_command(capsys):
    assert main(["plan", "defocus_mamba_large_22k", "--image-size", "192", "--no-calibration"]) == 0
    text = capsys.readouterr().out
    assert "807.32 M values; 0.81 GB of projectors in half precision" in text
    assert "0.10 of dense matrices" in text and "192 of 2048 x 2048" in text
    assert main(["plan", "vim_nano", "--setting", "exact", "--covariances", "disk"]) == 0
    text = capsys.readouterr().out
    assert "s per task on cpu" in text and "on disk, float64" in text


def test_a_preset_is_planned_as_it_is(capsys, caplog):
    caplog.set_level("INFO", logger="mambacl")
    assert main(["plan", "demo", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "defocus_mamba_nano at 24 px: 12 selective SSMs, D 384, L 37" in text and "s for 5" in text
    assert main(["plan", "cifar100-10-scratch", "--setting", "public-code", "--no-calibration"]) == 0
    assert "defocus_mamba_tiny at 192 px" in capsys.readouterr().out
    assert "25 parts" in caplog.text and "smoothed-corner" in caplog.text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["plan", "vim_tny"], "Did you mean 'vim_tiny'?"),
        (["plan", "vim_tiny", "--image-size", "100"], "do not divide into patches"),
        (["plan", "vim_tiny", "--setting", "papre"], "Did you mean 'paper'?"),
        (["plan", "vim_tiny", "--storage", "float8"], "storage takes one of"),
        (["plan", "vim_tiny", "--protected", "2"], "between 0 and 1"),
        (["plan", "vim_tiny", "--tasks", "0"], "--tasks must be at least 1"),
    ],
)
def test_mistakes_get_one_sentence(capsys, arguments, message):
    assert main([*arguments, "--no-calibration"]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mambacl:")]
    assert len(error) == 1 and message in error[0]
