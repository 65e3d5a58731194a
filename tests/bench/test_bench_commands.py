"""The commands of `mambacl bench` that have options: each in its smallest form."""

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from cli_help import fails
from small_run import CONFIG

import mambacl.bench.against
import mambacl.bench.busy
import mambacl.bench.exports
import mambacl.bench.methods
import mambacl.bench.parts
import mambacl.bench.relaxation
import mambacl.bench.runs
import mambacl.bench.settings
from mambacl.bench import PARTS
from mambacl.bench.busy import SHORT, SPINNING, WAYS, Effort, start_worker, step_seconds
from mambacl.bench.passes import PassCounter
from mambacl.bench.relaxation import FIXED, as_result
from mambacl.bench.result import Result, publish
from mambacl.bench.runs import compare_precisions
from mambacl.cli import main
from mambacl.methods import METHODS, Setup, Task

CPU = torch.device("cpu")


def finite(result: Result, columns: Sequence[str]) -> None:
    assert result.rows
    for row in result.rows:
        assert all(isinstance(row[name], float) and math.isfinite(row[name]) for name in columns)


COMMANDS = ("against", "settings", "precision", "exports", "busy", "relaxation", "methods")


def printed_help(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with suppress(SystemExit):
        main(["bench", *words, "--help"])
    return capsys.readouterr().out


def test_help_has_a_sentence_for_every_part_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_help(capsys)
    for name in (*PARTS, *COMMANDS):
        assert re.search(rf"\b{name}\b:?\s+\w+\s+\w+", printed), name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_help(capsys, command)
    assert f"mambacl bench {command}" in printed and "--json" in printed


def test_a_record_says_where_and_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    made = publish(lambda seeds: Result("T", [{"a": 1.5}], ["A note."]), path, seeds=1)
    assert json.loads(path.read_text()) == made and made["options"] == {"seeds": 1} and made["rows"] == [{"a": 1.5}]
    assert {"date", "commit", "machine", "versions"} <= set(made)
    printed = capsys.readouterr().out
    assert "1.5" in printed and "A note." in printed


def test_ratios_of_ways_to_wait() -> None:
    alone, beside = {SPINNING: 1.0, "passive": 1.2}, {SPINNING: 6.0, "passive": 2.0}
    spinning, passive = mambacl.bench.busy.rows(alone, beside)
    assert spinning["spinning_/_this_beside"] == 1 and passive["spinning_/_this_beside"] == 3
    assert passive["alone_ms"] == 1200 and passive["beside_ms"] == 2000
    assert set(SHORT.ways) < set(WAYS)


@pytest.mark.long
def test_busy_measures_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mambacl.bench.busy, "START_SECONDS", 0)
    result = mambacl.bench.busy.measure(Effort(1, 0.0, images=1, ways=(SPINNING, "passive")))
    assert [row["threads_wait"] for row in result.rows] == [SPINNING, "passive"]
    finite(result, ["alone_ms", "beside_ms", "spinning_/_this_beside"])


@pytest.mark.slow
def test_a_worker_that_fails_is_noticed() -> None:
    with ExitStack() as stack, pytest.raises(RuntimeError, match="ended with code 1"):
        step_seconds(start_worker(stack, {}, -1), 0)


@pytest.mark.long
def test_methods_are_measured_beside_their_backbone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "methods.json"
    words = ["lae", "simplecil", "--device", "cpu", "--batch", "1", "--quick", "--json", str(path)]
    assert main(["bench", "methods", *words]) == 0
    made = json.loads(path.read_text())
    rows = {(row["method"], row["what"]): row for row in made["rows"]}
    assert list(rows) == [("lae", "step, head"), ("lae", "step, both"), ("lae", "test image"),
                          ("simplecil", "test image")]  # fmt: skip
    finite(Result("", made["rows"]), ["ms", "/_forward", "by_passes", "measured_/_by_passes"])
    for row in rows.values():
        assert row["backbone"] == "vit_nano" and row["measured_/_by_passes"] > 0
        assert row["above_1.3"] == ("!" if row["measured_/_by_passes"] > 1.3 else "")
    assert [row["passes"] for row in rows.values()] == [1, 1, 2, 1]
    head, both, answer, _ = rows.values()
    assert head["by_passes"] == 1 < both["by_passes"] and answer["by_passes"] == answer["forward"] == 2
    assert both["through"] > 0.9 and both["forward"] + both["through"] == pytest.approx(1)  # the first block's qkv


