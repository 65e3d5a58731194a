"""The kernels that take bias, softplus, skip and gate inside, in either layout, against the reference.

Without a CUDA device they run in Triton's interpreter, on the CPU: every size is small.
"""

import pytest
import torch
from kernels_help import DEVICE, kernels, poisoned
from scan_help import ROUNDING, TOLERANCE, assert_close, assert_same_bits, run, slope, tokens
from torch import Tensor

from mambacl.ops import cross, scan_tiles, scan_tokens
from mambacl.ops.scan_triton import Split

AROUND = ("D", "z", "bias")


def inputs(b, l, d, n, groups=1, layout="time", around=AROUND, dtype=torch.float32):  # noqa: E741
    """All inputs of a scan; `layout` says whether time or channels are contiguous in u, delta and z."""
    found = tokens(b, l, d, n, groups)
    more = tokens(b, l, d, 1, seed=1)
    found |= {"D": more["u"][0, 0], "z": more["delta"], "bias": more["u"][0, -1] / 2}
    found = {name: tensor for name, tensor in found.items() if name not in AROUND or name in around}
    for name in {"u", "delta", "z"} & set(found):
        found[name] = found[name].to(dtype)
        if layout == "time":
            found[name] = found[name].mT.contiguous().mT
    return found


def compare(given: dict[str, Tensor], tolerance: float = TOLERANCE, **options) -> None:
    """The kernels in the inputs' types, their memory poisoned, against the reference in float64."""
    options = {"softplus": True, "trained": tuple(given), **options}
    with poisoned():
        found = run(given, **options)
    wanted = run({name: tensor.double() for name, tensor in given.items()}, "reference", **options)
    for name in wanted:
        rounding = 0.0
        if name in given:
            assert found[name].dtype == given[name].dtype and found[name].shape == given[name].shape
            rounding = ROUNDING[given[name].dtype]
        assert_close(found[name], wanted[name], tolerance, name, rounding)


SHAPES = {
    "one of each": {"b": 1, "l": 1, "d": 1, "n": 2},
    "one state": {"b": 2, "l": 5, "d": 6, "n": 1},
    "one state, groups, several tiles": {"b": 1, "l": 80, "d": 6, "n": 1, "groups": 2},
    "states and channels beyond a block": {"b": 1, "l": 6, "d": 17, "n": 3},
    "seven states, blocks of two warps": {"b": 1, "l": 21, "d": 40, "n": 7},
    "sixteen states, several intervals": {"b": 1, "l": 37, "d": 9, "n": 16},
    "more states, groups": {"b": 1, "l": 5, "d": 4, "n": 33, "groups": 2},
}


@kernels
@pytest.mark.parametrize("layout", ["time", "channels"])
@pytest.mark.parametrize("shape", SHAPES)
def test_everything_inside_is_the_reference(shape: str, layout: str) -> None:
    compare(inputs(**SHAPES[shape], layout=layout), reverse=shape == "states and channels beyond a block")


@kernels
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "around, options",
    [
        ((), {"softplus": False}),
        (("D",), {"log_A": True}),
        (("z",), {"reverse": True}),
        (("bias",), {"softplus": False}),
        (("D", "bias"), {"reverse": True, "log_A": True}),
    ],
)
def test_each_part_may_be_left_out(around: tuple[str, ...], options: dict, n: int) -> None:
    given = inputs(b=1, l=9, d=5, n=n, around=around)
    if not options.get("softplus", True):
        given["delta"] = given["delta"].abs()
    if options.get("log_A"):
        given["A"] = (-given["A"]).log()
    compare(given, **options)


@kernels
@pytest.mark.parametrize("n", [1, 4])
def test_half_precision_is_read_and_written_in_place(n: int) -> None:
    compare(inputs(b=1, l=9, d=5, n=n, dtype=torch.bfloat16))


@kernels
def test_strides_may_differ_between_inputs() -> None:
    given = inputs(b=2, l=6, d=8, n=3, layout="channels")
    given["z"] = torch.cat([given["z"], given["z"]], dim=2).chunk(2, dim=2)[1]  # half of a linear layer's output
    compare(given)
    given["u"] = given["u"].mT.contiguous().mT
    compare(given)


