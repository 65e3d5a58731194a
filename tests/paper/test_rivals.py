"""The rows of the main table at the scale nano: each runs from the command line and stands beside the published row."""

import json
import shutil
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from data_help import fewer_test_images
from test_examples import example

from mambacl.bench.page import with_tables
from mambacl.cli import main
from mambacl.config import resolve
from mambacl.errors import UserError
from mambacl.paper import paper_table, rivals, runner
from mambacl.paper.comparison import matches
from mambacl.paper.designs import CIFAR, NANO_BASES, planned, tuning
from mambacl.reports.runs import RunRecord
from mambacl.training.loop import Loop, TrainingError

TINY = [
    "--device", "cpu", "--training.passes", "1", "--stream.train_per_class", "4",
    "--stream.transforms.image_size", "16",
]  # fmt: skip
NANO = ["paper", "main", "--scale", "nano", *TINY]


def rival(method: str, backbone: str = rivals.VIT) -> rivals.Rival:
    return next(one for one in rivals.ROWS if (one.method, one.backbone) == (method, backbone))


def test_every_published_row_has_a_method_name_and_no_row_stands_twice() -> None:
    published = [row.method for row in paper_table("main").rows if row.source == "published"]
    assert [one.row for one in rivals.ROWS if one.row] == published
    assert set(Counter((one.method, one.backbone) for one in rivals.ROWS).values()) == {1}
    assert set(Counter(one.method for one in rivals.ROWS if one.tuned).values()) == {1}  # rates are by method


def test_methods_that_are_not_registered_have_no_runs() -> None:
    planned_methods = {run.method for run in planned("main", "nano", CIFAR)}
    known = {one.method for one in rivals.rows()}
    assert planned_methods == known | {"mamba-cl", "sequential"} and {"l2p", "lgcl", "analytic"} <= known


def test_the_paper_scale_has_no_rivals_and_the_nano_scale_has_each_in_ten_tasks() -> None:
    assert {run.method for run in planned("main", "paper")} == {"mamba-cl", "sequential"}
    runs = planned("main", "nano", CIFAR, seeds=3)
    assert len({run.key for run in runs}) == len(runs) == 3 * (4 + len(rivals.rows()))
    assert {run.benchmark.tasks for run in runs if run.method not in ("mamba-cl", "sequential")} == {10}


def test_a_row_has_the_published_recipe_with_common_passes_and_batches_and_its_own_factor() -> None:
    own = NANO_BASES[CIFAR]["training"]
    for one in rivals.rows():
        published = resolve("cifar100-10", {"method": one.method}).training
        made = rivals.options_of(one, own, "cifar100-10-nano", factor=4.0)["training"]
        assert (made["lr"], made["head_lr"]) == (4 * published.lr, 4 * published.head_lr)
        assert (made["passes"], made["batch_size"]) == (5, 200)
        assert (made["optimizer"], made["schedule"]) == (published.optimizer, published.schedule)
    assert rivals.options_of(rival("vpt-nsp2"), own, "cifar100-10-nano", 1.0)["training"]["decay_after"] == [2, 4]
    text = rivals.options_of(rival("lgcl"), own, "cifar100-10-nano")["options"]
    assert text == {"task_weight": 0.323, "class_weight": 0.137, "stand_in": "random"}


def test_our_default_has_the_options_of_the_data_sets_preset(tmp_path: Path) -> None:
    preset = resolve("cifar100-10-nano", {})
    for run in planned("main", "nano", CIFAR):
        if run.method == "analytic":
            config = runner.run_config(run, tmp_path, None, {})
            assert (config.features, config.classifier_options) == (preset.features, preset.classifier_options)


def test_chosen_factors_are_read_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rates.yaml"
    monkeypatch.setattr(rivals, "RATES", path)
    rivals.write_chosen({"l2p": 0.25, "lae": 1.0}, path)
    rivals.write_chosen({"lae": 4.0}, path)  # the others stay
    try:
        assert rivals.chosen() == {"l2p": 0.25, "lae": 4.0}
        run = next(run for run in planned("main", "nano", CIFAR) if run.method == "l2p")
        assert runner.run_config(run, tmp_path, None, {}).training.lr == 0.001875 / 4
    finally:
        rivals.chosen.cache_clear()


