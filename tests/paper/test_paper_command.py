"""`mambacl paper`: the designs are the paper's, runs are made once, and its values stand beside ours."""

import csv
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small_run import CONFIG

from mambacl.cli import main
from mambacl.config import preset_names, resolve
from mambacl.errors import UserError
from mambacl.paper import paper_table, runner, table_names
from mambacl.paper.designs import CIFAR, DESIGNS, FASHION, FIGURES, PlannedRun, planned
from mambacl.paper.losses import read_losses
from mambacl.paper.rendering import render
from mambacl.paper.rivals import method_of
from mambacl.training.identity import differences
from mambacl.training.loop import Loop

MAIN = ["imagenet-r-10", "imagenet-r-20", "cifar100-10", "domainnet-s200-10"]
BLOCKS = CONFIG["backbone_options"]
TINY = [
    "--scale", "nano", "--device", "cpu", "--backbone", "defocus_mamba", "--backbone_options", json.dumps(BLOCKS),
    "--stream.transforms.image_size", "16", "--stream.train-per-class", "4", "--training.passes", "1",
]  # fmt: skip
MISSING = [row for row in paper_table("main").rows if row.source == "published" and not method_of(row.method)]
NOT_IMPLEMENTED = len(MISSING) + bool(MISSING)  # and the note that explains it
RUN = "fashion-mnist-small-5-{}-0"


def of(runs: list[PlannedRun], benchmark: str) -> list[PlannedRun]:
    return [run for run in runs if run.benchmark.name == benchmark]


# Designs


def test_every_command_of_the_paper_is_there() -> None:
    words = "main long-sequence ablation same-backbone variants scratch runtime svd resources eta blocks pretraining"
    assert list(DESIGNS) == [*words.split(), "accuracy-curve", "loss-curve"]
    assert set(DESIGNS) - set(FIGURES) == set(table_names())


@pytest.mark.parametrize(
    ("name", "count", "benchmarks"),
    [
        ("main", 2 * 4, MAIN),
        ("long-sequence", 2 * 5,
         ["imagenet-r-50", "cifar100-50", "domainnet-s200-50", "imagenet-r-100", "domainnet-s200-100"]),
        ("ablation", 8 * 4, MAIN),
        ("same-backbone", 4, MAIN[:1]),
        ("variants", 3 * 2 * 4, MAIN),
        ("scratch", 2, ["cifar100-10"]),
        ("runtime", 2 * 4, MAIN),
        ("svd", 1, MAIN[:1]),
        ("resources", 2, MAIN[:1]),
        ("eta", 4 * 4, MAIN),
        ("blocks", 5 * 4, MAIN),
        ("pretraining", 2 * 2 * 4, MAIN),
        ("accuracy-curve", 4, ["imagenet-r-10", "cifar100-10"]),
        ("loss-curve", 4, ["imagenet-r-10", "cifar100-10"]),
    ],
)  # fmt: skip
def test_counts(name: str, count: int, benchmarks: list[str]) -> None:
    runs = planned(name, "paper", seeds=3)
    assert len(runs) == 3 * count == len({run.key for run in runs})
    assert list(dict.fromkeys(run.benchmark.name for run in runs)) == benchmarks
    assert set(Counter(run.seed for run in runs).items()) == {(seed, count) for seed in range(3)}


def test_the_ablation_is_the_papers() -> None:
    found = []
    for run in of(planned("ablation"), "cifar100-10"):
        free = {kind for kind, rule in run.varied.get("nullspace", {}).items() if rule == {"projected": False}}
        found.append((run.method, sorted({"W_delta", "W_B", "W_C", "A", "out"} - free)))
    assert found == [
        ("sequential", ["A", "W_B", "W_C", "W_delta", "out"]),  # which projects nothing, whatever it is told
        ("mamba-cl", ["W_delta", "out"]),
        ("mamba-cl", ["W_C", "out"]),
        ("mamba-cl", ["A", "out"]),
        ("mamba-cl", ["W_B", "out"]),
        ("mamba-cl", ["A", "W_B", "W_C", "W_delta"]),
        ("mamba-cl", ["out"]),
        ("mamba-cl", ["A", "W_B", "W_C", "W_delta", "out"]),
    ]


