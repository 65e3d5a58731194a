"""The runs that a sweep's file describes, and what is wrong with one, without training any."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cli_help import fails
from sweeps_help import write_sweep

from mambacl.cli import main
from mambacl.config import preset_names, resolve
from mambacl.errors import UserError
from mambacl.methods.registry import METHODS
from mambacl.sweeps.plan import label_of, read


def keys(folder: Path, **content: object) -> list[str]:
    return [run.key for run in read(write_sweep(folder, **content), {}).runs]


def test_methods_seeds_and_options_are_multiplied(tmp_path: Path) -> None:
    grid = {"training.lr": [1e-3, 0.1], "features": {"pool": [["class"], ["class", "mean"]]}}
    options = {"training.passes": 2, "for_method": {"frozen": {"training.passes": 4}}}
    path = write_sweep(tmp_path, methods=["frozen", "sequential"], seeds=[3, 4], grid=grid, options=options)
    plan = read(path, {"precision": "float32"})
    assert len(plan.runs) == 2 * 2 * 2 * 2 and plan.folder == Path("runs/few")
    first = plan.runs[0]
    assert first.key == "small-frozen-lr=0.001-pool=class-3" and first.folder == Path("runs/few") / first.key
    assert (first.config.training.lr, first.config.training.passes, first.config.seed) == (1e-3, 4, 3)
    assert plan.runs[-1].key == "small-sequential-lr=0.1-pool=class+mean-4"
    assert plan.runs[-1].config.features.pool == ["class", "mean"] and plan.runs[-1].config.training.passes == 2
    assert all(run.config.precision == "float32" and run.config.name == "small" for run in plan.runs)


def test_further_runs_have_their_own_options(tmp_path: Path) -> None:
    runs = [{"method": "frozen"}, {"preset": "demo", "seed": 9, "classifier_options.width": 30}]
    assert keys(tmp_path, seeds=[0, 1], runs=runs) == ["small-frozen-0", "small-frozen-1", "demo-analytic-width=30-9"]
    both = keys(tmp_path, methods=["analytic"], runs=runs)
    assert both == ["small-analytic-0", "small-frozen-0", "demo-analytic-width=30-9"]
    assert keys(tmp_path, runs=[{"method": "frozen"}, {"method": "frozen"}]) == ["small-frozen-0"]
    [run] = read({"runs": [{"preset": "demo"}]}, {}, tmp_path / "here").runs
    assert run.folder == tmp_path / "here" / "demo-analytic-0"


def test_a_run_has_the_complete_options_whatever_is_read_again(tmp_path: Path) -> None:
    """A run is given its configuration as a file; it must mean the same there."""
    for preset in preset_names():
        for method in ("analytic", "mamba-cl", "sequential"):
            config = resolve(preset, {"method": method, "stream": {"validation": 0.3}, "out": str(tmp_path)})
            path = tmp_path / "options.yaml"
            path.write_text(config.as_yaml())
            assert resolve(path, {}) == config


def test_the_recorded_file_gives_the_same_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [{"preset": "small.yaml", "method": "frozen"}]
    plan = read(write_sweep(tmp_path, grid={"training.lr": [1, 2]}, runs=runs), {"training": {"passes": 7}})
    folder = tmp_path / "elsewhere" / "few"
    folder.mkdir(parents=True)
    (folder / "sweep.yaml").write_text(plan.text)
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = read("few", {})
    assert [run.key for run in again.runs] == [run.key for run in plan.runs] and again.folder == Path("few")
    assert [run.config.training for run in again.runs] == [run.config.training for run in plan.runs]


def test_names_of_runs_are_file_names_and_tell_runs_apart(tmp_path: Path) -> None:
    assert label_of({"a.lr": 1, "b.lr": 2.5}) == "-a.lr=1-b.lr=2.5"
    assert (
        label_of({"nullspace.rank": "energy:0.9", "fast": False, "order": None})
        == "-rank=energy-0.9-fast=false-order=null"
    )
    assert label_of({"root": "/data/a b"}) == "-root=data-a-b" and len(label_of({"x": "y" * 300})) < 20
    found = keys(tmp_path, grid={"stream.order_seed": [1], "training.lr": [1.0000001, 1.0000002]})
    assert len(set(found)) == 2 and all(key.startswith("small-analytic-order_seed=1-lr=1-0") for key in found)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"methodes": ["frozen"]}, "There is no option 'methodes'. Did you mean 'methods'?"),
        ({"methods": ["frozn"]}, "There is no method 'frozn'. Did you mean 'frozen'?"),
        ({"methods": "frozen"}, "methods takes a list of values, got 'frozen'."),
        ({"presets": ["dmo"]}, "'dmo' is neither a preset nor a file. Did you mean 'demo'?"),
        ({"presets": []}, "there are no presets, and so no runs: name some, as in `presets: [demo]`."),
        ({"seeds": [-1]}, "seeds must be whole numbers from 0 on, got [-1]."),
        ({"name": "a/b"}, "name must be a word of letters"),
        ({"grid": {"training.lr": 0.1}}, "grid.training.lr takes a list of values, got 0.1."),
        ({"grid": {"training.lrr": [0.1]}}, "There is no option 'training.lrr'. Did you mean 'training.lr'?"),
        ({"grid": {"training.lr": ["fast"]}}, "training.lr takes a number, got 'fast'."),
        ({"grid": {"seed": [1]}}, "grid cannot set seed: list them under seeds."),
        ({"options": {"out": "x"}}, "options cannot set out: the sweep has a folder per run."),
        ({"options": {"training.passes": 0}}, "training.passes must be at least 1, got 0."),
        ({"options": {"classifier": "rigde"}}, "There is no classifier 'rigde'. Did you mean 'ridge'?"),
        ({"options": {"training.lr": 1}, "grid": {"training": {"lr": [2]}}}, "training.lr is in grid, and also one of"),
        ({"runs": [{"methods": "frozen"}]}, "sweep.yaml, run 1 under runs: There is no option 'methods'."),
        ({"runs": [{"method": "frozen", "out": "x"}]}, "run 1 under runs cannot set out"),
        ({"presets": [], "runs": [{"method": "frozen"}]}, "run 1 under runs names no preset"),
    ],
)
def test_a_mistake_is_one_sentence(
    content: dict, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(tmp_path, **content)
    assert sentence in (said := fails(capsys, "sweep", str(path))) and str(path) in said
    assert not (tmp_path / "runs").exists()


def test_mistakes_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_sweep(tmp_path, grid={"training.lr": [1]}))
    assert "There is no file" in fails(capsys, "sweep", str(tmp_path / "none.yaml"))
    assert "cannot set seed: list them under seeds" in fails(capsys, "sweep", path, "--seed", "1")
    assert "training.lr is in grid" in fails(capsys, "sweep", path, "--training.lr", "1")
    assert "--ray is for the engine ray" in fails(capsys, "sweep", path, "--ray", "num_gpus=1")
    assert "--engine takes one of local, ray, slurm" in fails(capsys, "sweep", path, "--engine", "cloud")
    assert "--jobs must be at least 1" in fails(capsys, "sweep", path, "--jobs", "0")
    (tmp_path / "bad.yaml").write_text("presets: [demo")
    assert "bad.yaml, line 1 is not valid YAML" in fails(capsys, "sweep", str(tmp_path / "bad.yaml"))
    with pytest.raises(UserError, match="The sweep: there are no presets"):
        read({}, {})


def test_a_dry_run_lists_the_runs_and_needs_no_pytorch(tmp_path: Path) -> None:
    write_sweep(tmp_path, methods=["frozen", "analytic"], seeds=[0, 1])
    code = """