def test_every_tuned_method_tries_the_same_factors() -> None:
    tried = tuning(CIFAR)
    assert len({run.key for *_, run in tried}) == len(tried)
    assert {one.method for one, *_ in tried} == {one.method for one in rivals.rows() if one.tuned}
    assert set(Counter(factor for _, factor, _ in tried).values()) == {len(tried) // 3}


def test_options_for_another_backbone_do_not_reach_a_vision_transformer(tmp_path: Path) -> None:
    given = {"backbone": "defocus_mamba", "backbone_options": {"depth": 2}, "training": {"passes": 2}}
    for run in planned("main", "nano", CIFAR):
        config = runner.run_config(run, tmp_path, None, given)
        assert config.backbone == (rivals.VIT if run.backbone == rivals.VIT else "defocus_mamba")
        assert config.training.passes == 2


def record(method: str, backbone: str) -> RunRecord:
    return RunRecord(Path("run"), {"method": method, "backbone": backbone})


def test_only_a_rival_on_a_vision_transformer_belongs_to_a_published_row() -> None:
    rows = {row.method: row for row in paper_table("main").rows}
    assert matches(rows["L2P"], record("l2p", "vit_nano")) and matches(
        rows["PGP"], record("dualprompt-pgp", "vit_base")
    )
    assert not matches(rows["L2P"], record("l2p", "defocus_mamba_nano"))
    assert not matches(rows["Mamba-Seq"], record("sequential", "vit_nano"))
    assert matches(rows["Mamba-Seq"], record("sequential", "defocus_mamba_nano"))


def test_parts_share_all_runs() -> None:
    items = list(range(11))
    parts = [runner.part_of(items, f"{i}/4") for i in range(1, 5)]
    assert sorted(chain(*parts)) == items == runner.part_of(items, "") and max(map(len, parts)) == 3


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "x/2", "1/"])
def test_a_part_that_is_none(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NANO, "--part", part]) == 2
    assert "--part must be I/N with I from 1 to N, e.g. 2/12" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_processes_share_the_runs_and_the_table_goes_into_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, names = tmp_path / "out", ["--only", "l2p-vit,simplecil-vit"]
    assert main([*NANO, *names, "--out", str(out), "--part", "1/2", "--keep", "results"]) == 0
    said = capsys.readouterr()
    assert "Runs: 1, finished: 0." in said.err and "Without --part" in said.err and "L2P" not in said.out
    end = Loop._end_task
    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_end_task", lambda self, task: end(self, task) if task < 1 else _broken())
        assert main([*NANO, *names, "--out", str(out), "--part", "2/2"]) == 1
    assert main([*NANO, *names, "--out", str(out), "--part", "2/2", "--keep", "results"]) == 0
    assert "continuing" in capsys.readouterr().err
    folders = sorted(path for path in (out / "nano").iterdir() if path.is_dir())
    assert [path.name.split("-")[4] for path in folders] == ["l2p", "simplecil"]
    assert not list(out.rglob("*.safetensors"))

    moved = tmp_path / "moved"  # as from another machine
    shutil.copytree(out, moved)
    with monkeypatch.context() as patched:
        patched.setattr(runner, "train", lambda *_, **__: pytest.fail("trained"))
        assert main([*NANO, "--out", str(moved), "--finished"]) == 0
    said = capsys.readouterr()
    assert "83.83 ± 0.04" in said.out and "vit_nano, the published ones a ViT-B/16" in " ".join(said.out.split())
    made = json.loads((moved / "nano" / "paper-main.json").read_text())
    row = made["rows"]["L2P, fashion-mnist-small-5"]
    results = json.loads((folders[0] / "results.json").read_text())
    assert row["accuracy"] == [round(100 * results["metrics"]["final_accuracy_tasks"], 2)]
    assert row["backbone"] == "vit_nano" and row["seeds"] == ["0"]
    run = made["runs"][folders[0].name]
    assert run["state_bytes"] == results["state_bytes"] > 0 and run["correct"] == results["correct"][-1]

    earlier = tmp_path / "rivals.json"
    earlier.write_text(json.dumps(made))
    listed = [*NANO, *names, "--out", str(tmp_path / "empty"), "--earlier", str(earlier), "--dry-run"]
    assert main(listed) == 0 and "Runs: 2, finished: 2." in capsys.readouterr().out
    assert main([*listed, "--training.passes", "2"]) == 0 and "finished: 0." in capsys.readouterr().out
    with monkeypatch.context() as patched:
        patched.setattr(runner, "train", lambda *_, **__: pytest.fail("trained"))
        assert main(listed[:-1]) == 0
    again = json.loads((tmp_path / "empty" / "nano" / "paper-main.json").read_text())
    assert all(again[key] == made[key] for key in ("rows", "tables", "runs"))
    page = with_tables("<!-- table: rivals.json fashion-mnist-small-5 -->\n<!-- end -->", tmp_path)
    assert f"| L2P | vit_nano | {row['accuracy'][0]:.1f} |" in page and "| simplecil | vit_nano |" in page
    assert with_tables(page, tmp_path) == page


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_runs_of_several_days_share_a_row(tmp_path: Path) -> None:
    given = [*NANO, "--only", "simplecil-vit", "--seeds", "2"]
    assert main([*given, "--out", str(tmp_path / "out")]) == 0
    earlier = tmp_path / "out" / "nano" / "paper-main.json"
    made = json.loads(earlier.read_text())
    assert [row["seeds"] for row in made["rows"].values() if row["what"].startswith("simplecil")] == [["0", "1"]]
    first = next(path for path in (tmp_path / "out" / "nano").iterdir() if path.name.endswith("simplecil-vit_nano-0"))
    shutil.copytree(first, tmp_path / "both" / "nano" / first.name)
    assert "pretrained: tin32" in (first / "config.yaml").read_text()  # the plan says `true`
    assert main([*given, "--out", str(tmp_path / "both"), "--earlier", str(earlier), "--finished"]) == 0
    there = json.loads((tmp_path / "both" / "nano" / "paper-main.json").read_text())
    assert all(there[key] == made[key] for key in ("rows", "tables", "runs"))


