"""The engines Ray and SLURM, with the real libraries: `make test-extras`."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli_help import fails
from sweeps_help import write_sweep

from mambacl.cli import main
from mambacl.errors import UserError
from mambacl.sweeps.engines import NEEDS, engine_options
from mambacl.sweeps.engines.base import Task

RAY, SUBMITIT = (pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}") for name in ("ray", "submitit"))


@pytest.mark.parametrize("engine", NEEDS)
def test_a_missing_extra_is_one_sentence(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mambacl.sweeps.engines.find_spec", lambda name: None)
    said = fails(capsys, "sweep", str(write_sweep(tmp_path)), "--engine", engine)
    assert said == f"mambacl: --engine {engine} needs {NEEDS[engine]}: pip install 'mambacl[{engine}]'."


def test_words_become_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mambacl.sweeps.engines.find_spec", lambda name: name)
    words = ["num_gpus=0.5", "address=ray://head:1", "mem_gb=12"]
    assert engine_options("ray", {"ray": words, "slurm": []}) == {
        "num_gpus": 0.5, "address": "ray://head:1", "mem_gb": 12,
    }  # fmt: skip
    with pytest.raises(UserError, match="--slurm takes NAME=VALUE, got 'gpu'"):
        engine_options("slurm", {"slurm": ["gpu"]})
    with pytest.raises(UserError, match="--slurm is for the engine slurm"):
        engine_options("local", {"slurm": ["partition=gpu"]})


def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[dict]:
    monkeypatch.chdir(tmp_path)
    path = write_sweep(tmp_path, seeds=[0, 1])
    assert main(["sweep", str(path), *words]) == 0
    assert Path("runs/few/comparison/report.html").is_file()
    return json.loads(Path("runs/few/sweep.json").read_text())["runs"]


@pytest.mark.extras
@pytest.mark.long
@RAY
def test_ray_trains_on_two_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = swept(tmp_path, monkeypatch, "--engine", "ray", "--jobs", "2", "--ray", "num_cpus=1")
    assert [(run["state"], run["attempts"]) for run in runs] == [("finished", 1), ("finished", 1)]
    path = str(write_sweep(tmp_path, seeds=[0, 1, 2]))
    assert "--ray: " in fails_quietly(capsys, "sweep", path, "--engine", "ray", "--ray", "num_gpus=none")


@pytest.mark.extras
@pytest.mark.long
@RAY
def test_ray_tells_how_a_task_ends_and_can_stop_it(tmp_path: Path) -> None:
    import time

    from mambacl.sweeps.engines.ray import open_engine

    engine = open_engine(2, {}, tmp_path, on_cpu=True)
    try:

        def start(code: str):
            return engine.start(Task("one", ("-c", code), str(tmp_path / "log"), str(tmp_path)))

        ended, slow = start("print('hello'); raise SystemExit(3)"), start("import time; time.sleep(600)")
        assert wait_for(ended).code == 3 and (tmp_path / "log").read_text() == "hello\n"
        time.sleep(1)
        assert slow.ending() is None
        slow.stop()
        assert wait_for(slow).code != 0
    finally:
        engine.close()


@pytest.mark.extras
@pytest.mark.long
@SUBMITIT
def test_submitits_own_executor_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = ["--engine", "slurm", "--slurm", "cluster=local"]
    runs = swept(tmp_path, monkeypatch, *local, "--jobs", "2", "--slurm", "timeout_min=20")
    assert [(run["state"], run["attempts"]) for run in runs] == [("finished", 1), ("finished", 1)]
    assert len(list(Path("runs/few/.jobs").glob("*_submitted.pkl"))) == 2
    path = str(write_sweep(tmp_path, seeds=[0, 1, 2]))
    assert "Unknown argument 'colour'" in fails_quietly(capsys, "sweep", path, *local, "--slurm", "colour=red")


@pytest.mark.extras
@pytest.mark.slow
@SUBMITIT
def test_jobs_of_submitit_tell_how_they_end(tmp_path: Path) -> None:
    from mambacl.sweeps.engines.slurm import open_engine

    engine = open_engine(None, {"cluster": "local"}, tmp_path, on_cpu=True)
    task = Task("one", ("-c", "raise SystemExit(3)"), str(tmp_path / "log"), str(tmp_path))
    assert engine.slots == 1 and wait_for(engine.start(task)).code == 3
    broken = Task("two", ("-c", ""), str(tmp_path / "log"), str(tmp_path / "nowhere"))
    ending = wait_for(engine.start(broken))
    assert ending.code == 1 and ending.words.startswith("job ")


@pytest.mark.extras
@SUBMITIT
def test_a_job_that_is_refused_has_failed(tmp_path: Path) -> None:
    from mambacl.sweeps.engines.slurm import open_engine

    engine = open_engine(None, {"cluster": "local"}, tmp_path, on_cpu=True)
    (tmp_path / ".jobs").rename(tmp_path / "moved")
    (tmp_path / ".jobs").write_text("a file where submitit has its folder")
    ending = wait_for(engine.start(Task("one", ("-c", ""), str(tmp_path / "log"), str(tmp_path))))
    assert ending.code == 1 and ending.words.startswith("the job was refused: ")


@pytest.mark.extras
@SUBMITIT
def test_without_slurm_the_engine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mambacl.sweeps.engines.slurm import open_engine

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="There is no SLURM on this machine"):
        open_engine(None, {"partition": "gpu"}, tmp_path, on_cpu=True)


def wait_for(handle):
    import time

    until = time.monotonic() + 120
    while (ending := handle.ending()) is None:
        assert time.monotonic() < until
        time.sleep(0.1)
    return ending


def fails_quietly(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line on standard error of a call that exits with 2, after lines of the libraries."""
    capsys.readouterr()
    assert main(arguments) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]
