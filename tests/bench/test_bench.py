"""`mambacl bench`: each part at toy sizes. What it measures is right or wrong; how fast, no test can say."""

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from cli_help import fails
from conftest import TINY
from kernels_help import DEVICE, kernels
from small_run import CONFIG

import mambacl.bench.parts
from mambacl.bench import PARTS, SHAPES, measure
from mambacl.bench.memory import SWITCHES
from mambacl.bench.models import without_kernels
from mambacl.bench.result import Result, shown, text
from mambacl.bench.roofline import Ceilings, Work, forward_work, training_work, warps
from mambacl.bench.runs import configuration
from mambacl.bench.scan import _compare, worthwhile
from mambacl.bench.shapes import MAMBA_SSM_MS, Shape, make_problem
from mambacl.bench.sizes import CPU, CPU_QUICK, GPU, GPU_QUICK, Case, Sizes
from mambacl.bench.timing import Clock, Timing, copy_speed
from mambacl.cli import main
from mambacl.ops import available_backends
from mambacl.ops.scan import chosen_backend

CLOCK = Clock(torch.device("cpu"), repeats=3, budget=0.01)
CASE = Case("defocus_mamba", (2,), options={key: value for key, value in TINY.items() if key != "num_classes"})
TOY = Sizes(
    shapes={"toy": Shape(2, 8, 5, 4), "grouped": Shape(1, 8, 7, 1, groups=2)},
    inputs=("float32", "bfloat16"),
    precisions=("float32", "bf16"),
    block=(CASE,),
    step=(CASE,),
    nullspace=(CASE,),
    inference=(Case(CASE.model, (1, 3), options=CASE.options),),
    run={key: value for key, value in CONFIG.items() if key != "name"} | {"training": {"passes": 1, "batch_size": 8}},
    copy_bytes=1 << 16,
    repeats=3,
    budget=0.01,
)
SIGNED = (
    "kept_page_faults",
    "returned_page_faults",
    "per_cent_slower",
    "final_accuracy_per_cent",
    "largest_difference",
)


SLOW = ("scan", "step", "projection", "run")  # kernels in Triton's interpreter, training
MARKS = {"scan": pytest.mark.long}
PART = [pytest.param(p, marks=MARKS.get(p, pytest.mark.slow)) if p in SLOW else p for p in PARTS]


@cache
def result_of(part: str) -> Result:
    with mambacl.bench.parts.quiet():
        return measure(part, CLOCK, TOY, 1e9)


@pytest.mark.parametrize("part", PART)
def test_every_part_finds_finite_positive_figures(part: str) -> None:
    result = result_of(part)
    assert result.rows
    for row in result.rows:
        figures = {name: value for name, value in row.items() if isinstance(value, (int, float))}
        assert figures and all(math.isfinite(value) for value in figures.values())
        assert all(value > 0 for name, value in figures.items() if name not in SIGNED)
    printed = text(result)
    assert result.title in printed and all(note.split()[0] in printed for note in result.notes)


@pytest.mark.long
def test_scan_has_a_row_for_each_shape_type_and_backend() -> None:
    rows = result_of("scan").rows
    backends = {str(row["backend"]) for row in rows}
    assert {"reference", "torch"} <= backends <= set(available_backends())
    assert len(rows) == len(TOY.shapes) * len(TOY.inputs) * len(backends)
    for row in rows:
        for way in ("forward", "backward"):
            assert row[f"{way}_/_floor"] == pytest.approx(row[f"{way}_ms"] / row[f"floor_{way}_ms"])
    for name in TOY.shapes:
        ratios = [row["over_fastest"] for row in rows if row["shape"] == name and row["inputs"] == "float32"]
        assert min(ratios) == 1


def test_the_floor_counts_each_tensor_once() -> None:
    shape, speed = SHAPES["defocus-l"], 4.27e12
    u, delta, A, B, C = Shape(2, 8, 5, 4, groups=2).inputs(torch.device("cpu"), torch.bfloat16)
    read = sum(tensor.nbytes for tensor in (u, delta, A, B, C))
    assert Shape(2, 8, 5, 4, groups=2).floor_bytes(2) == (read + u.nbytes, 2 * read + u.nbytes)
    forward, backward = (1e3 * count / speed for count in shape.floor_bytes(4))
    assert round(forward, 2) == 0.17 and round(backward, 2) == 0.28  # as the recorded figures count it


def test_memory_falls_with_accumulation_and_recomputing() -> None:
    """Two images in pieces of one; what is planned leaves out the classifier's few values."""
    rows = {(row["precision"], row["switched_on"]): row for row in result_of("memory").rows}
    for precision in TOY.precisions:
        kept = [rows[precision, name]["kept_MB"] for name in SWITCHES]
        assert kept[3] < kept[2] < 0.4 * kept[0] and kept[1] < 0.7 * kept[0]
        for name in SWITCHES:
            assert rows[precision, name]["planned_MB"] == pytest.approx(rows[precision, name]["kept_MB"], abs=0.01)