def _broken() -> None:
    raise RuntimeError("broken")


@pytest.mark.parametrize("text", [None, "[]", "{}", '{"runs": {"a": {}}}', '{"runs": '])
def test_an_earlier_table_that_is_none(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "earlier.json"
    if text is not None:
        path.write_text(text)
    assert main([*NANO, "--earlier", str(path), "--dry-run"]) == 2
    assert "cannot be read as a table of `mambacl paper`" in capsys.readouterr().err


@pytest.mark.usefixtures("few_test_images")
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run for run in planned("main", "nano") if run.key.split("-")[4] in ("analytic", "aper")]
    work = runner.jobs(runs, tmp_path)
    seen = []

    def train(config: Any, **_: Any) -> None:
        seen.append(config.method)
        if config.method == "aper":
            raise TrainingError("broken")

    monkeypatch.setattr(runner, "train", train)
    with pytest.raises(TrainingError, match=r"1 of 3 runs failed: fashion-mnist-small-5-aper"):
        runner.run_jobs(work)
    assert len(seen) == 3
    monkeypatch.setattr(runner, "train", lambda *_, **__: _unusable())
    with pytest.raises(UserError, match="unusable"):  # none works: the mistake itself
        runner.run_jobs(work)


def _unusable() -> None:
    raise UserError("unusable")


def test_the_best_factor_is_the_published_one_for_methods_that_guess() -> None:
    best, finalists = example("tune_rivals").best, example("tune_rivals").finalists
    assert best({1.0: 20.0, 0.25: 10.0, 4.0: 30.0}, 100) == 4.0
    assert best({1.0: 30.0, 0.25: 10.0, 4.0: 30.0}, 100) == 1.0
    assert best({1.0: 1.0, 0.25: 0.8, 4.0: 1.1}, 100) == 1.0
    assert finalists({1.0: 20.0, 0.25: 10.0, 4.0: 30.0}, 100) == [4.0, 1.0]
    assert finalists({1.0: 1.0, 0.25: 0.8, 4.0: 1.1}, 100) == [1.0, 4.0]


