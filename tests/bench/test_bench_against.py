"""`mambacl bench against`: who agrees with float64 and who does not, the command, and tables made of its figures."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mambacl.bench.against
from mambacl.bench.against import Comparison, against, availability, compare_all
from mambacl.bench.agreement import OUTPUT, Verdict, compare, exact, results
from mambacl.bench.graphs import VARIANTS, onnx_scan, openvino_scan
from mambacl.bench.page import markdown, with_tables
from mambacl.bench.peers import OURS, PEERS, Call, Peer, _arrays, transformers_function
from mambacl.bench.shapes import Problem, Shape, make_problem
from mambacl.bench.timing import Clock
from mambacl.cli import main
from mambacl.errors import UserError
from mambacl.ops import selective_scan_reference

CPU = torch.device("cpu")
CLOCK = Clock(CPU, repeats=3, budget=0.01)
PLAIN, GROUPED = Shape(2, 12, 9, 4), Shape(2, 12, 9, 1, groups=3)
SOURCE = Path(__file__).parents[2]


def reference(problem: Problem, changed: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict) -> Call:
    """The plain recurrence, of inputs that were perhaps tampered with."""
    return lambda: selective_scan_reference(**changed(problem.inputs), delta_softplus=True)[0]


@pytest.mark.parametrize("shape", [PLAIN, GROUPED], ids=str)
def test_exact_results_are_those_of_the_reference(shape: Shape) -> None:
    problem = make_problem(shape, CPU)
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in problem.inputs.items()}
    wide_problem = Problem(shape, wide, problem.dy.double())
    found = results(reference(wide_problem), wide_problem, True)
    for memory in (1, 1 << 29):  # one image at a time, all at once
        wanted = exact(problem, memory)
        assert set(wanted) == set(found) == {OUTPUT, *problem.inputs}
        assert compare(found, wanted).worst < 2.0**-24  # bounds are of float32, whose roundoff is 2^29 times as large


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [PLAIN, GROUPED, Shape(1, 5, 130, 16)], ids=str)
def test_ours_agrees(shape: Shape, dtype: torch.dtype) -> None:
    problem = make_problem(shape, CPU, dtype)
    verdict = compare(results(OURS.prepare(problem, 1), problem, True), exact(problem))
    assert verdict.agrees, verdict


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_installed_peers_agree(peer: Peer) -> None:
    if not peer.installed() or "cpu" not in peer.devices:
        pytest.skip("not installed, or needs a GPU")
    for shape in (PLAIN, Shape(1, 16, 33, 8)):
        problem = make_problem(shape, CPU)
        assert peer.suits(problem)
        verdict = compare(results(peer.prepare(problem, 1), problem, peer.differentiable), exact(problem))
        assert verdict.agrees, verdict


def test_transformers_takes_its_slow_path() -> None:
    pytest.importorskip("transformers")
    assert transformers_function().__code__.co_filename.endswith("modeling_mamba.py")  # not that of a wrapper


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_variant_of_a_graph_agrees(variant: object) -> None:
    runtime, engine = pytest.importorskip("onnxruntime"), pytest.importorskip("openvino")
    pytest.importorskip("onnx")
    problem = make_problem(PLAIN, CPU)
    arrays, wanted = _arrays(problem), exact(problem)
    session = runtime.InferenceSession(onnx_scan(PLAIN, variant), providers=["CPUExecutionProvider"])
    model = engine.Core().compile_model(openvino_scan(PLAIN, variant), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for y in (session.run(None, arrays)[0], model(list(arrays.values()))[0]):
        verdict = compare({OUTPUT: torch.from_numpy(y)}, wanted)
        assert verdict.agrees, verdict


class _HalfOfB(torch.autograd.Function):
    """The right value with a wrong gradient."""

    @staticmethod
    def forward(ctx: object, B: Tensor) -> Tensor:
        return B.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0] / 2


def without(name: str) -> Callable[[Problem, int], Call]:
    return lambda problem, _: reference(problem, lambda given: {**given, name: torch.zeros_like(given[name])})


WRONG: dict[str, Callable[[Problem, int], Call]] = {
    "no D": without("D"),
    "no bias": without("delta_bias"),
    "steps a ten-thousandth too long": lambda problem, _: reference(
        problem, lambda given: {**given, "delta": given["delta"] + 1e-4}
    ),
    "not a number": lambda problem, _: reference(problem, lambda given: {**given, "D": given["D"] * float("nan")}),
    "images missing": lambda problem, _: lambda: reference(problem)()[:1],
    "half a gradient": lambda problem, _: reference(problem, lambda given: {**given, "B": _HalfOfB.apply(given["B"])}),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_peer_that_computes_something_else_is_shown_and_not_timed(mistake: str) -> None:
    gradients = mistake == "half a gradient"
    wrong = Peer("wrong", WRONG[mistake], differentiable=gradients)
    right = Peer("right", lambda problem, _: reference(problem), differentiable=True)
    found = Comparison()
    compare_all(CLOCK, {"toy": PLAIN}, ["float32"], 1, found, (wrong, right))
    ours, other, good = found.rows
    assert (ours["agrees"], other["agrees"], good["agrees"]) == (True, False, True)
    assert not any(key.endswith("_ms") or key.startswith("theirs") for key in other)
    assert "toy, float32: wrong disagrees" in found.remarks[0] and len(found.remarks) == 1
    for call in ("forward", "forward_and_backward"):
        assert good[f"theirs_/_ours_{call}"] == pytest.approx(good[f"{call}_ms"] / ours[f"{call}_ms"])
        assert good[f"{call}_best_ms"] <= good[f"{call}_ms"]


def test_a_peer_that_fails_stops_nothing() -> None:
    def failing(problem: Problem, threads: int) -> Call:
        raise RuntimeError("no kernel image\nand more")

    found = Comparison()
    compare_all(CLOCK, {"toy": PLAIN}, ["float32"], 1, found, (Peer("broken", failing),))
    assert [row["agrees"] for row in found.rows] == [True, False]
    assert found.remarks == ["toy, float32: broken failed: RuntimeError: no kernel image"]


def test_a_missing_peer_is_a_line() -> None:
    missing = Peer("absent", WRONG["no D"], "pip install absent", ("no_such_module_at_all",))
    assert availability(CPU, (missing,)) == {"absent": "not installed: pip install absent"}
    found = Comparison()
    compare_all(CLOCK, {"toy": PLAIN}, ["float32"], 1, found, (missing,))
    assert [row["system"] for row in found.rows] == ["mambacl"] and not found.remarks


def test_who_takes_what() -> None:
    peers = {peer.name: peer for peer in PEERS}
    plain, grouped = make_problem(PLAIN, CPU), make_problem(GROUPED, CPU)
    assert "z" in plain.inputs and "z" not in grouped.inputs
    assert OURS.suits(grouped) and not peers["transformers"].suits(grouped)
    assert not peers["mamba-ssm"].suits(plain) and not peers["VMamba"].suits(grouped)  # both need a GPU
    assert not peers["ONNX Runtime"].suits(make_problem(PLAIN, CPU, torch.bfloat16))


def test_a_verdict_says_where() -> None:
    assert str(Verdict(3.0, OUTPUT)) == "output: 3 times its bound"
    assert str(Verdict(1.5, "z")) == "gradient of z: 1.5 times its bound"
    assert not Verdict(float("nan"), OUTPUT).agrees


def test_rounds_take_all_in_turn() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = replace(CLOCK, repeats=4).in_rounds(calls)
    assert [len(seconds) for seconds in times.values()] == [4, 4]
    timed = "".join(order)[-160:]  # twenty calls of each at once
    assert timed == ("a" * 20 + "b" * 20) * 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Figures of a toy, by the command."""
    path = tmp_path_factory.mktemp("results") / "toy.json"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mambacl.bench.against, "CPU_SHAPES", ("toy",))
        patched.setitem(mambacl.bench.shapes.SHAPES, "toy", PLAIN)
        assert main(["bench", "against", "--device", "cpu", "--rounds", "3", "--json", str(path)]) == 0
    return path


