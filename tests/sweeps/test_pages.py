"""What docs/sweeps.md shows."""

import contextlib
import functools
import io
from collections import Counter
from pathlib import Path

import pytest
import yaml
from docs_help import code, commands, words
from sweeps_help import QUICK, InProcess

import mambacl
from mambacl.cli import COMMANDS
from mambacl.sweeps import api, driver
from mambacl.sweeps.plan import read
from mambacl.sweeps.search import parse
from mambacl.sweeps.tune import ask, plan_of


def test_the_file_of_the_page_has_the_runs_that_it_says() -> None:
    [text] = code("sweeps.md", "yaml")
    plan = read(yaml.safe_load(text), {})
    assert plan.folder == Path("runs/rates")
    methods = Counter((run.config.name, run.config.method) for run in plan.runs)
    assert methods == {
        ("demo", "mamba-cl"): 6, ("demo", "sequential"): 6, ("demo", "analytic"): 3, ("demo-vim", "analytic"): 1,
    }  # fmt: skip


def test_the_searches_of_the_page_can_be_planned() -> None:
    calls = [words(line)[1:] for page, line in commands() if page == "sweeps.md" and line.startswith("mambacl tune")]
    counts = []
    for call in calls:
        [preset], given, overrides = COMMANDS["tune"].read(call)
        seeds = [int(seed) for seed in given.get("seeds", "0").split(",")]
        question = ask(preset, parse(given["search"]), overrides, seeds, trials=given.get("trials"))
        assert plan_of(question).folder == Path("runs/tune-demo-mamba-cl")
        counts.append(len(plan_of(question).runs))
    assert counts == [3 * 2 * 2, 20]


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [text] = code("sweeps.md")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "EVERY", 0.0)
    engine = InProcess()
    monkeypatch.setattr(api, "open_engine", lambda *_: engine)
    small = {name: QUICK[name] for name in ("backbone", "backbone_options", "pretrained", "stream", "device")}
    for name in ("sweep", "tune"):
        monkeypatch.setattr(mambacl, name, functools.partial(getattr(mambacl, name), **small), raising=False)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(text.replace("[1000, 2000]", "[5, 20]"), names := {})
    assert len(engine.started) == 4 and list(names["found"].runs) == engine.started[:2]
    assert names["tuned"].best.point["classifier_options.width"] in (5, 20)
    assert names["tuned"].options.is_file() and "report.html" in printed.getvalue()
