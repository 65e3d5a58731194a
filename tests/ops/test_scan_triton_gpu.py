"""The backend `triton` of the selective scan on a GPU: chosen by itself, at real sizes, in graphs and compiled."""

import gc

import pytest
import torch
from kernels_help import DEVICE, captured
from scan_help import INPUTS, ROUNDING, assert_close, assert_same_bits, run, slope, tokens
from torch import Tensor

from mambacl.errors import UserError
from mambacl.ops import available_backends, cpu, scan, scan_tokens, scan_triton, switch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device")]
GIB = 2**30

REAL = {
    "De-focus Mamba": {"b": 200, "l": 145, "d": 2048, "n": 16},
    "Vim": {"b": 64, "l": 197, "d": 768, "n": 16},
    "VMamba": {"b": 64, "l": 3136, "d": 4 * 192, "n": 1, "groups": 4},
    "MambaVision": {"b": 64, "l": 196, "d": 320, "n": 8},
    "long": {"b": 8, "l": 2048, "d": 1536, "n": 16},
}


@pytest.fixture(autouse=True)
def open_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend forced from outside."""
    monkeypatch.delenv(scan.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.delenv(switch.ENVIRONMENT_VARIABLE, raising=False)


def needs_memory(gib: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / GIB
    if free < gib:
        pytest.skip(f"this takes {gib} GiB of GPU memory, {free:.0f} are free")


def large(b, l, d, n, groups=1, dtype=torch.float32):  # noqa: E741
    """u, delta, A, B, C drawn on the GPU: A and the steps as a trained model has them, so that states live long."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=DEVICE, generator=generator)

    A = -torch.arange(1, n + 1, dtype=torch.float32, device=DEVICE).expand(d, n)
    delta = normal(b, l, d).sub_(3)
    return {"u": normal(b, l, d), "delta": delta, "A": A.contiguous(), "B": normal(b, l, groups, n),
            "C": normal(b, l, groups, n)}  # fmt: skip