@pytest.mark.slow
def test_a_method_that_needs_a_mamba_is_measured_on_one(tmp_path: Path) -> None:
    result = mambacl.bench.methods.measure(["mamba-cl"], "vit_nano", "cpu", 1, repeats=1, budget=0.0)
    assert [(row["backbone"], row["what"]) for row in result.rows] == [
        ("defocus_mamba_nano", "step"), ("defocus_mamba_nano", "test image"),
    ]  # fmt: skip


def passes_on_the_page(text: str) -> dict[str, tuple[int, int]]:
    """The first two numbers of the column with passes, by method: per training step and per test image."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 5 and re.fullmatch(r"`[a-z0-9-]+`", cells[2]):
            numbers = re.match(r"(?:two stages: 1 \(keys, norms\) or )?(\d)[^,]*?, (\d)", cells[4])
            if numbers:
                found[cells[2].strip("`")] = (int(numbers[1]), int(numbers[2]))
    return found


def test_the_page_has_the_counted_passes() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = passes_on_the_page((docs / "rivals.md").read_text(encoding="utf-8"))
    assert len(page) == 17
    rows = json.loads((docs / "results" / "methods-cpu.json").read_text(encoding="utf-8"))["rows"]
    for name, (learning, answering) in page.items():
        counted = {row["what"]: row["passes"] for row in rows if row["method"] == name}
        assert counted.pop("test image") == pytest.approx(answering), name
        assert max(counted.values()) == pytest.approx(learning), name


@pytest.mark.parametrize("name", ["analytic", "frozen", "coda-prompt", "os-prompt", "sequential"])
def test_passes_are_counted_right(name: str, tiny_model_for: Callable[[str], torch.nn.Module]) -> None:
    """The backbone's last norm sees every pass."""
    model, images, labels = tiny_model_for(name), torch.randn(2, 3, 16, 16), torch.tensor([0, 1])
    counter = PassCounter(tiny_model_for(name), images)
    method = METHODS.get(name)(model, Setup(tasks=2, classes=4))
    seen: list[bool] = []
    norm = next(module for path, module in model.named_modules() if path == "norm" or path.endswith("norm_f"))
    norm.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    method.start_task(Task(0, 2, 0, seed=0))
    if method.trains:
        found = counter.count(model, partial(method.loss, images, labels))
        assert len(seen) == found.passes
        trained = {name for group in method.named_parameters().values() for name, _ in group}
        assert (found.training > 0) == any(name.endswith(".weight") and "blocks" in name for name in trained)
        assert (found.through > 0) == (name != "frozen")  # fine-tuning leaves some layers of a Mamba block alone
    with torch.no_grad():
        method.fit_classifier([(images, labels)]) if not method.trains else None
        seen.clear()
        found = counter.count(model, partial(method.answer, images))
    assert len(seen) == found.passes == found.forward


def test_prompt_tokens_and_shorter_passes_count(tiny_model_for: Callable[[str], torch.nn.Module]) -> None:
    model, images = tiny_model_for("l2p"), torch.randn(2, 3, 16, 16)
    counter, depth = PassCounter(model, images), len(model.feature_info)  # type: ignore[arg-type]
    tokens = model.embed(images)  # type: ignore[operator]
    half = counter.count(model, partial(model.run_depth, 0, tokens.detach()))  # type: ignore[arg-type]
    assert half.passes == pytest.approx(1 / depth) and half.work == pytest.approx(1 / depth)
    longer = torch.cat((tokens, tokens), dim=1).detach()
    twice = counter.count(model, partial(model.run_depth, 0, longer))  # type: ignore[arg-type]
    assert twice.passes == pytest.approx(1 / depth) and twice.work == pytest.approx(2 / depth)


def test_settings_are_compared_after_a_task() -> None:
    result = mambacl.bench.settings.measure("cpu", 2, "float32", tasks=1, images=20, repeats=3, budget=0.01)
    assert [row["step"] for row in result.rows] == ["sequential", "public-code", "exact energy:0.99"]
    finite(result, ["ms", "/_public-code"])
    for row in result.rows:
        assert len(str(row["first_steps_s"]).split()) == 2  # before the task and after it
    assert result.rows[1]["/_public-code"] == 1


