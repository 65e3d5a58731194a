"""Plans for several GPUs: sizes against counts, what is switched on, and the command."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from backbones_help import on_meta
from test_costs import LOAD, MACHINE, SIZES
from torch import nn

from mambacl.backbones.flops import SCAN_BACKWARD_OPERATIONS, SCAN_OPERATIONS, count_flops, count_step_flops
from mambacl.cli import main
from mambacl.config import resolve
from mambacl.errors import UserError
from mambacl.nullspace import NullSpace
from mambacl.nullspace.offload import STACK_BYTES
from mambacl.nullspace.plan import make_plan
from mambacl.quantities import quantity, written
from mambacl.reports import gpu_plans
from mambacl.training.activations import planned
from mambacl.training.costs import Machine, Sizes, Switches, peak
from mambacl.training.planning import Job, count_sizes, default_speed, gram_operations, plan_for, record_of, switched

JOB = Job(batch=32, tasks=5, classes=20, images=1000, passes=3)
NANO = {"num_classes": 0, "depth": 3}


def nano_sizes(method: str = "mamba-cl", **overrides: object) -> tuple[nn.Module, NullSpace, object]:
    model = on_meta("defocus_mamba_nano", **NANO).eval()
    space = NullSpace(model, "paper", **overrides)
    plan = make_plan(space, torch.empty(1, 3, 32, 32, device="meta"))
    return model, space, count_sizes(model, space, plan if method == "mamba-cl" else None, 32, True, JOB)


def test_sizes_are_those_of_the_model() -> None:
    model, space, sizes = nano_sizes(keep_tasks=True)
    named = dict(model.named_parameters())
    assert sizes.parameters == sum(p.numel() for p in named.values())
    assert sizes.trained == sum(named[name].numel() for name in space.trained_names())
    assert sizes.blocks == 3 and sizes.block == sum(p.numel() for p in model.blocks[0].parameters())
    assert sizes.head == 193 * 20 and sizes.head_trained == 193 * 4
    assert sizes.matrices == {384: 12} and sizes.covariances == 8 * 12 * 384**2 and sizes.held == 5
    assert sizes.basis_values == 12 * 384 * 38 and sizes.projected == 3 * (
        12 * 384 + 2 * 16 * 384 + 16 * 384 + 192 * 384
    )
    for images in (2, 7):
        found = planned(model, images, 32)
        assert sizes.kept_fixed + images * sizes.kept_image == pytest.approx(found.total, rel=1e-6)
        assert sizes.block_fixed + images * sizes.block_image == pytest.approx(found.block, rel=1e-6)
        again = planned(model, images, 32, again=True).total
        assert sizes.again_fixed + images * sizes.again_image == pytest.approx(again, rel=1e-6)


def test_plain_fine_tuning_has_no_null_space() -> None:
    sizes = nano_sizes("sequential")[2]
    assert sizes.covariances == sizes.basis_values == sizes.projection == sizes.gram == 0 < sizes.trained
    assert not plan_for(2, sizes, Switches(), JOB, Machine())["sent_per_task_end"]


def test_operations_of_covariances(tiny_model: Callable[..., nn.Module]) -> None:
    """17 tokens of 64 values in two blocks: x, delta X, delta and out."""
    space = NullSpace(tiny_model(), "paper")
    assert gram_operations(space, 16) == 2 * 4 * 2 * 17 * 64**2
    assert gram_operations(NullSpace(on_meta("vim_nano", num_classes=0)), 32) > 0


def test_operations_of_a_step() -> None:
    """A linear layer with everything trained: 2 n in the forward pass, the gradients of its input and weight twice
    that; the first layer's input has no gradient."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3 * 4 * 4, 10), nn.Linear(10, 6)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(images.flatten(1)))

    model = Two()
    assert count_step_flops(model, 4) == (2 * (480 + 60), 2 * (480 + 2 * 60))
    model.first.requires_grad_(False)
    assert count_step_flops(model, 4) == (2 * (480 + 60), 2 * 60)