def test_roofline_counts_each_kind_of_work() -> None:
    shape = Shape(2, 3, 5, 4)
    tokens, states = 2 * 3 * 5, 2 * 3 * 5 * 4
    inputs = make_problem(shape, torch.device("cpu"), torch.bfloat16).inputs
    read, y = sum(tensor.nbytes for tensor in inputs.values()), 2 * tokens
    forward, both = forward_work(shape, 2), training_work(shape, 2)
    assert forward.bytes == read + y and both.bytes == forward.bytes + 2 * read + y  # dy read, gradients written
    assert forward.functions == states + 4 * tokens and forward.products == 4 * states + 5 * tokens
    assert both.functions - forward.functions >= states and both.products - forward.products >= 12 * states
    grouped = Shape(2, 4, 5, 1, groups=2)  # without a gate
    inputs = make_problem(grouped, torch.device("cpu")).inputs
    assert forward_work(grouped, 4).bytes == sum(tensor.nbytes for tensor in inputs.values()) + inputs["u"].nbytes
    assert forward_work(grouped, 4).functions == 3 * 40


def test_roofline_takes_what_binds() -> None:
    work = Work(bytes=600, functions=20, products=30)
    assert Ceilings(100, 10, 10, shared=False).seconds(work) == {"bytes": 6, "functions": 2, "products": 3}
    assert Ceilings(100, 10, 10, shared=True).seconds(work) == {"bytes": 6, "arithmetic": 5}
    rows = result_of("roofline").rows
    assert len(rows) == 2 * len(TOY.shapes) * len(TOY.inputs)
    for row in rows:
        assert row["left"] == pytest.approx(row["taken_ms"] / max(row["bytes_ms"], row["arithmetic_ms"]))
        assert row["binds"] == ("bytes" if row["bytes_ms"] > row["arithmetic_ms"] else "arithmetic")


def test_warps_that_a_processor_has_registers_for() -> None:
    assert [warps(registers) for registers in (16, 32, 80, 81, 168, 255)] == [64, 64, 25, 23, 12, 8]


@kernels
def test_ceilings_do_what_they_count() -> None:
    from mambacl.bench.roofline_kernels import exponentiate, multiply_and_add

    x = y = torch.arange(32.0, device=DEVICE) / 32
    for _ in range(2 * 3):
        x, y = x * 0.9 + 0.1, torch.exp2(y * -0.9)
    out = torch.empty(2 * 32, device=DEVICE)
    multiply_and_add[(2,)](out, 0.9, 0.1, 2, UNROLLED=3, BLOCK=32)
    torch.testing.assert_close(out, torch.cat([x, x]), rtol=12 * 2**-24, atol=0)  # two roundings for each of six
    exponentiate[(2,)](out, -0.9, 2, UNROLLED=3, BLOCK=32)
    torch.testing.assert_close(out, torch.cat([y, y]), rtol=6 * 4 * 2**-24, atol=0)


def test_ratios_of_a_block_a_decomposition_and_inference() -> None:
    kernels, plain = result_of("block").rows[:2]
    assert (kernels["with"], plain["with"]) == ("kernels", "plain")
    wanted = plain["forward_and_backward_ms"] / kernels["forward_and_backward_ms"]
    assert kernels["plain_/_kernels"] == pytest.approx(wanted)
    for row in result_of("decomposition").rows:
        assert row["SVD_/_eigh"] == pytest.approx(row["SVD_s"] / row["eigh_s"]) and row["planned_/_held"] == 1
    for row in result_of("inference").rows:
        assert row["ms_per_image"] == pytest.approx(row["call_ms"] / row["batch"])


def test_the_share_of_a_classifier() -> None:
    small, large = result_of("classifier").rows[:2]
    assert (small["state"], large["state"]) == ("100MB", "1GB") and small["units"] < large["units"]
    for row in (small, large):
        wanted = row["ridge_us_per_image"] / row["backbone_us_per_image"]
        assert row["ridge_/_backbone"] == pytest.approx(wanted) and wanted > 0


@pytest.mark.slow
def test_ratios_of_a_step_a_projection_and_a_run() -> None:
    for row in result_of("step").rows:
        assert row["per_cent_slower"] == pytest.approx(100 * (row["projected_ms"] / row["sequential_ms"] - 1))
        assert row["images_per_second"] == pytest.approx(1e3 * row["batch"] / row["projected_ms"])
        assert row["plain_/_sequential"] == pytest.approx(row["plain_ms"] / row["sequential_ms"])
    for row in result_of("projection").rows:
        assert row["dense_loop_/_projection"] == pytest.approx(row["dense_loop_ms"] / row["projection_ms"])
        assert row["largest_difference"] < 1e-5
    [row] = result_of("run").rows
    phases = sum(row[f"{phase}_s"] for phase in ("train", "covariance", "decomposition", "evaluate", "rest"))
    assert phases == pytest.approx(row["seconds"])


def test_both_settings_are_the_real_ones() -> None:
    paper, exact = result_of("decomposition").rows
    blocks = TINY["depth"]
    assert (paper["matrices"], exact["matrices"]) == (4 * blocks, 2 * blocks)  # x, delta x, delta, out; x, out