def test_eta_and_blocks() -> None:
    assert [run.x for run in of(planned("eta"), "cifar100-10")] == [1.0, 0.95, 0.90, 0.85]
    usual = [(run.benchmark.name, run.x) for run in planned("eta") if not run.variant]
    assert usual == [("imagenet-r-10", 0.90), *((name, 0.95) for name in MAIN[1:])]
    assert [run.x for run in of(planned("blocks"), "cifar100-10")] == [1, 12, 24, 36, 48]
    nano = planned("blocks", "nano")
    assert [(run.x, run.varied.get("nullspace", {}).get("blocks")) for run in nano] == [
        (1, 1), (3, 3), (6, 6), (9, 9), (12, None),
    ]  # fmt: skip


def test_nano_has_the_same_tasks_as_far_as_there_are_classes() -> None:
    def names(design: str, dataset: str) -> list[str]:
        return list(dict.fromkeys(run.benchmark.name for run in planned(design, "nano", dataset)))

    assert names("main", CIFAR) == ["cifar100-10", "cifar100-20"] and names("long-sequence", CIFAR) == ["cifar100-50"]
    assert names("main", FASHION) == names("long-sequence", FASHION) == ["fashion-mnist-small-5"]
    assert {run.backbone for run in planned("variants", "nano")} == {"mambavision_nano", "vim_nano", "vmamba_nano"}


@pytest.mark.slow
def test_designs_share_their_runs(tmp_path: Path) -> None:
    """Runs of one folder are one run: same configuration wherever they stand."""
    seen: dict[str, tuple[Any, ...]] = {}
    for name in DESIGNS:
        for run in planned(name, "nano"):
            said = (runner.run_config(run, tmp_path, None, {}), run.losses)
            assert seen.setdefault(run.key, said) == said
    assert RUN.format("mamba-cl") in seen and len(seen) < sum(len(planned(name, "nano")) for name in DESIGNS)


@pytest.mark.parametrize(
    ("design", "key", "preset"),
    [
        ("main", "imagenet-r-20-mamba-cl-0", "imagenet-r-20"),
        ("main", "cifar100-10-mamba-cl-0", "cifar100-10"),
        ("variants", "imagenet-r-10-mamba-cl-vim_base-0", "imagenet-r-10-vim"),
        ("variants", "imagenet-r-10-mamba-cl-vmamba_base_s2l15-0", "imagenet-r-10-vmamba"),
        ("pretraining", "imagenet-r-10-mamba-cl-ImageNet-1k-0", "imagenet-r-10-1k"),
        ("scratch", "cifar100-10-mamba-cl-scratch-0", "cifar100-10-scratch"),
    ],
)
def test_the_first_seed_is_the_preset(design: str, key: str, preset: str, tmp_path: Path) -> None:
    if preset not in preset_names():
        pytest.skip(f"there is no preset {preset}")
    (run,) = (run for run in planned(design, "paper") if run.key == key)
    config = runner.run_config(run, tmp_path, None, {})
    assert set(differences(resolve(preset, {}), config)) <= {"name"}


def test_seeds_have_their_own_class_orders(tmp_path: Path) -> None:
    configs = [runner.run_config(run, tmp_path, None, {}) for run in planned("svd", "nano", seeds=3)]
    assert [(config.seed, config.stream.order_seed) for config in configs] == [(0, 2024), (1, 2025), (2, 2026)]
    assert configs[0].stream.order == "mamba-cl" and configs[0].nullspace.eta == 0.95


def test_what_a_design_varies_goes_before_what_is_given(tmp_path: Path) -> None:
    given = {"nullspace": {"eta": 0.5}, "training": {"passes": 7}}
    configs = [runner.run_config(run, tmp_path, None, given) for run in planned("eta", "nano")]
    assert [config.nullspace.eta for config in configs] == [1.0, 0.95, 0.90, 0.85]
    assert {config.training.passes for config in configs} == {7}
    given = {"nullspace": {"blocks": 2, "out": {"projected": False}}}
    configs = [runner.run_config(run, tmp_path, None, given) for run in planned("blocks", "nano")]
    assert [config.nullspace.blocks for config in configs] == [1, 3, 6, 9, None]
    configs = [runner.run_config(run, tmp_path, None, given) for run in planned("ablation", "nano")[1:]]
    assert [config.nullspace.out.projected for config in configs] == [True] * 4 + [False] + [True] * 2


