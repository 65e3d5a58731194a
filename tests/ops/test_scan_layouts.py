"""How the Triton scan is laid out, registered and chosen."""

import pytest
import torch
from kernels_help import DEVICE, kernels, poisoned
from scan_help import INPUTS, assert_close, assert_same_bits, compare, reference, run, slope, tokens

from mambacl.errors import UserError
from mambacl.ops import available_backends, cpu, scan, scan_tokens, scan_triton, switch


@pytest.fixture(autouse=True)
def open_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend forced from outside."""
    monkeypatch.delenv(scan.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.delenv(switch.ENVIRONMENT_VARIABLE, raising=False)


RECURRENCES = (1, 5, 2**12, 2**15, 2**17, 2**19, 2**22)


def chosen_layouts(states: int) -> set[scan_triton.Layout]:
    return {
        scan_triton.layout(n, recurrences, backward)
        for n in range(1, states + 1)
        for recurrences in RECURRENCES
        for backward in (False, True)
    }


def test_every_layout_fills_a_warp_and_holds_all_states() -> None:
    for n in range(1, scan_triton.MOST_STATES + 1):
        for recurrences in RECURRENCES:
            for backward in (False, True):
                plan = scan_triton.layout(n, recurrences, backward)
                assert plan.lanes_n * plan.lanes_d == 32
                assert n <= plan.states * plan.lanes_n < 2 * n
                assert scan_triton.KEPT % plan.steps == 0
                assert all(size & (size - 1) == 0 and size > 0 for size in (plan.states, plan.channels, plan.steps))


@kernels
@pytest.mark.parametrize("plan", sorted(chosen_layouts(64), key=str), ids=str)
def test_every_layout_that_is_chosen_gives_the_same_answer(
    plan: scan_triton.Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_triton, "layout", lambda *args, **options: plan)
    compare(tokens(b=1, l=5, d=plan.block, n=plan.states * plan.lanes_n), softplus=True)  # a whole block


@kernels
@pytest.mark.parametrize("n", [1, 3, 16, 64])
@pytest.mark.parametrize("channels, steps", [(1, 2), (2, 8), (4, 4), (1, 8), (4, 2)])
def test_other_layouts_give_the_same_answer(n: int, channels: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = scan_triton.layout(n, 1, backward=True)
    plan = scan_triton.Layout(chosen.states, chosen.lanes_n, channels, chosen.lanes_d, steps)
    inputs = tokens(b=1, l=11, d=3, n=n)
    wanted = reference(inputs, softplus=True)
    monkeypatch.setattr(scan_triton, "layout", lambda *args, **options: plan)
    for name, tensor in run(inputs, softplus=True).items():
        assert_close(tensor, wanted[name], what=name)


@kernels
def test_forward_and_backward_may_have_different_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {False: scan_triton.Layout(4, 1, 4, 32, 2), True: scan_triton.Layout(2, 2, 1, 16, 4)}
    monkeypatch.setattr(scan_triton, "layout", lambda n, recurrences, backward: plans[backward])
    compare(tokens(b=1, l=11, d=6, n=3), softplus=True)


@kernels
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize(
    "segments, length, n, groups",
    [(2, 9, 3, 1), (3, 40, 16, 2), (5, 33, 2, 1), (4, 17, 5, 1)],
)
def test_time_in_segments_gives_the_same_answer(
    segments: int, length: int, n: int, groups: int, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_triton, "segments", lambda *inputs: segments)
    compare(tokens(b=2, l=length, d=6, n=n, groups=groups), softplus=True, reverse=reverse)


@kernels
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize(
    "length, ahead, back, groups",
    [
        (40, (8, 2, 3), (8, 1, 5), 1),
        (33, (8, 2, 3), (16, 2, 2), 2),
        (60, (16, 2, 2), (8, 4, 2), 1),
        (25, (8, 3, 2), (8, 2, 2), 2),
    ],
)
def test_segments_of_several_pieces_give_the_same_answer(
    length: int, ahead: tuple[int, int, int], back: tuple[int, int, int], groups: int, reverse: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    splits = {False: scan_triton.Split(*ahead), True: scan_triton.Split(*back)}
    monkeypatch.setattr(scan_triton, "_split", lambda *inputs, backward: splits[backward])
    compare(tokens(b=2, l=length, d=6, n=3, groups=groups), softplus=True, reverse=reverse)


@pytest.mark.parametrize("length", [512, 700, 1024, 2048, 3136, 5000])
@pytest.mark.parametrize("programs", [1, 96, 768])
@pytest.mark.parametrize("backward", [False, True])
def test_every_step_is_in_one_segment(
    length: int, programs: int, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    u, B = torch.empty(1, length, 16, device="meta"), torch.empty(1, length, 1, 16, device="meta")
    monkeypatch.setattr(scan_triton, "_blocks", lambda *inputs: programs)
    split = scan_triton._split(u, B, scan_triton.layout(16, 16, backward), backward)
    segment = split.width * split.pieces
    assert (split.segments - 1) * segment < length <= split.segments * segment
    assert split.segments == 1 or split.width % scan_triton.KEPT == 0


def test_time_is_split_where_there_are_few_long_recurrences() -> None:
    language = 8 * 1536 // 16
    ahead, back = (132 * scan_triton.RESIDENT[backward] for backward in (False, True))  # an H200
    assert [scan_triton.segments(2048, language, room) for room in (ahead, back)] == [4, 2]
    assert scan_triton.segments(2048, language, ahead // 4) == 1  # a smaller one is full
    assert scan_triton.segments(2048, 1536 // 16, ahead) == 8
    assert scan_triton.segments(700, 10, back) == 2
    assert scan_triton.segments(145, 200 * 2048 // 32, ahead) == 1
    assert scan_triton.segments(197, 1, ahead) == 1
    assert scan_triton.segments(4096, 0, ahead) == 1


@kernels
def test_nothing_stays_nothing_through_a_segment_that_would_make_it_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tokens(b=1, l=24, d=2, n=2)
    inputs["A"] = torch.full_like(inputs["A"], 22.4)
    inputs["delta"] = torch.full_like(inputs["delta"], 0.5)
    inputs["u"][:, :16] = 0
    monkeypatch.setattr(scan_triton, "segments", lambda *inputs: 3)
    last = scan_tokens(*inputs.values(), backend="triton")[1]
    expected = scan_tokens(*inputs.values(), backend="reference")[1]
    assert torch.equal(last.isfinite(), expected.isfinite())


@kernels
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("length", [9, 16, 21, 39])
def test_fewer_kept_states_give_the_same_bits(length: int, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tokens(b=1, l=length, d=3, n=3)
    expected = run(inputs, softplus=True, reverse=reverse)
    kept = scan_triton.kept_shape(inputs["u"], inputs["A"])
    monkeypatch.setattr(scan_triton, "KEPT", 2 * scan_triton.KEPT)
    assert scan_triton.kept_shape(inputs["u"], inputs["A"])[1] < kept[1]
    with poisoned():
        assert_same_bits(run(inputs, softplus=True, reverse=reverse), expected)


@kernels
@pytest.mark.parametrize("softplus, reverse, frozen", [(False, False, True), (True, True, False)])
def test_operator_is_registered_as_pytorch_wants_it(softplus: bool, reverse: bool, frozen: bool) -> None:
    inputs = tokens(b=1, l=3, d=4, n=2, groups=2)
    inputs["B"] = inputs["B"].bfloat16()
    inputs["delta"] = inputs["delta"].mT.contiguous().mT  # the steps are laid out as promised all the same
    leaves = [tensor.requires_grad_(not (frozen and name == "A")) for name, tensor in inputs.items()]
    order = "reverse" if reverse else "forward"
    options = (None, None, None, None, not softplus, softplus, order, 1, torch.float32, "triton", True)
    result = torch.library.opcheck(torch.ops.mambacl.scan.default, (*leaves, *options))
    assert set(result.values()) == {"SUCCESS"}


@kernels
@pytest.mark.parametrize("softplus, need_A", [(False, True), (True, False)])
def test_backward_operator_is_registered_as_pytorch_wants_it(softplus: bool, need_A: bool) -> None:
    inputs = tokens(b=1, l=3, d=4, n=2, groups=2, positive=True)
    inputs["u"] = inputs["u"].mT.contiguous().mT
    inputs |= {"B": inputs["B"].half(), "C": inputs["C"].bfloat16()}
    options = (None, None, None, None, False, False, "forward", 1, torch.float32, "triton", True)
    y, last, kept, _ = torch.ops.mambacl.scan(*inputs.values(), *options)
    arguments = (slope(y), slope(last), *inputs.values(), None, None, None, kept)
    arguments = (*arguments, False, int(softplus), "forward", 1, "triton", need_A)
    result = torch.library.opcheck(torch.ops.mambacl.scan_backward.default, arguments)
    assert set(result.values()) == {"SUCCESS"}


@kernels
@pytest.mark.parametrize("frozen", [False, True])
def test_compiles_as_one_graph(frozen: bool) -> None:
    inputs = tokens(b=1, l=3, d=4, n=2, groups_C=2)
    trained = tuple(name for name in INPUTS if not (frozen and name == "A"))

    def scan(**options):  # type: ignore[no-untyped-def]
        y, last = scan_tokens(**options, softplus=True, reverse=True)
        return 2 * y, last + 1

    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    found, wanted = run(inputs, scan=compiled, trained=trained), run(inputs, scan=scan, trained=trained)
    for name in wanted:
        assert_close(found[name], wanted[name], what=name)


@kernels
def test_autocast_does_not_lower_the_precision() -> None:
    inputs = tokens(b=1, l=5, d=5, n=3)
    expected = run(inputs, softplus=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_same_bits(run(inputs, softplus=True), expected)


@kernels
def test_float64_is_for_the_other_backends() -> None:
    inputs = tokens(b=1, l=3, d=4, n=2)
    for name in INPUTS:
        with pytest.raises(UserError, match=r"below float64.*use backend='torch'"):
            scan_tokens(**{**inputs, name: inputs[name].double()}, backend="triton")


@kernels
def test_more_states_than_a_warp_can_hold_are_for_the_other_backends() -> None:
    inputs = tokens(b=1, l=2, d=2, n=scan_triton.MOST_STATES + 1, positive=True)
    with pytest.raises(UserError, match=f"at most {scan_triton.MOST_STATES} states; use backend='torch'"):
        scan_tokens(**inputs, backend="triton")
    assert_close(scan_tokens(**inputs)[0], reference(inputs)["y"])


def test_without_triton_the_other_backends_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "_imports", False)
    inputs = tokens(b=1, l=3, d=4, n=2)
    assert "triton" not in available_backends()
    assert scan.chosen_backend(inputs["u"], inputs["A"]) in ("native", "torch")
    with pytest.raises(UserError, match="needs the package triton"):
        scan_tokens(**inputs, backend="triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="for machines without a GPU")
def test_the_kernels_want_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="CUDA"):
        scan_tokens(**tokens(b=1, l=3, d=4, n=2), backend="triton")


@kernels
def test_environment_variable_chooses_the_kernels_where_the_caller_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tokens(b=1, l=3, d=4, n=2)
    launched = []
    forward = scan_triton.forward
    monkeypatch.setattr(scan_triton, "forward", lambda *args: launched.append(True) or forward(*args))
    monkeypatch.setenv(scan.ENVIRONMENT_VARIABLE, "triton")
    scan_tokens(**inputs)
    assert launched
    scan_tokens(**inputs, backend="torch")
    assert len(launched) == 1
    with pytest.raises(UserError, match="below float64"):
        scan_tokens(**{**inputs, "u": inputs["u"].double()})


@kernels
def test_on_the_cpu_the_kernels_are_never_chosen_by_themselves() -> None:
    assert "triton" in available_backends()
    u, A = torch.zeros(1, 2, 3), torch.zeros(3, 4)
    assert scan.chosen_backend(u, A) == ("torch" if cpu.library() is None else "native")