@pytest.fixture
def found(recorded: Path) -> dict[str, Any]:
    return json.loads(recorded.read_text())


def test_the_command_records_machine_versions_and_rows(found: dict[str, Any]) -> None:
    assert found["options"] == {"device": "cpu", "shapes": ["toy"], "threads": 1, "rounds": 3}
    assert found["machine"]["threads"] == 1 and found["machine"]["vectors"] and found["date"].startswith("20")
    assert set(found["peers"]) == {peer.name for peer in PEERS if "cpu" in peer.devices}
    assert {"torch", "python"} <= set(found["versions"]) and "commit" in found
    systems = {row["system"]: row for row in found["rows"]}
    assert systems["mambacl"]["agrees"] and systems["mambacl"]["forward_and_backward_ms"] > 0
    for name, words in found["peers"].items():
        assert (name in systems) != words.startswith("not installed: ")


def test_only_some_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "some.json"
    given = ["bench", "against", "--device", "cpu", "--shape", "nano-1", "--rounds", "1", "--json", str(path)]
    assert main([*given, "--peer", "loop in C"]) == 0
    found = json.loads(path.read_text())
    assert set(found["peers"]) == {"loop in C"}
    assert {row["system"] for row in found["rows"]} <= {"mambacl", "loop in C"}
    assert main([*given, "--peer", "mamba-sm"]) == 2
    assert "There is no system 'mamba-sm'. Did you mean 'mamba-ssm'?" in capsys.readouterr().err