def test_the_paper_scale_looks_for_each_data_set_in_its_own_folder(tmp_path: Path) -> None:
    paper, nano = planned("svd", "paper")[0], planned("svd", "nano", CIFAR)[0]
    if "imagenet-r-10" in preset_names():
        assert runner.run_config(paper, tmp_path, tmp_path, {}).stream.root == str(tmp_path / "imagenet-r")
    assert runner.run_config(nano, tmp_path, tmp_path, {}).stream.root == str(tmp_path)


# Made from tiny runs


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_a_table_interrupted_and_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["paper", "same-backbone", *TINY, "--out", str(tmp_path)]
    end, calls = Loop._end_task, []

    def interrupted(self: Loop, task: int) -> None:
        calls.append(task)
        if len(calls) == 5 + 3:  # in the third task of the second run
            raise KeyboardInterrupt
        end(self, task)

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_end_task", interrupted)
        assert main(command) == 130
    assert "repeat the command to continue" in capsys.readouterr().err
    assert main([*command, "--dry-run"]) == 0
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[:-1]]
    methods = ("frozen", "seq-adapter", "ease", "mamba-cl")
    assert [name for name, _ in listed] == [RUN.format(method) for method in methods]
    assert [state for _, state in listed] == ["finished", "interrupted", "not started", "not started"]

    first = tmp_path / "nano" / RUN.format("frozen") / "results.json"
    before, trained = first.stat().st_mtime_ns, []
    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_end_task", lambda self, task: (trained.append(task), end(self, task))[-1])
        assert main(command) == 0
    assert trained == [2, 3, 4, *range(5), *range(5)] and first.stat().st_mtime_ns == before
    captured = capsys.readouterr()
    assert "Runs: 4, finished: 1." in captured.err and "[1/3] continuing" in captured.err
    assert "78.13 ± 0.41" in captured.out and "EASE-Mamba" in captured.out and "seeds 0" in captured.out
    page = tmp_path / "nano" / "paper-same-backbone.html"
    assert page.is_file() and str(page) in captured.err
    cells = list(csv.DictReader((tmp_path / "nano" / "paper-same-backbone.csv").open()))
    ours = {cell["method"] for cell in cells if cell["benchmark"] == "fashion-mnist-small-5" and cell["ours"]}
    assert ours == {"Mamba-fixed", "SeqAdapter-Mamba", "EASE-Mamba", "Mamba-CL"}

    said = "scale nano: fashion-mnist-small at 16 pixels in 5 tasks replaces all data sets, passes: 1"
    assert said in captured.out and said in page.read_text(encoding="utf-8")

    assert main(["paper", "svd", *TINY, "--out", str(tmp_path)]) == 0  # nothing is left to train
    captured = capsys.readouterr()
    assert "Runs: 1, finished: 1." in captured.err and "8.7 (2.3%)" in captured.out
    assert "minutes of a small model, not comparable with the paper's" in captured.out
    assert main(["paper", "main", *TINY, "--out", str(tmp_path), "--only", "mamba-cl"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("not in mambacl") == NOT_IMPLEMENTED and "89.60 ± 0.27" in captured.out

    trained.clear()
    assert main(["paper", "eta", *TINY, "--out", str(tmp_path), "--only", "eta-0.85,mamba-cl-0"]) == 0
    captured = capsys.readouterr()
    assert "Runs: 2, finished: 1." in captured.err and "0.85" in captured.out
    picture, html = (tmp_path / "nano" / f"paper-eta.{suffix}" for suffix in ("png", "html"))
    assert picture.read_bytes().startswith(b"\x89PNG") and str(html) in captured.err
    assert "data-marks=" in html.read_text() and "does not print the figure" in html.read_text()
    points = list(csv.DictReader((tmp_path / "nano" / "paper-eta.csv").open()))
    assert [(p["x"], p["metric"]) for p in points if p["source"] == "ours"] == [
        ("0.95", "accuracy"), ("0.95", "forgetting"), ("0.85", "accuracy"), ("0.85", "forgetting"),
    ]  # fmt: skip
    quoted = {(p["benchmark"], p["x"], p["value"]) for p in points if p["source"] == "paper"}
    assert ("imagenet-r-10", "0.9", "81.6700") in quoted and ("cifar100-10", "0.95", "2.5700") in quoted

    assert main([*command, "--training.passes", "2"]) == 2
    assert "holds another run (differs in training.passes): choose another --out" in capsys.readouterr().err


@pytest.mark.usefixtures("few_test_images")
def test_the_losses_of_old_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "loss-curve", *TINY, "--out", str(tmp_path), "--only", "sequential"]) == 0
    losses = read_losses(tmp_path / "nano" / RUN.format("sequential-losses"))
    assert [len(losses[t]) for t in range(5)] == [1, 2, 2, 2, 2]
    assert all(0 < loss < 10 for row in losses.values() for loss in row)
    points = list(csv.DictReader((tmp_path / "nano" / "paper-loss-curve.csv").open()))
    assert [p["series"] for p in points[:3]] == ["Mamba-Seq, task 1", "Mamba-Seq, task 1", "Mamba-Seq, task 2"]
    assert len(points) == 9 and (tmp_path / "nano" / "paper-loss-curve.png").is_file()
    assert "scale nano" in (tmp_path / "nano" / "paper-loss-curve.html").read_text(encoding="utf-8")
    assert "losses are missing" not in capsys.readouterr().out
    events = tmp_path / "nano" / RUN.format("sequential-losses") / "metrics.jsonl"
    events.write_text("".join(line for line in events.open() if '"task": 4' not in line))
    assert main(["paper", "loss-curve", *TINY, "--out", str(tmp_path), "--only", "sequential"]) == 0
    assert "losses are missing after some tasks" in capsys.readouterr().out