def test_without_kernels_takes_the_pytorch_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAMBACL_SCAN", raising=False)
    u, A = torch.zeros(1, 1, 1), torch.zeros(1, 1)
    before = chosen_backend(u, A)
    with without_kernels():
        assert chosen_backend(u, A) == "torch"
    assert chosen_backend(u, A) == before


def test_plain_backends_are_not_waited_for_on_a_gpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    long, short = SHAPES["language"], SHAPES["vim-s"]
    assert worthwhile("triton", long, "bfloat16", gpu) and worthwhile("torch", short, "float32", gpu)
    assert not worthwhile("torch", long, "float32", gpu) and not worthwhile("reference", short, "bfloat16", gpu)
    assert worthwhile("torch", long, "bfloat16", cpu)


def test_recorded_figures_are_shown_on_that_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"shape": "defocus-l", "inputs": "float32", "forward_ms": 1.42, "backward_ms": 4.23}
    assert set(MAMBA_SSM_MS) < set(SHAPES)
    gpu = torch.device("cuda")
    for device, name in ((torch.device("cpu"), "NVIDIA H200"), (gpu, "NVIDIA A100")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        _compare(row, device)
        assert len(row) == 4
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    _compare(row, gpu)
    assert row["mamba-ssm_/_ours_forward"] == pytest.approx(2) and row["mamba-ssm_/_ours_backward"] == pytest.approx(2)


def test_a_clock_repeats_slow_calls_less_often() -> None:
    clock = Clock(torch.device("cpu"), repeats=15, budget=1.0)
    assert clock.more(0.001) == 14 and clock.more(0.1) == 9 and clock.more(60) == 2
    calls: list[int] = []
    assert clock.wall(lambda: calls.append(1)) > 0 and len(calls) == 16  # and one to warm up
    assert isinstance(clock.on_device(lambda: None), Timing) and copy_speed(clock, 1 << 12) > 0


def test_calls_that_fill_the_queue_are_queued_fewer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []

    def queued(self: Clock, call: object, calls: int, sleep: float) -> tuple[float, bool]:
        batches.append(calls)
        return 1e-3, calls <= 5

    monkeypatch.setattr(Clock, "synchronize", lambda self: None)
    monkeypatch.setattr(Clock, "_queued", queued)
    timing = Clock(torch.device("cuda"), repeats=4, budget=1.0).on_device(lambda: None)
    assert batches == [20, 10, 5, 5, 5, 5, 5] and timing.queued and timing.seconds == 1e-3


def test_default_sizes_are_consistent() -> None:
    for sizes in (CPU, CPU_QUICK, GPU, GPU_QUICK):
        assert all(SHAPES[name] == shape for name, shape in sizes.shapes.items())
        assert all(case.batches for case in (*sizes.block, *sizes.step, *sizes.inference))
    assert [str(SHAPES[name]) for name in ("vmamba-1", "cpu")] == ["B 64 D 4x192 L 3136 N 1", "B 2 D 768 L 197 N 16"]


def test_the_run_takes_cifar_where_it_is(tmp_path: Path) -> None:
    with_files = configuration(CPU, tmp_path, "cpu", tmp_path / "run")
    assert with_files.name == "cifar100-10-nano" and with_files.stream.root == str(tmp_path)
    assert with_files.stream.train_per_class == CPU.run["stream"]["train_per_class"]
    assert configuration(GPU, None, "cpu", tmp_path / "run").name == "demo"


def test_figures_as_text() -> None:
    assert [shown(value) for value in (True, 12345.6, 0.012345, 7, "x", None)] == [
        "yes", "12346", "0.0123", "7", "x", None,
    ]  # fmt: skip
    result = Result("T", [{"a_b": 1.5, "gone": None, "hidden": 2}], left_out=("hidden",))
    assert "a b" in text(result) and "gone" not in text(result) and "hidden" not in text(result)


def test_the_command_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mambacl.bench.parts, "default_sizes", lambda device, quick: TOY)
    path = tmp_path / "bench.json"
    assert main(["bench", "inference", "--device", "cpu", "--json", str(path), "block"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(path.read_text())
    assert list(found["parts"]) == ["block", "inference"] == found["options"]["parts"]
    assert torch.__version__.startswith(found["versions"]["torch"]) and found["machine"]["device"] == "CPU"
    assert found["copy_bytes_per_second"] > 0 and found["date"].startswith("20")
    for part in found["parts"].values():
        assert part["title"] in printed
        for row in part["rows"]:
            assert all((shown(value) or "") in printed for value in row.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert "This machine has no device 'cuda'" in fails(capsys, "bench", "--device", "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("part", [part for part in PARTS if part != "freed"])  # which is about CPUs
def test_every_part_on_a_gpu(part: str) -> None:
    with mambacl.bench.parts.quiet():
        result = measure(part, Clock(torch.device("cuda"), 3, 0.01), TOY, 1e12)
    assert result.rows and text(result)
    assert part not in ("step", "memory") or all(row["recorded"] for row in result.rows)
    if part == "roofline":  # the kernels were found
        assert all(row["registers"] > 0 and row["warps"] > 0 for row in result.rows)