@pytest.mark.slow
def test_precisions_are_compared_over_seeds(tmp_path: Path, few_test_images: None) -> None:
    training = {"training": {**CONFIG["training"], "passes": 1, "decay_after": []}}
    result = compare_precisions({**CONFIG, **training}, None, tmp_path, 2, "cpu")
    assert len(result.rows) == 3 * 3 and {row["precision"] for row in result.rows} == {"float32", "tf32", "bf16"}
    finite(result, ["seed_0", "seed_1", "mean", "deviation"])
    for row in result.rows:
        assert row["mean"] == pytest.approx((row["seed_0"] + row["seed_1"]) / 2)
    again = compare_precisions({**CONFIG, **training}, None, tmp_path, 2, "cpu")
    assert again.rows == result.rows  # finished runs are not trained again, whose seconds would differ


def test_loss_at_equal_drift_is_interpolated() -> None:
    strict, loose = list(FIXED)[:2]
    run = {strict: (3.0, 0.1), loose: (1.0, 0.3), "A relaxed by 0.1": (1.5, 0.2)}
    figures = {name: {"loss": loss, "drift": drift, "A_moved": 0.0} for name, (loss, drift) in run.items()}
    rows = as_result([figures, figures]).rows
    assert [row["loss_with_A_fixed"] for row in rows] == [None, None, pytest.approx(2.0)]


@pytest.mark.slow
def test_relaxing_moves_A_and_fixing_does_not(few_test_images: None) -> None:
    ways = {"A fixed, eta 1.0": {"eta": 1.0}, "A relaxed by 0.9": {"relax": 0.9}}
    found = mambacl.bench.relaxation.measure_seed(CPU, 0, 1, 2e-3, ways, {"train_per_class": 10})
    fixed, relaxed = found["A fixed, eta 1.0"], found["A relaxed by 0.9"]
    assert fixed["A_moved"] == 0 < relaxed["A_moved"]
    finite(as_result([found]), ["loss", "drift", "A_moved"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["scann"], "There is no part 'scann'. Did you mean 'scan'?"),
        (["scan", "--shape", "nanoo"], "There is no shape 'nanoo'. Did you mean 'nano'?"),
        (["--shape", "nano", "block"], "'block' is a part, not a shape: name parts before --shape"),
        (["block", "--shape", "nano"], "--shape is for the parts scan and roofline"),
        (["--device", "gpu"], "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        (["scan", "--json", "missing/bench.json"], "missing/bench.json cannot be written (No such file or directory)"),
        (["scan", "--json", "."], "cannot be written (Is a directory)"),
        (["run", "--root", "nowhere"], "nowhere"),
        (["scan", "--root", "nowhere"], "--root is for the part run"),
        (["--fast"], "There is no option '--fast'"),
        (["against", "--shape", "nanoo"], "There is no shape 'nanoo'. Did you mean 'nano'?"),
        (["against", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["against", "--rounds", "-1"], "--rounds must be at least 1, got -1"),
        (["against", "--json", "missing/a.json"], "missing/a.json cannot be written"),
        (["against", "--device", "gpu"], "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        (["scan", "against"], "`against` is a separate command"),
        (["against", "scan"], "bench against does not take 'scan'"),
        (["busy", "--others", "0"], "--others must be at least 1, got 0"),
        (["busy", "--json", "missing/a.json"], "missing/a.json cannot be written"),
        (["settings", "--device", "gpu"], "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        (["settings", "--precision", "half"], "'half'"),
        (["settings", "--tasks", "6"], "--tasks must be between 1 and 5, got 6"),
        (["settings", "--batch", "0"], "--batch must be at least 1, got 0"),
        (["precision", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["precision", "--preset", "nothing"], "nothing"),
        (["exports", "--rounds", "2"], "--rounds must be at least 3, got 2"),
        (["exports", "--json", "missing/a.json"], "missing/a.json cannot be written"),
        (["relaxation", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["scan", "busy"], "`busy` is a separate command"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("parts", "exports", "busy", "settings", "relaxation"):
        monkeypatch.setattr(f"mambacl.bench.{name}.measure", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr(mambacl.bench.against, "compare_all", lambda *_: pytest.fail("measured"))
    assert sentence in fails(capsys, "bench", *arguments)
    assert not any(tmp_path.iterdir())