@pytest.mark.parametrize("name", DESIGNS)
def test_without_runs_the_papers_values_stand_alone(name: str, tmp_path: Path) -> None:
    text, path = render(name, [], tmp_path, "nano")
    assert path.is_file() and (tmp_path / f"paper-{name}.csv").is_file()
    if name == "main":
        assert text.count("not in mambacl") == NOT_IMPLEMENTED and "89.60 ± 0.27" in text
    assert "nan" not in text


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["mian"], "There is no table or figure 'mian'. Did you mean 'main'? Known: main, long-sequence"),
        (["--scale", "nano"], "Name a table or figure: main"),
        (["eta", "--scale", "huge"], "--scale takes one of paper, nano, got 'huge'"),
        (["eta", "--scale", "nano", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["eta", "--scale", "nano", "--only", "eta-2"], "No run's name contains 'eta-2'. Known: fashion-mnist"),
        (["eta", "--scale", "nano", "--method", "ease"], "sets --method itself"),
        (["eta", "--scale", "nano", "--stream.tasks", "2"], "sets --stream.tasks itself"),
        (["pretraining", "--scale", "nano", "--pretrained", "false"], "pretraining sets --pretrained itself"),
        (["eta", "--scale", "nano", "--lr", "1"], "There is no option '--lr'. Did you mean '--training.lr'?"),
        (["eta", "--scale", "nano", "--training.passes", "x"], "training.passes takes"),
    ],
)
def test_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and len(captured.err.strip().splitlines()) == 1


def test_missing_presets_and_data_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = planned("svd", "paper")
    odd = dataclasses.replace(run, benchmark=dataclasses.replace(run.benchmark, base="imagenet-r-7"))
    with pytest.raises(
        UserError, match=r"presets that do not exist yet: imagenet-r-7; leave them out with --only NAME"
    ):
        runner.jobs([odd], tmp_path)
    wrong = dataclasses.replace(run, benchmark=dataclasses.replace(run.benchmark, base="demo"))
    with pytest.raises(UserError, match="The preset demo is not imagenet-r in 10 tasks"):
        runner.jobs([wrong], tmp_path)
    if "imagenet-r-10" in preset_names():
        monkeypatch.chdir(tmp_path)
        assert main(["paper", "svd"]) == 2
        assert "--root DIR, with DIR/imagenet-r (see `mambacl data prepare`)" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


def test_the_data_of_the_last_benchmark_are_looked_for_before_the_first_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(name: str, root: str | None) -> None:
        if name == "domainnet-s200":
            raise UserError(f"There is no {root}.")

    monkeypatch.setattr(runner, "open_dataset", opened)
    monkeypatch.setattr(runner, "train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(UserError, match="domainnet-s200"):
        runner.run_jobs(runner.jobs(planned("main", "paper"), tmp_path / "out", tmp_path))


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "--help"]) == 0
    assert "long-sequence" in capsys.readouterr().out