import sys
from mambacl.cli import main
assert main(["sweep", "sweep.yaml", "--dry-run"]) == 0
assert main(["tune", "small.yaml", "--search", "training.lr=1e-3,1e-2", "--dry-run"]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["small-frozen-0", "not", "started"],
        ["small-frozen-1", "not", "started"],
    ]
    assert lines[4] == f"Runs: 4, finished: 0. Folder: {Path('runs') / 'few'}"
    assert [line.split()[0] for line in lines[5:7]] == ["analytic-lr=0.001-0", "analytic-lr=0.01-0"]
    assert not (tmp_path / "runs").exists()


def test_options_that_only_pytorchs_modules_know_are_checked_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for options, sentence in (
        ({"options.widht": 3}, "small-analytic-0: analytic: there is no option 'widht'"),
        ({"classifier_options.widht": 3}, "small-analytic-0: ridge: there is no option 'widht'. Did you mean 'width'?"),
        ({"backbone_options.dept": 3}, "defocus_mamba: there is no option 'dept'. Did you mean 'depth'?"),
        ({"stream.dataset": "cifar100", "stream.root": "nowhere"}, "small-analytic-0: "),
        ({"device": "cuda:7"}, "set device to auto or cuda instead of cuda:7"),
    ):
        path = write_sweep(tmp_path, options=options)
        content = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump(content))
        assert main(["sweep", str(path)]) == 2
        assert sentence in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "runs").exists() and "analytic" in METHODS.known()
