"""The command line as a user meets it."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
import yaml
from cli_help import fails
from small_run import CONFIG

import mambacl
from mambacl.cli import SPINS, main


def write_config(folder: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def test_threads_spin_for_a_moment_and_not_at_all_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(variable, "")  # so that it is what it was afterwards
        monkeypatch.delenv(variable)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)

    def chosen(load: float | None, **variables: str) -> tuple[str | None, str | None]:
        def measured() -> tuple[float, float, float]:
            if load is None:
                raise OSError("Load averages are unobtainable")
            return load, 0.0, 0.0

        monkeypatch.setattr(os, "getloadavg", measured, raising=False)
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert main(["evaluate", "no such folder"]) == 2
            return os.environ.pop("OMP_WAIT_POLICY", None), os.environ.pop("GOMP_SPINCOUNT", None)

    assert chosen(1.9) == (None, SPINS)
    assert chosen(2.1) == ("passive", None)
    assert chosen(9.0, OMP_WAIT_POLICY="active") == ("active", None)
    assert chosen(9.0, GOMP_SPINCOUNT="7") == (None, "7")
    assert chosen(None) == (None, SPINS)  # a system that does not know its load is not a busy one


def test_a_wrong_backend_is_not_blamed_on_the_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAMBACL_SCAN", "fastest")
    sentence = fails(capsys, "train", str(write_config(tmp_path)), "--out", str(tmp_path / "run"))
    assert "no scan backend 'fastest'" in sentence and "image_size" not in sentence


@pytest.mark.slow
def test_a_whole_session(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(write_config(tmp_path))
    assert main(["train", config, "--compare", "sequential", "--training.passes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "mamba-cl" in printed and "sequential" in printed and "forgetting" in printed
    page = Path(printed.strip().splitlines()[-1].removeprefix("Report: "))
    assert page == Path("runs/small-comparison-0/report.html") and page.is_file()
    for method in ("mamba-cl", "sequential"):
        results = json.loads(Path(f"runs/small-{method}-0/results.json").read_text())
        assert results["status"] == "finished" and results["method"] == method
        assert Path(f"runs/small-{method}-0/report.html").is_file()
    assert list(Path("runs/small-mamba-cl-0/figures").glob("*.png"))

    assert main(["evaluate", "runs/small-mamba-cl-0", "--batch-size", "64"]) == 0
    assert "The run recorded the same counts." in capsys.readouterr().out
    assert main(["resume", "runs/small-mamba-cl-0"]) == 0
    capsys.readouterr()
    assert main(["train", config, "--training.passes", "1", "--seed", "1"]) == 0
    capsys.readouterr()
    runs = ["runs/small-mamba-cl-0", "runs/small-mamba-cl-1", "runs/small-sequential-0"]
    assert main(["report", *runs, "--out", "compared", "--format", "latex"]) == 0
    assert "toprule" in capsys.readouterr().out
    assert Path("compared/report.html").is_file() and "±" in Path("compared/table.md").read_text()
    assert "differs in training.passes" in fails(capsys, "train", config)


@pytest.mark.slow
def test_out_is_the_folder_of_all_compared_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--method", "frozen", "--compare", "sequential,frozen", "--out", "mine", "--training.passes=1"]
    assert main(["train", str(write_config(tmp_path)), *options]) == 0
    assert sorted(path.name for path in Path("mine").iterdir()) == ["frozen", "sequential", "small-comparison-0"]
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_several_seeds_give_means_and_deviations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--training.passes=1", "--stream.tasks=[5,5]", "--seeds", "1,4"]
    options += ["--method", "frozen", "--compare", "sequential"]
    config = str(write_config(tmp_path))
    assert main(["train", config, *options]) == 0
    made = {f"small-{method}-{seed}" for method in ("frozen", "sequential") for seed in (1, 4)}
    assert {path.name for path in Path("runs").iterdir()} == {*made, "small-comparison-1-4"}
    printed = capsys.readouterr().out
    for method in ("frozen", "sequential"):
        row = next(line for line in printed.splitlines() if line.startswith(method))  # a narrow table is in parts
        assert "±" in row
    assert main(["train", config, *options[:-2], "--out", "mine"]) == 0
    assert {path.name for path in Path("mine").iterdir()} == {"frozen-1", "frozen-4", "small-comparison-1-4"}


EARLY: list[tuple[list[str], str]] = [  # refused before PyTorch is loaded
    (["trian"], "There is no command 'trian'. Did you mean 'train'?"),
    (["train"], "Name what to train"),
    (["train", "dem"], "'dem' is neither a preset nor a file. Did you mean 'demo'?"),
    (["train", "demo", "--training.lrr", "1"], "no option '--training.lrr'. Did you mean '--training.lr'?"),
    (["train", "demo", "--training.lr", "fast"], "training.lr takes a number, got 'fast'"),
    (["train", "demo", "--training.lr"], "The option --training.lr needs a value: a number."),
    (["train", "demo", "--method", "mamba"], "no method 'mamba'. Did you mean"),
    (["train", "demo", "--compare", "sequentiel"], "no method 'sequentiel'. Did you mean 'sequential'?"),
    (["train", "demo", "--seeds", "3"], "--seeds takes the seeds of several runs, as in 0,1,2, got '3'; --seed takes"),
    (["train", "demo", "--seeds", "0,one"], "--seeds takes the seeds of several runs"),
    (["train", "demo", "--seeds", "0,1", "--seed", "2"], "--seed and --seeds exclude each other: remove one."),
    (["train", "demo", "--stream.transforms.mean", "[0.5]"], "mean must be three numbers"),
    (["train", "demo", "--lr", "1"], "no option '--lr'. Did you mean '--training.lr'?"),
    (["train", "demo", "--learning-rate", "3"], "no option '--learning-rate'. Did you mean '--training.lr'?"),
    (["train", "demo", "--training.epochs", "3"], "no option '--training.epochs'. Did you mean '--training.passes'?"),
    (["train", "demo", "--training.lr", "nan"], "training.lr takes a number, got 'nan'."),
    (["train", "demo", "--training", "5"], "The option '--training' is a group"),
    (["train", "demo", "--training.lr", ".inf"], "training.lr must be finite and at least 0"),
    (["train", "demo", "--nullspace.rank", "energy"], "needs a share between 0 and 1, as in energy:0.99"),
    (["train", "demo", "--backbone_options.num_classes", "5"], "backbone_options cannot contain 'num_classes'"),
    (["resume", "nowhere"], "is not a run folder"),
    (["resume"], "mambacl resume needs RUN, a run folder"),
    (["evaluate", "nowhere"], "is not a run folder"),
    (["models", "--all"], "There is no option '--all'"),
]
LATE: list[tuple[list[str], str]] = [
    (["train", "demo", "--backbone", "resnet"], "no model 'resnet'"),
    (["train", "demo", "--pretrained", "weights.pth"], "weights.pth; give the path"),
    (["train", "demo", "--pretrained", "tin64"], "'defocus_mamba_nano' has no weights 'tin64': its weights are tin32-"),
    (["train", "demo", "--stream.dataset", "mnist"], "no data set 'mnist'"),
    (["train", "demo", "--stream.dataset", "cifar100"], "needs stream.root"),
    (["train", "demo", "--options.x", "1"], "analytic: there is no option 'x'"),
    (["train", "demo", "--method", "mamba-cl", "--nullspace.blocks", "[40]"], "does not fit a model of 12 blocks"),
    (
        ["train", "demo", "--classifier", "separate"],
        "'analytic' trains nothing, but the classifier 'separate' has to be",
    ),
    (["train", "demo", "--method", "lwf", "--features.depths", "all"], "set features.depths to final"),
    (["train", "demo", "--features.depths", "[40]"], "depths = [40] does not fit a model of 12 depths"),
    (["train", "demo", "--features.depths", "some"], "features.depths must be auto, final, all, a number"),
    (["train", "demo", "--features.pool", "[max]"], "features.pool must be a list of class, mean, std, quadrants"),
    (["train", "demo", "--features.mirror", "yes"], "features.mirror takes one of none, learning, both, got 'yes'"),
    (["train", "demo", "--stream.transforms.image_size", "30"], "do not divide into patches"),
    (["train", "demo", "--stream.order", "pilot", "--stream.order_seed", "-1"], "order_seed must be between"),
    (["train", "demo", "--backbone_options.patch_size", "0"], "patch_size must be positive"),
    (["train", "demo", "--out", "/dev/null/run"], "Not a directory"),
    (["report", "nowhere"], "nowhere"),
    (["convert", "missing.pth", "out.safetensors"], "no weights file missing.pth"),
    (["convert", "missing.pth", "out.bin"], "must end in .safetensors"),
]


@pytest.mark.parametrize(("arguments", "sentence"), [*EARLY, *LATE])
def test_mistakes_get_one_sentence_and_exit_code_2(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in fails(capsys, *arguments)
    assert not any(tmp_path.iterdir())  # and nothing is left behind


def test_listings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0 and main(["models"]) == 0
    printed = capsys.readouterr().out
    for word in ("mamba-cl", "sequential", "frozen", "defocus_mamba_nano", "defocus_mamba_large_22k"):
        assert f"\n{word} " in printed
    assert "the paper says 91.7" in printed
    assert main(["models", "vim_tiny"]) == 0
    listed = capsys.readouterr().out
    assert "\nvim_tiny                        7.15 M  224    3.11  in1k     76.1  ImageNet-1k, Apache-2.0," in listed
    assert "mambavision" not in listed and "91.7" not in listed
    assert "No model's name contains 'vim_tyny'. Did you mean 'vim_tiny'?" in fails(capsys, "models", "vim_tyny")


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {"module.w": torch.ones(2)}, "epoch": 3}, tmp_path / "public.pth")
    assert main(["convert", str(tmp_path / "public.pth"), str(tmp_path / "safe.safetensors")]) == 0
    assert "Tensors written" in capsys.readouterr().out and (tmp_path / "safe.safetensors").is_file()


@pytest.mark.slow
def test_failure_in_the_middle_exits_1_and_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mambacl.methods.mamba_cl import MambaCL

    monkeypatch.chdir(tmp_path)
    config = str(write_config(tmp_path))

    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patched:
        patched.setattr(MambaCL, "finish_task", broken)
        assert main(["train", config]) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert "RuntimeError: out of luck" in message and "mambacl resume runs/small-mamba-cl-0" in message
    assert "in broken" in Path("runs/small-mamba-cl-0/error.log").read_text()
    assert json.loads(Path("runs/small-mamba-cl-0/results.json").read_text())["status"] == "failed"
    assert main(["resume", "runs/small-mamba-cl-0"]) == 0
    assert json.loads(Path("runs/small-mamba-cl-0/results.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_python_m_mambacl() -> None:
    done = subprocess.run([sys.executable, "-m", "mambacl", "methods"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "mamba-cl" in done.stdout


@pytest.mark.slow
def test_the_version_needs_no_installation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mambacl {mambacl.__version__}\n"

    def not_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", not_installed)
    assert main(["--version"]) == 0 and capsys.readouterr().out == "mambacl 0+unknown\n"


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys, mambacl; assert 'torch' not in sys.modules; mambacl.selective_scan; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
