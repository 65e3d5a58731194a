"""Our runs beside the paper's values: which cell a run stands in, means, deviations, differences, and what is said."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import reports_help

from mambacl.cli import main
from mambacl.errors import UserError
from mambacl.nullspace.settings import PAPER_KINDS
from mambacl.paper import paper_table, table_names
from mambacl.paper.comparison import Line, MetricNames, benchmark_of, compare_with_paper, projections
from mambacl.paper.page import as_table, as_text, long_csv, paper_page, write_paper_table
from mambacl.reports.rendering import to_latex, to_markdown, to_text
from mambacl.reports.runs import RunRecord, load_run

LARGE = "defocus_mamba_large_22k"
SEEDS = {0: 80, 1: 82, 2: 84}  # right images of each 100 on every task; 90 when just learned


def make_run(
    folder: Path, *, seed: int = 0, end: int = 80, method: str = "mamba-cl", backbone: str = LARGE, tasks: int = 10,
    classes: int = 100, dataset: str = "cifar100", status: str = "finished", stream: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None, **config: Any,
) -> RunRecord:  # fmt: skip
    """Each task has 90 per cent right when it is learned and `end` after the last task."""
    correct = [*([90] * (t + 1) for t in range(tasks - 1)), [end] * tasks]
    size = classes // tasks
    whole = {
        "benchmark": "anything", "backbone": backbone, "peak_memory_bytes": 0,
        "tasks": [list(range(size * t, size * (t + 1))) for t in range(tasks)],
        "seconds": {"train": 3000.0, "decomposition": 600.0},
    }  # fmt: skip
    settings = {"setting": "paper", "recipe": "paper", "pretrained": True}
    settings |= {"stream": {"dataset": dataset, "tasks": tasks, "order_seed": seed} | (stream or {})} | config
    whole |= {"seed": seed, "method": method, "status": status, "config": settings} | (results or {})
    return load_run(reports_help.make_run(folder, correct, [100] * tasks, **whole))


def line(name: str, records: list[RunRecord], starts: str, **names: str) -> Line:
    found = [
        line for line in compare_with_paper(name, records, MetricNames(**names)).lines if line.name.startswith(starts)
    ]
    assert len(found) == 1, [line.name for line in found]
    return found[0]


@pytest.fixture
def seeds(tmp_path: Path) -> list[RunRecord]:
    return [make_run(tmp_path / f"run-{seed}", seed=seed, end=end) for seed, end in SEEDS.items()]


def test_mean_deviation_and_difference_by_hand(seeds: list[RunRecord]) -> None:
    found = line("main", seeds, "Mamba-CL")
    accuracy, forgetting = ("cifar100-10", "accuracy"), ("cifar100-10", "forgetting")
    assert found.ours[accuracy].mean == pytest.approx(82.0) and found.ours[accuracy].std == pytest.approx(2.0)
    assert found.difference(accuracy) == pytest.approx(82.0 - 89.60)
    assert found.ours[forgetting].mean == pytest.approx(8.0)  # 10, 8, 6
    assert found.difference(forgetting) == pytest.approx(8.0 - 2.57)
    assert found.state == "seeds 0, 1, 2" and set(found.ours) == {accuracy, forgetting}


def test_as_text(seeds: list[RunRecord]) -> None:
    text = to_text(as_table(compare_with_paper("main", seeds)))
    assert "82.00 ± 2.00" in text and "89.60 ± 0.27" in text and "-7.60" in text and "+5.43" in text
    assert "81.17 ± 0.83†" in text and "†: runs of CPrompt's authors" in text
    assert "not in mambacl" not in text and text.count("no run given") == 22 + 1  # all others, and Mamba-Seq
    assert "accuracy, ours, is final_accuracy_tasks: mean over tasks" in text


def test_every_row_of_the_paper_is_there_in_every_format(seeds: list[RunRecord]) -> None:
    for name in table_names():
        compared = compare_with_paper(name, seeds)
        table = as_table(compared)
        names = [row[0] for row in table.rows]
        assert names[: len(paper_table(name).rows)] == [row.method for row in paper_table(name).rows]
        assert to_markdown(table) and to_latex(table) and "<table" in paper_page(compared)
        quoted = sum(value is not None for row in paper_table(name).rows for value in row.values.values())
        cells = list(csv.DictReader(io.StringIO(long_csv(compared))))
        assert sum(bool(cell["paper"]) for cell in cells) == quoted


def test_the_long_csv(seeds: list[RunRecord]) -> None:
    cells = csv.DictReader(io.StringIO(long_csv(compare_with_paper("main", seeds))))
    (cell,) = (
        cell for cell in cells if (cell["method"], cell["metric"], cell["ours"]) == ("Mamba-CL", "accuracy", "82.0000")
    )
    assert (cell["ours_std"], cell["paper"], cell["paper_std"]) == ("2.0000", "89.6", "0.27")
    assert (cell["difference"], cell["seeds"], cell["source"]) == ("-7.6000", "0 1 2", "own")


def test_other_metrics_by_name(seeds: list[RunRecord]) -> None:
    key = ("cifar100-10", "forgetting")
    assert line("main", seeds, "Mamba-CL", forgetting="backward_transfer").ours[key].mean == pytest.approx(-8.0)
    with pytest.raises(UserError, match=r"no metric 'forgeting'. Did you mean 'forgetting'"):
        MetricNames(forgetting="forgeting")


def test_a_metric_that_an_old_run_has_not_stored_is_counted(seeds: list[RunRecord]) -> None:
    del seeds[0].results["metrics"]["forgetting_first_to_last"]  # type: ignore[attr-defined]
    found = line("main", seeds[:1], "Mamba-CL", forgetting="forgetting_first_to_last")
    assert found.ours["cifar100-10", "forgetting"].mean == pytest.approx(10.0)


def test_benchmarks_with_their_own_settings_share_a_line(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", nullspace={"eta": 0.95})
    second = make_run(tmp_path / "b", dataset="imagenet-r", classes=200, nullspace={"eta": 0.9})
    found = line("main", [first, second], "Mamba-CL")
    assert {key[0] for key in found.ours} == {"cifar100-10", "imagenet-r-10"}


def test_runs_that_differ_by_more_than_the_seed_stay_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(eta), nullspace={"eta": eta}) for eta in (0.9, 0.95)]
    runs.append(make_run(tmp_path / "nano", backbone="defocus_mamba_nano"))
    compared = compare_with_paper("main", runs)
    names = [line.name for line in compared.lines if line.ours]
    assert len(names) == 3 and "eta=0.9" in names[0] and names[2].startswith("Mamba-CL (defocus_mamba_nano")
    assert any("ours use defocus_mamba_nano, the paper " in note for note in as_table(compared).notes)


@pytest.mark.parametrize(
    ("options", "benchmark"),
    [
        ({}, "cifar100-10"),
        ({"tasks": 50}, "cifar100-50"),
        ({"classes": 50}, "cifar100-10, 50 classes"),
        ({"stream": {"train_per_class": 8}}, "cifar100-10, 8 images per class"),
        ({"stream": {"validation": 0.1}}, "cifar100-10, on validation images"),
        ({"results": {"scenario": "task"}}, "cifar100-10, task-incremental"),
        ({"results": {"skipped": {"images": ["a", "b"]}}}, "cifar100-10, without 2 unreadable images"),
        ({"dataset": "folders"}, "anything"),
    ],
)
def test_only_the_same_data_stand_beside_the_papers(tmp_path: Path, options: dict[str, Any], benchmark: str) -> None:
    run = make_run(tmp_path / "run", **options)
    assert benchmark_of(run) == benchmark
    compared = compare_with_paper("main", [run])
    (ours,) = (line for line in compared.lines if line.ours)
    assert (ours.difference((benchmark, "accuracy")) is not None) == (benchmark == "cifar100-10")
    assert f"{benchmark} accuracy ours" in [column.title for column in as_table(compared).columns]


def test_seeds_are_those_of_the_benchmark_and_each_once(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(i), seed=seed) for i, seed in enumerate((3, 3))]
    runs.append(make_run(tmp_path / "other", seed=5, dataset="imagenet-r", classes=200))
    compared = compare_with_paper("main", runs)
    cells = [cell for cell in csv.DictReader(io.StringIO(long_csv(compared))) if cell["ours"]]
    assert {(cell["benchmark"], cell["seeds"]) for cell in cells} == {("cifar100-10", "3 3"), ("imagenet-r-10", "5")}
    notes = as_table(compared).notes
    assert "a single seed has no deviation" in notes
    assert any("Mamba-CL, cifar100-10: a seed appears more than once" in note for note in notes)


def test_another_way_of_training_is_said(seeds: list[RunRecord], tmp_path: Path) -> None:
    def said(runs: list[RunRecord]) -> list[str]:
        return [
            note for note in as_table(compare_with_paper("main", runs)).notes if "differently from the paper" in note
        ]

    assert not said([*seeds, make_run(tmp_path / "same", training={"passes": 50, "lr": 2e-4, "workers": 4})])
    changed = make_run(tmp_path / "b", method="sequential", recipe="public-code", training={"passes": 5, "lr": 2e-4})
    assert said([changed]) == ["Mamba-Seq: ours are trained differently from the paper: recipe public-code, passes 5"]
    fewer = make_run(tmp_path / "c", stream={"train_per_class": 200})
    assert said([fewer]) == ["Mamba-CL: ours are trained differently from the paper: train_per_class 200"]


def test_the_help_names_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert f"compare with a table of the paper: {', '.join(table_names())}" in words
    assert main(["paper", "--help"]) == 0
    assert "which --dry-run lists" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_is_not_finished_is_left_out_and_named(tmp_path: Path) -> None:
    compared = compare_with_paper("main", [make_run(tmp_path / "open", status="running")])
    assert not any(line.ours for line in compared.lines)
    assert any("unfinished" in note and "open" in note for note in as_table(compared).notes)


def test_a_method_that_the_paper_has_not_gets_a_row(tmp_path: Path) -> None:
    found = compare_with_paper("main", [make_run(tmp_path / "run", method="frozen")]).lines[-1]
    assert (
        found.name == "frozen" and found.row is None and found.ours["cifar100-10", "accuracy"].mean == pytest.approx(80)
    )


def test_the_ablation_goes_by_what_is_projected(tmp_path: Path) -> None:
    rows = paper_table("ablation").rows
    runs = []
    for i, row in enumerate(rows[1:]):
        assert row.run is not None
        rules = {kind: {"projected": kind in row.run["projects"]} for kind in PAPER_KINDS}
        runs.append(make_run(tmp_path / str(i), end=70 + i, nullspace=rules))
    runs.append(make_run(tmp_path / "none", end=60, method="sequential"))
    lines = compare_with_paper("ablation", runs).lines
    found = [line.ours["cifar100-10", "accuracy"].mean for line in lines]
    assert found == pytest.approx([60, 70, 71, 72, 73, 74, 75, 76])
    assert projections(make_run(tmp_path / "other", method="frozen")) is None
    fixed = make_run(tmp_path / "fixed", nullspace={"A": {"trains": False, "projected": True}})
    assert projections(fixed) is None  # the paper trains all five
    assert [line.name for line in compare_with_paper("ablation", [fixed]).lines if line.ours] == ["mamba-cl"]


def test_variants_go_by_backbone_and_scratch_by_the_weights(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, backbone=name) for name in ("vim_base", "vmamba_base_s2l15", LARGE)]
    lines = [line for line in compare_with_paper("variants", runs).lines if line.ours]
    assert [(line.name, line.venue) for line in lines] == [
        ("Mamba-CL", "Vim"),
        ("Mamba-CL", "VMamba"),
        ("mamba-cl", ""),
    ]
    scratch = make_run(tmp_path / "scratch", backbone="defocus_mamba_tiny", pretrained=False)
    lines = [line for line in compare_with_paper("scratch", [scratch, runs[2]]).lines if line.ours]
    assert [line.name for line in lines] == ["Mamba-CL (tiny)", "mamba-cl"]


def test_minutes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", dataset="imagenet-r", classes=200)
    total, svd = compare_with_paper("svd", [run]).lines
    key = ("imagenet-r-10", "minutes")
    assert total.ours[key].mean == 60 and svd.ours[key].mean == 10
    assert svd.difference(key) == pytest.approx(1.3)


def test_the_share_of_a_part_and_the_increase(tmp_path: Path) -> None:
    """600 of 3600 seconds are the decomposition's; the increase is that over the baseline, benchmark by benchmark."""
    runs = [make_run(tmp_path / "cl", dataset="imagenet-r", classes=200)]
    assert "10.0 (16.7%)" in to_text(as_table(compare_with_paper("svd", runs)))
    assert line("runtime", runs, "Increase").state == "paper only"
    runs.append(make_run(tmp_path / "seq", dataset="imagenet-r", classes=200, method="sequential"))
    runs[1].results["seconds"]["train"] = 2400.0
    increase = line("runtime", runs, "Increase")
    assert increase.ours["imagenet-r-10", "minutes"].mean == pytest.approx(10) and ("average", "minutes") not in (
        increase.ours
    )
    assert increase.shares["imagenet-r-10", "minutes"] == pytest.approx(0.2)
    assert increase.state == "from the rows above"
    assert "10.0 (20.0%)" in to_text(as_table(compare_with_paper("runtime", runs)))