def test_the_search_goes_on_where_the_best_factor_is_at_an_end() -> None:
    beyond = example("tune_rivals").beyond
    found = {1.0: 20.0, 0.25: 10.0, 4.0: 30.0}
    assert beyond(found, 100) == [16.0] and beyond({**found, 16.0: 25.0}, 100) == []
    assert beyond({1.0: 20.0, 0.25: 30.0, 4.0: 10.0}, 100) == [0.0625]
    assert beyond({1.0: 30.0, 0.25: 20.0, 4.0: 10.0}, 100) == []
    assert beyond({1.0: 1.0, 0.25: 0.8, 4.0: 1.1}, 100) == [0.0625, 16.0]  # all guess
    assert beyond({**found, 16.0: 40.0, 64.0: 50.0}, 100) == []  # as far as it goes


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_tuning_takes_the_best_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = example("tune_rivals")
    monkeypatch.setitem(tune.FEWER, "stream.train_per_class", 8)
    file, rates = tmp_path / "tuned.json", tmp_path / "rates.yaml"
    options = ["--set", "device=cpu", "training.passes=1", "stream.transforms.image_size=16"]
    given = ["--out", str(tmp_path / "runs"), "--json", str(file), "--rates", str(rates), "--only", "frozen", *options]

    def tuned() -> dict:
        tune.main([*given, "--merge"])
        return json.loads(file.read_text())["rows"]["frozen"]

    def accuracy(folder: Path, images: int) -> float:
        stream = yaml.safe_load((folder / "config.yaml").read_text())["stream"]
        assert (stream["validation"], stream["train_per_class"]) == (0.1, images)
        return round(100 * json.loads((folder / "results.json").read_text())["metrics"]["final_accuracy_tasks"], 2)

    for part in ("1/2", "2/2"):
        tune.main([*given, "--part", part])
    row, name = tuned(), "fashion-mnist-small-5-frozen-vit_nano-times-{:g}-0"
    tried = {factor: row[tune.column(factor)] for factor in rivals.FACTORS}
    for factor, value in tried.items():
        assert value == accuracy(tmp_path / "runs" / name.format(factor), 8)
    assert not rivals.rates(rates) and row["chosen"] == "1"  # few images do not decide

    tune.main([*given, "--confirm"])
    row, two = tuned(), tune.finalists(tried, 10)
    full = {factor: accuracy(tmp_path / "runs" / "full" / name.format(factor), 200) for factor in two}
    assert row["full"] == {f"{factor:g}": value for factor, value in full.items()}
    assert rivals.rates(rates) == {"frozen": tune.best(full)} and row["chosen"] == f"{tune.best(full):g}"

    other = {**row, "what": "`other`"}
    file.write_text(json.dumps({"rows": {"other": other, "frozen": other}}))
    assert tuned() == row and json.loads(file.read_text())["rows"]["other"] == other
    assert "| `frozen` |" in with_tables("<!-- table: tuned.json rates -->\n<!-- end -->", tmp_path)

    # From a file of another day, in which the largest factor is the best: only the next is trained.
    given[1] = str(tmp_path / "later")
    file.write_text(json.dumps({"rows": {"frozen": {**row, "4 times": 99.0, "16 times": 98.0}}}))
    tune.main([*given, "--extend"])
    assert not (tmp_path / "later").exists()  # 16 times is worse
    file.write_text(json.dumps({"rows": {"frozen": {**row, "4 times": 99.0}}}))
    tune.main([*given, "--extend"])
    assert [path.name for path in (tmp_path / "later").iterdir()] == [name.format(16)]
    assert {"0.25 times", "1 times", "4 times", "16 times"} <= set(tuned())
    columns = json.loads(file.read_text())["tables"]["rates"]["columns"]
    assert columns == ["0.25 times", "1 times", "4 times", "16 times", "chosen"]

    # A loss that is not finite ends one run, not the search, and no second search tries it again.
    given[1] = str(tmp_path / "diverging")
    given.append("stream.transforms.std=[1e-38,1e-38,1e-38]")
    file.write_text(json.dumps({"rows": {"frozen": {**row, "4 times": 99.0}}}))
    for _ in range(2):
        tune.main([*given, "--extend"])
    assert tuned()["16 times"] == 0.0


@pytest.mark.long
def test_every_row_runs_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fewer_test_images(2):
        assert main([*NANO, "--out", str(tmp_path), "--keep", "results"]) == 0
    made = json.loads((tmp_path / "nano" / "paper-main.json").read_text())
    assert {run["method"] for run in made["runs"].values()} == {run.method for run in planned("main", "nano")}
    text = capsys.readouterr().out
    assert all(one.row in text and "no run given" not in text for one in rivals.rows())
    lgcl = next(row for name, row in made["rows"].items() if name.startswith("LGCL"))
    assert lgcl["what"] == f"LGCL ({rivals.STAND_IN})"