@kernels
def test_nothing_is_kept_where_nobody_asks_for_a_gradient() -> None:
    given = inputs(b=1, l=5, d=4, n=2)
    y, _, kept = scan_tiles.forward(**given, softplus=2, keep=False)
    again, _, states = scan_tiles.forward(**given, softplus=2)
    assert kept.numel() == 0 and states.numel() > 0
    assert torch.equal(y, again)


@kernels
@pytest.mark.parametrize("split", [(16, 1, 3), (16, 2, 2)], ids=["a piece each", "two pieces each"])
@pytest.mark.parametrize("reverse", [False, True])
def test_time_in_segments_is_the_same(split: tuple, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_tiles, "_split", lambda *inputs, **options: Split(*split))
    compare(inputs(b=1, l=41, d=3, n=3), reverse=reverse)


@kernels
def test_blocks_taken_one_after_the_other_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(b=1, l=9, d=40, n=16, groups=2)
    before = run(given, softplus=True, trained=tuple(given))
    monkeypatch.setattr(scan_tiles._Call, "share", 2)
    compare(given)
    after = run(given, softplus=True, trained=tuple(given))
    alike = {name: tensor for name, tensor in before.items() if name not in ("B", "C")}  # summed in another order
    assert_same_bits(after, alike)


@kernels
@pytest.mark.parametrize(
    "plan",
    [
        *((4, 4, 4, 8, 4), (4, 4, 2, 8, 8), (2, 8, 2, 4, 8), (8, 2, 2, 16, 2)),
        *((2, 8, 2, 4, 4, 80), (2, 8, 2, 8, 8, None, 2), (4, 4, 2, 16, 4, None, 2)),
    ],
)
def test_other_layouts_are_the_same(plan: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_tiles, "layout", lambda *inputs: scan_tiles.Layout(*plan))
    compare(inputs(b=1, l=21, d=19, n=16))


def test_every_layout_fills_its_lanes() -> None:
    for n in range(1, 257):
        for recurrences in (1, 10**4, 5 * 10**4, 10**6):
            for backward in (False, True):
                for full, time, single in ((0, 0, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)):
                    plan = scan_tiles.layout(n, recurrences, backward, bool(full), bool(time), bool(single))
                    assert plan.lanes_n * plan.lanes_d == 32 * plan.warps
                    assert plan.states * plan.lanes_n >= n
                    assert all(scan_tiles.kept_steps(n, size) % plan.steps == 0 for size in (2, 4))


@kernels
@pytest.mark.parametrize("n, height, width", [(1, 2, 3), (16, 2, 3), (3, 4, 4)])
def test_four_orders_read_in_place_are_those_copied(n: int, height: int, width: int) -> None:
    given = tokens(b=2, l=height * width, d=24, n=n, groups=4)
    maps = {name: given[name].unflatten(1, (height, width)) for name in ("u", "delta", "B", "C")}
    maps["u"], maps["delta"] = maps["u"][..., :6], maps["delta"].unflatten(3, (4, 6))
    vectors = {"D": given["u"][0, 0], "bias": given["u"][1, 0], "A_log": (-given["A"]).log()}

    def differentiated(backend: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = {k: v.detach().to(dtype).requires_grad_() for k, v in (maps | vectors).items()}
        y = cross.scan_map(**leaves, backend=backend)
        return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), slope(y))]

    with poisoned():
        found = differentiated("triton", torch.float32)
    for ours, theirs in zip(found, differentiated("reference", torch.float64), strict=True):
        assert_close(ours, theirs)


@kernels
def test_layout_of_the_output_follows_u() -> None:
    for layout, unit in (("time", 1), ("channels", 2)):
        given = inputs(b=2, l=3, d=4, n=2, layout=layout)
        y, _ = scan_tokens(**given, softplus=True, backend="triton")
        assert y.stride(unit) == 1 and y.device.type == torch.device(DEVICE).type