def test_the_average_over_all_benchmarks(tmp_path: Path) -> None:
    kinds = [("imagenet-r", 10, 200), ("imagenet-r", 20, 200), ("cifar100", 10, 100), ("domainnet-s200", 10, 200)]
    runs = [make_run(tmp_path / f"{d}{t}", dataset=d, tasks=t, classes=c) for d, t, c in kinds]
    assert line("runtime", runs[:3], "Mamba-CL").ours.keys().isdisjoint({("average", "minutes")})
    assert line("runtime", runs, "Mamba-CL").ours["average", "minutes"].mean == pytest.approx(60)


def test_resources_are_measured(tmp_path: Path) -> None:
    small = {"backbone": "defocus_mamba_nano", "dataset": "imagenet-r", "classes": 200, "tasks": 10}
    runs = [make_run(tmp_path / m, method=m, **small) for m in ("mamba-cl", "ease")]
    for run in runs:
        run.results.update({"peak_memory_bytes": 3 * 2**30})  # type: ignore[attr-defined]
        run.results["seconds"]["evaluate"] = 11.0  # 5500 images: 100 of each task, up to each
    found = line("resources", runs, "Mamba-CL")
    values = {metric: value.mean for (_, metric), value in found.ours.items()}
    assert values.keys() == {"accuracy", "gflops", "minutes", "inference_ms", "peak_gib", "parameters"}
    assert (values["inference_ms"], values["peak_gib"]) == pytest.approx((2.0, 3.0))
    assert values["parameters"] == pytest.approx(3.03, abs=0.01) and 0 < values["gflops"] < 1
    assert found.difference(("imagenet-r-10", "inference_ms")) == pytest.approx(2.0 - 5.26)
    text = to_text(as_table(compare_with_paper("resources", runs)))
    assert "peak GiB" in text and "evaluation time per image" in text
    assert ("imagenet-r-10", "gflops") not in line("resources", runs, "ease").ours  # several times the backbone's