def compare_some_images(inputs: dict[str, Tensor], dtype: torch.dtype, reverse: bool = False) -> None:
    """The whole batch with the kernels, a few of its images with the backend `torch` in float64; the others have no
    gradient."""
    batch, length, channels = inputs["u"].shape
    states = inputs["A"].shape[1]
    images = sorted({0, batch // 2, batch - 1})
    dy = torch.zeros(batch, length, channels, device=DEVICE)
    dlast = torch.zeros(batch, channels, states, device=DEVICE)
    for image in images:
        dy[image], dlast[image] = slope(dy[image]), slope(dlast[image])
    options = {"softplus": True, "reverse": reverse}
    found = run(inputs, dy=dy, dlast=dlast, **options)
    few = {name: (tensor if name == "A" else tensor[images]).double() for name, tensor in inputs.items()}
    wanted = run(few, "torch", dy=dy[images], dlast=dlast[images], **options)
    assert found["y"].dtype == torch.float32
    others = [image for image in range(batch) if image not in images][:64]
    for name in wanted:
        assert name in ("y", "last") or found[name].dtype == inputs[name].dtype
        ours = found[name] if name == "A" else found[name][images]
        rounding = ROUNDING[dtype] if name in ("u", "delta", "B", "C") else 0.0
        assert_close(ours, wanted[name], 1e-5, name, rounding)
        if name in ("u", "delta", "B", "C"):
            assert not found[name][others].any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", REAL)
def test_real_sizes_are_those_of_the_torch_backend(shape: str, dtype: torch.dtype) -> None:
    needs_memory(24)
    compare_some_images(large(**REAL[shape], dtype=dtype), dtype)


def test_real_sizes_backwards_and_with_a_part_of_a_block() -> None:
    needs_memory(24)
    compare_some_images(large(b=40, l=149, d=4 * 330, n=13, groups=4), torch.float32, reverse=True)


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_more_than_two_to_the_31_elements(reverse: bool) -> None:
    needs_memory(100)
    inputs = large(b=1100, l=1000, d=2048, n=16, dtype=torch.bfloat16)
    assert inputs["u"].numel() > 2**31
    assert torch.Size(scan_triton.kept_shape(inputs["u"], inputs["A"])).numel() > 2**31
    compare_some_images(inputs, torch.bfloat16, reverse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_each_time_at_real_size(dtype: torch.dtype) -> None:
    inputs = large(b=64, l=197, d=768, n=16, dtype=dtype)
    assert_same_bits(run(inputs, softplus=True), run(inputs, softplus=True))


def test_an_image_does_not_depend_on_the_rest_of_the_batch_at_real_size() -> None:
    inputs = large(b=64, l=50, d=768, n=16)
    others = {name: tensor if name == "A" else tensor.clone() for name, tensor in inputs.items()}
    for name in ("u", "delta", "B", "C"):
        others[name][:-1] = others[name][:-1].flip(0)
    found, among_others = run(inputs, softplus=True), run(others, softplus=True)
    for name in found:
        if name != "A":
            assert torch.equal(found[name][-1], among_others[name][-1]), name


def test_auto_takes_the_kernels_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    u, A = torch.zeros(1, 2, 3, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
    assert "triton" in available_backends()
    assert scan.chosen_backend(u, A) == "triton"
    assert scan.chosen_backend(u, A, dtype=torch.float64) == "torch"
    assert scan.chosen_backend(u, torch.zeros(3, scan_triton.MOST_STATES + 1, device=DEVICE)) == "torch"
    assert scan.chosen_backend(u.cpu(), A.cpu()) == ("torch" if cpu.library() is None else "native")
    with switch.plain():
        assert scan.chosen_backend(u, A) == "torch"
        assert scan.chosen_backend(u, A, "triton") == "triton"  # the caller's own choice stands
    monkeypatch.setenv(switch.ENVIRONMENT_VARIABLE, "1")
    assert scan.chosen_backend(u, A) == "torch"
    monkeypatch.delenv(switch.ENVIRONMENT_VARIABLE)
    monkeypatch.setenv(scan.ENVIRONMENT_VARIABLE, "torch")
    assert scan.chosen_backend(u, A) == "torch"
    monkeypatch.setattr(switch, "_imports", False)
    monkeypatch.delenv(scan.ENVIRONMENT_VARIABLE)
    assert scan.chosen_backend(u, A) == "torch"


def test_the_plain_switch_leads_to_the_same_numbers() -> None:
    inputs = tokens(b=2, l=19, d=40, n=8)
    found = run(inputs, "auto", softplus=True)
    with switch.plain():
        plain = run(inputs, "auto", softplus=True)
    for name in found:
        assert_close(found[name], plain[name], 4e-6, name)


def test_tensors_on_the_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    inputs = {name: tensor.cpu() for name, tensor in tokens(b=1, l=3, d=4, n=2).items()}
    with pytest.raises(UserError, match="CUDA"):
        scan_tokens(**inputs, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_captures_forward_and_backward(dtype: torch.dtype) -> None:
    leaves = {name: tensor.requires_grad_() for name, tensor in tokens(b=2, l=37, d=96, n=16, dtype=dtype).items()}

    def step() -> list[Tensor]:
        y, last = scan_tokens(**leaves, backend="triton", softplus=True)
        return [y, last, *torch.autograd.grad(y.square().sum() + last.sum(), list(leaves.values()))]

    graph, made = captured(step)
    with torch.no_grad():
        for name, tensor in tokens(b=2, l=37, d=96, n=16, dtype=dtype, seed=1).items():
            leaves[name].copy_(tensor)
    for tensor in made:
        tensor.detach().fill_(torch.nan)
    graph.replay()
    for ours, theirs in zip(made, step(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_takes_it_whole(dtype: torch.dtype, frozen: bool) -> None:
    inputs = tokens(b=2, l=9, d=16, n=8, groups=2, dtype=dtype)
    inputs["delta"] = inputs["delta"].mT.contiguous().mT
    trained = tuple(name for name in INPUTS if not (frozen and name == "A"))

    def scan(u: Tensor, **options) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        y, last = scan_tokens(2 * u, **options, softplus=True)
        return 2 * y, last + 1

    found = run(inputs, scan=torch.compile(scan, fullgraph=True), trained=trained)
    wanted = run(inputs, scan=scan, trained=trained)
    for name in wanted:
        assert_close(found[name], wanted[name], 2e-6, name, 2 * ROUNDING[dtype])


def test_the_kernels_run_on_the_stream_of_the_caller() -> None:
    inputs = tokens(b=2, l=37, d=96, n=16)
    expected = run(inputs, softplus=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = {name: torch.empty_like(tensor).fill_(torch.nan) for name, tensor in inputs.items()}
        torch.cuda._sleep(100_000_000)
        for name in inputs:
            late[name].copy_(inputs[name])
        found = run(late, softplus=True)
    torch.cuda.synchronize()
    assert_same_bits(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device at most")
def test_a_device_that_is_not_the_current_one() -> None:
    inputs = tokens(b=2, l=9, d=40, n=8)
    found = run({name: tensor.to("cuda:1") for name, tensor in inputs.items()}, softplus=True)
    assert_same_bits({name: tensor.to("cuda:0") for name, tensor in found.items()}, run(inputs, softplus=True))