def test_it_prints_what_it_records(capsys: pytest.CaptureFixture[str]) -> None:
    made = against(
        "cpu", ["nano-1"], rounds=3, commit="abc", peers=(PEERS[0], Peer("absent", WRONG["no D"], "x", ("y_",)))
    )
    printed = capsys.readouterr().out
    assert "absent: not installed: x" in printed and "nano-1: B 1 D 384 L 65 N 16" in printed
    assert made["commit"] == "abc" and len(made["rows"]) == 1


def test_tables_of_a_page(recorded: Path, found: dict[str, Any]) -> None:
    page = "# Speed\n\n<!-- table: toy.json -->\nold\n<!-- end -->\nText.\n"
    made = with_tables(page, recorded.parent)
    assert made.startswith("# Speed\n\n<!-- table: toy.json -->\n`mambacl bench against --device cpu`; ")
    assert made.endswith("<!-- end -->\nText.\n") and "old" not in made
    assert with_tables(made, recorded.parent) == made  # an up-to-date page does not change
    ours = next(row for row in found["rows"] if row["system"] == "mambacl")
    times = f"| {ours['forward_ms']:.3g} / {ours['forward_and_backward_ms']:.3g} |"
    assert times in made and "`toy`: B 2 D 12 L 9 N 4" in made
    with pytest.raises(UserError, match=r"other\.json does not exist"):
        with_tables("<!-- table: other.json -->\n<!-- end -->", recorded.parent)


def test_tables_show_who_disagrees_and_memory(found: dict[str, Any]) -> None:
    base = {"shape": "a", "size": "B 1", "agrees": True}
    figures = {"forward_ms": 2.0, "forward_and_backward_ms": 4.0, "peak_MiB": 100.0}
    theirs = {"system": "x", "theirs_/_ours_forward": 3.0, "peak_MiB": 150.0}
    rows = [{**base, **figures, "inputs": "float32", "system": "mambacl"}, {**base, **theirs, "inputs": "float32"}]
    rows += [{**base, **figures, "inputs": "bfloat16", "system": "mambacl"}]
    rows += [{**base, "inputs": "bfloat16", "system": "x", "agrees": False}]
    lines = markdown({**found, "rows": rows, "peers": {"x": "1.0"}}).splitlines()
    assert lines[2:] == [
        "| scan | inputs | mambacl, ms | x |",
        "| --- | --- | --- | --- |",
        "| `a`: B 1 | float32 | 2 / 4 | 3 |",
        "|  | bfloat16 | 2 / 4 | disagrees |",
        "",
        "Versions: x 1.0.",
        "",
        "Peak memory of forward and backward, as a multiple of mambacl's: x 1.5 to 1.5.",
    ]


def test_the_line_above_a_table(found: dict[str, Any]) -> None:
    versions, machine = {"torch": "2.11.0"}, {"cpu": "EPYC", "vectors": "AVX2", "cores": 2, "threads": 1, "load": 0.4}
    record = {**found, "commit": "abc", "date": "2026-11-16T07:00:00+00:00", "versions": versions}

    def line(**changes: object) -> str:
        return markdown({**record, "machine": {"device": "CPU", **machine, **changes}}).splitlines()[0]

    quiet = "`mambacl bench against --device cpu`; commit abc; EPYC, AVX2; 1 thread; PyTorch 2.11.0; 2026-11-16."
    assert line() == line(load=None) == quiet
    assert "2 threads; while the machine was busy: load 6.0 on 2 cores; " in line(threads=2, load=6.0)
    assert line(device="NVIDIA H200") == (
        "`mambacl bench against --device cuda`; commit abc; NVIDIA H200; PyTorch 2.11.0; 2026-11-16."
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [Shape(2, 64, 145, 16), Shape(2, 64, 200, 1, groups=4)], ids=str)
def test_peers_on_a_gpu_agree(shape: Shape, dtype: torch.dtype) -> None:
    problem = make_problem(shape, torch.device("cuda"), dtype)
    wanted = exact(problem)
    for peer in (OURS, *PEERS):
        if peer.installed() and peer.suits(problem):
            verdict = compare(results(peer.prepare(problem, 1), problem, peer.differentiable), wanted)
            assert verdict.agrees, f"{peer.name}: {verdict}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_call_on_a_gpu() -> None:
    found = Comparison()
    shape = Shape(2, 64, 145, 16)
    compare_all(Clock(torch.device("cuda"), 3, 0.01), {"toy": shape}, ["float32"], 1, found)
    inputs = make_problem(shape, torch.device("cuda")).bytes() / 2**20
    assert all(row["peak_MiB"] > inputs for row in found.rows if row["agrees"])