def test_a_backbone_that_is_not_registered_has_no_operations(tmp_path: Path) -> None:
    found = line("resources", [make_run(tmp_path / "run", backbone="mine")], "Mamba-CL")
    assert {metric for _, metric in found.ours} == {"accuracy", "minutes"}


def test_the_page_and_its_files(seeds: list[RunRecord], tmp_path: Path) -> None:
    page = write_paper_table(compare_with_paper("main", seeds), tmp_path / "out")
    assert page == tmp_path / "out" / "paper-main.html"
    html = page.read_text(encoding="utf-8")
    assert "Content-Security-Policy" in html and "89.60 ± 0.27" in html and "82.00 ± 2.00" in html
    assert sorted(path.suffix for path in page.parent.iterdir()) == [".csv", ".html", ".json", ".md", ".tex"]


def test_from_the_command_line(
    seeds: list[RunRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [str(run.folder) for run in seeds]
    assert main(["report", "--table", "main", *folders, "--format", "csv"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("table,method,") and "82.0000" in captured.out
    assert (tmp_path / "comparison" / "paper-main.html").is_file() and "paper-main.html" in captured.err
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["report", "--table", "main", *folders]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Our results") and max(map(len, printed.split("accuracy, ours")[0].splitlines())) <= 100
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", "--table", "svd"]) == 0  # the paper's values alone
    assert "8.7 (2.3%)" in capsys.readouterr().out and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--table", "mian"], "There is no table 'mian'. Did you mean 'main'? Known: main"),
        ([], "Name the runs to report"),
        (["--table", "main", "--accuracy", "top1"], "There is no metric 'top1'"),
        (["run", "--accuracy", "final_accuracy_images"], "add --table NAME"),
        (["--table", "main", "nowhere"], "nowhere does not exist"),
    ],
)
def test_mistakes(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and len(captured.err.strip().splitlines()) == 1


@pytest.mark.parametrize("width", [80, 120])
def test_our_results_come_first_on_a_terminal(tmp_path, width):
    stream = {"stream": {"dataset": "cifar100"}}
    tasks = [list(range(10 * t, 10 * t + 10)) for t in range(10)]
    rows = [[90] * (t + 1) for t in range(10)]
    run = load_run(
        reports_help.make_run(tmp_path / "a", rows, [100] * 10, method="mamba-cl", config=stream, tasks=tasks)
    )
    text = as_text(compare_with_paper("main", [run]), width)
    lines = text.splitlines()
    (ours,) = [line for line in lines[:6] if "cifar100-10" in line and "accuracy" in line]
    assert ours.split()[:4] == ["Mamba-CL", "cifar100-10", "accuracy", "90.00"] and "89.60 ± 0.27" in ours
    block = text.split("tab:compare")[1].split("\n\n")[1]  # the first columns of the table
    assert "ours" in block and max(map(len, block.splitlines())) <= width