def test_operations_of_convolutions() -> None:
    """8 channels in 4 groups, kernels of 3 x 3, an image of 4 x 4: with one of 8 x 2 x 9 weights per place and sum."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=4))
    first, second = 2 * 16 * 8 * 3, 2 * 16 * 8 * 2 * 9
    assert count_step_flops(model, 4) == (first + second, first + 2 * second)


def test_operations_of_a_scan_in_both_directions() -> None:
    model = on_meta("defocus_mamba_nano", **NANO)
    forward, backward = count_step_flops(model, 32)
    assert forward == count_flops(model, 32)[0] and 1.9 * forward < backward < 2.2 * forward
    scan = count_flops(model, 32)[1]
    assert scan == SCAN_OPERATIONS * 3 * 65 * 384 * 16
    ssm = [p for n, p in model.named_parameters() if "A_log" in n]
    model.requires_grad_(False)
    ssm[-1].requires_grad_()
    own = count_step_flops(model, 32)[1] - 2 * 65 * 384 * 192  # of the last block: its scan, out_proj's input
    assert own == SCAN_BACKWARD_OPERATIONS * 65 * 384 * 16


# What to switch on


LARGE = replace(
    SIZES, parameters=10**9, kept_image=1e9, again_image=1e8, block_image=1e6, matrices={10**4: 2},
    basis_values=3 * STACK_BYTES,
)  # fmt: skip


def test_switches_come_in_the_order_of_their_cost() -> None:
    """The GPU with the most has 8 images, too few to cut."""
    everything = switched(LARGE, Switches(), LOAD, MACHINE, limit=0)
    assert [name for name, _ in everything] == [
        "as given", "training.recompute true", "nullspace.covariances cpu", "nullspace.projectors cpu",
        "nullspace.storage bfloat16", "shard true",
    ]  # fmt: skip
    peaks = [peak(LARGE, one, LOAD, MACHINE) for _, one in everything]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)


def test_nothing_more_is_switched_on_than_needed() -> None:
    large, load = replace(SIZES, kept_image=1e6, again_image=1e5, block_image=1e4), replace(LOAD, batch=512)
    assert switched(large, Switches(), load, MACHINE, limit=float("inf")) == [("as given", Switches())]
    alone = peak(large, Switches(), load, MACHINE)
    found = switched(large, Switches(), load, MACHINE, limit=alone / 3)
    assert [name for name, _ in found] == ["as given", "training.accumulate 4"]
    assert peak(large, found[-1][1], load, MACHINE) <= alone / 3 < peak(large, Switches(2), load, MACHINE)
    # Of four messages, pieces hide fewer.
    wide, slow = replace(large, trained=25_000_000), replace(MACHINE, bandwidth=5e6, copies=1e9)
    limit = peak(wide, Switches(4, recompute=True), load, slow)
    assert peak(wide, Switches(16), load, slow) > limit
    found = switched(wide, Switches(), load, slow, limit)
    assert [name for name, _ in found] == [
        "as given", "training.accumulate 16", "training.recompute true",
        "training.accumulate 4: the fastest that fits",
    ]  # fmt: skip
    found = switched(large, Switches(), load, MACHINE, limit=alone / 100)
    assert [name for name, _ in found][:3] == ["as given", "training.accumulate 16", "training.recompute true"]


def test_what_is_on_already_is_not_named_again() -> None:
    start = Switches(recompute=True, covariances="cpu", projectors="disk", storage="float16", shard=True)
    sizes = replace(LARGE, again_image=1e10)
    assert [name for name, _ in switched(sizes, start, LOAD, MACHINE, limit=0)] == ["as given", "training.accumulate 8"]


# The record, its tables and the command


def record(limit: float | None = None) -> dict:
    return record_of("nano", 32, "bf16", nano_sizes()[2], Switches(), JOB, Machine(), (1, 4), limit)


def test_a_record_adds_up_and_survives_json() -> None:
    made = record()
    assert json.loads(json.dumps(made)) == made
    one, four = made["plans"]
    for plan in (one, four):
        seconds = [value for name, value in plan["step"].items() if name != "total"]
        assert plan["step"]["total"] == pytest.approx(sum(seconds))
        assert plan["images_per_second"] == pytest.approx(32 / plan["step"]["total"])
        needed = max(sum(plan["memory"][when].values()) for when in ("step", "task_end"))
        assert plan["memory"]["peak"] == pytest.approx(needed + plan["memory"]["reserved"])
        assert plan["run"]["steps"] == 5 * 3 * 7  # 200 images in 7 batches
    assert one["sent_per_step"] == 0 < four["sent_per_step"] and four["images_per_gpu"] == 8
    assert one["run"]["seconds"] == pytest.approx(105 * one["step"]["total"] + 5 * one["task_end"]["total"])


def test_tables_of_a_page() -> None:
    made = record(limit=1.2e9)
    assert gpu_plans.markdown(made, None) == gpu_plans.markdown(made, "gpus")
    for name in ("gpus", "memory", "switches", "sizes"):
        lines = gpu_plans.markdown(made, name).splitlines()
        assert len(lines) > 3 and len({line.count("|") for line in lines}) == 1
    assert "Nothing is measured" in gpu_plans.markdown(made, "assumptions")
    with pytest.raises(UserError, match="known: gpus, memory, switches"):
        gpu_plans.markdown(made, "other")


def test_other_precisions_are_slower() -> None:
    assert default_speed("bf16") == 180e12 > default_speed("tf32") > default_speed("float32")


@pytest.mark.parametrize(
    "text, unit, value",
    [("80GB", "B", 80e9), (" 1.5 TB ", "B", 1.5e12), ("50GB/s", "B/s", 50e9), ("20us", "s", 20e-6),
     ("3e2TFLOP/s", "FLOP/s", 3e14), ("7B", "B", 7)],
)  # fmt: skip
def test_quantities(text: str, unit: str, value: float) -> None:
    assert quantity(text, unit) == pytest.approx(value)


@pytest.mark.parametrize("text", ["80", "GB", "-3GB", "0GB", "80GB/s", "80 Gb"])
def test_other_texts_are_no_quantities(text: str) -> None:
    with pytest.raises(UserError, match="such as 80GB"):
        quantity(text, "B")


def test_written_quantities() -> None:
    assert [written(1234.0), written(999.9), written(0.0)] == ["1.23 kB", "1 kB", "0 B"]
    assert [written(2e-5, "s"), written(0.25, "s"), written(4200, "s")] == ["20 us", "250 ms", "4.2 ks"]


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "mine.yaml"
    options = "embed_dim: 96, depth: 2, mamba: {intermediate_size: 192}"
    file.write_text(f"backbone: defocus_mamba_nano\nbackbone_options: {{{options}}}\ntraining: {{batch_size: 64}}\n")
    return str(file)


def test_the_command(mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    words = ["plan", mine, "--no-calibration", "--gpus", "1", "8", "--batch-size", "4096"]
    words += ["--gpu-memory", "1.5GB", "--images", "50000", "--passes", "2", "--classes", "100", "--json", str(file)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "Memory per GPU" in text and "To fit into 1.5 GB" in text and "training.accumulate" in text
    made = json.loads(file.read_text())
    assert made["kind"] == "plan" and [plan["gpus"] for plan in made["plans"]] == [1, 8]
    assert all(plan["fits"] and plan["memory"]["peak"] <= 1.5e9 for plan in made["plans"])
    assert main([*words[:3], "--method", "sequential", "--gpus", "2", "--shard", "--recompute"]) == 0
    assert "recompute, shard" in capsys.readouterr().out


def test_a_file_is_planned_as_it_is(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", mine, "--no-calibration", "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    assert "2 selective SSMs" in text and "mine at 32 px" in text and "a batch of 64 images" in text


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gpu-memory", "80GB"], "add --gpus 8"),
        (["--gpus", "8", "--gpu-memory", "80"], "must be a size such as 80GB"),
        (["--gpus", "8", "--bandwidth", "fast"], "must be a rate such as 50GB/s"),
        (["--gpus", "0"], "at least 1"),
        (["--gpus", "512", "--batch-size", "100"], "too small for 512 GPUs"),
        (["--gpus", "2", "--projectors", "gpu"], "projectors takes one of"),
    ],
)
def test_mistakes_get_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "defocus_mamba_nano", "--no-calibration", *words]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mambacl:")]
    assert len(error) == 1 and message in error[0]


# The recorded plans of docs/scale.md

RECORDS = sorted((Path(__file__).parents[2] / "docs" / "results").glob("plan-*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_recorded_plans_are_what_the_formulas_give(path: Path) -> None:
    record = json.loads(path.read_text())
    sizes = Sizes(**{**record["sizes"], "matrices": {int(size): n for size, n in record["sizes"]["matrices"].items()}})
    gpus = [plan["gpus"] for plan in record["plans"]]
    rest = record["model"], record["pixels"], record["precision"]
    start = Switches(**record["start"])
    made = record_of(*rest, sizes, start, Job(**record["job"]), Machine(**record["machine"]), gpus, record["limit"])
    assert json.loads(json.dumps(made)) == record, "write it again with the command in docs/scale.md"


@pytest.mark.slow
def test_the_recorded_sizes_are_those_of_the_model() -> None:
    """Activations are counted along the path of the installed PyTorch and Triton."""
    found = {path.stem: json.loads(path.read_text()) for path in RECORDS}
    assert len(found) == 3 and found["plan-mamba-3b"]["sizes"]["parameters"] > 2.6e9
    record = found["plan-imagenet-21k"]
    model = on_meta("defocus_mamba_large_22k", num_classes=0).eval()
    space = NullSpace(model, "exact")
    plan = make_plan(space, torch.empty(1, 3, 192, 192, device="meta"), 0.67, kernels=True)
    sizes = count_sizes(model, space, plan, 192, True, Job(**record["job"]))
    for name, value in record["sizes"].items():
        if name != "matrices":
            assert getattr(sizes, name) == pytest.approx(value, rel=0.05), name
    assert record["sizes"]["matrices"] == {str(size): count for size, count in sizes.matrices.items()}


def test_a_block_of_three_billion_parameters_is_that_of_the_language_model() -> None:
    """mamba-2.8b: projections to 2 x 5120 channels and back, a convolution of 4 taps, delta of rank 160, 16 states."""
    config = resolve(Path(__file__).parents[2] / "examples" / "mamba-3b.yaml", {})
    model = on_meta(config.backbone, num_classes=0, **config.backbone_options)
    width, inner, rank, states = 2560, 5120, 160, 16
    own = width * 2 * inner + inner * (4 + 1) + inner * (rank + 2 * states) + rank * inner + inner
    own += inner * states + inner + inner * width + width  # A, D, the way back, the norm
    assert len(model.blocks) == 64
    assert sum(p.numel() for p in model.blocks[0].parameters()) == own + states  # freq of the rotary embedding
