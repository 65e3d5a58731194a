"""Completion in the shell: the words, and the scripts in real shells where there are any."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mambacl.cli import COMMANDS, main
from mambacl.cli.completion import SCRIPTS, candidates
from mambacl.config import preset_names
from mambacl.options import is_group, is_mapping, walk
from mambacl.pretraining import PretrainConfig


def completed(*words: str) -> list[str]:
    return candidates(COMMANDS, words)


def test_commands() -> None:
    assert completed("tr") == ["train"] and completed("mod") == ["models"]
    assert {name.split()[0] for name in COMMANDS} <= set(completed(""))
    assert completed() == completed("")
    assert completed("data", "") == ["list", "prepare", "check", "show", "--help"]
    assert completed("bench", "ag") == ["against"] and completed("bench", "sc") == ["scan"]
    assert completed("nonsense", "") == [] and completed("data", "nonsense", "") == []


def test_presets_models_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed("train", "demo") == [name for name in preset_names() if name.startswith("demo")]
    assert completed("train", "--overwrite", "ima") == completed("train", "ima") != []
    assert completed("train", "demo", "d") == []  # takes one preset
    assert {"demo", "vim_tiny"} <= set(completed("plan", "")) and "demo" not in completed("pretrain", "")
    assert "nano-8" in completed("bench", "scan", "--shape", "nano")
    assert completed("paper", "ab") == ["ablation"]
    assert completed("completion", "") == ["bash", "zsh", "fish", "--help"]
    for name in ("b", "a", "with space"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    (tmp_path / "runs" / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    assert completed("report", "runs") == [str(Path("runs") / "a"), str(Path("runs") / "b")]
    assert completed("report", str(Path("runs") / "a"), "runs") == completed("report", "runs")  # takes several
    assert completed("evaluate", "runs/a", "runs") == []


def test_options_and_their_values() -> None:
    assert completed("train", "demo", "--training.opt") == ["--training.optimizer"]
    assert completed("train", "demo", "--comp") == ["--compare"]
    assert completed("resume", "--") == ["--device", "--root", "--gpus", "--quiet", "--import", "--help"]
    assert completed("train", "--training.optimizer", "") == ["adam", "adamw", "sgd"]
    assert completed("train", "--training.optimizer=ad") == ["--training.optimizer=adam", "--training.optimizer=adamw"]
    assert completed("train", "--training.optimizer", "=", "sg") == ["sgd"]  # what bash makes of it
    assert completed("train", "--training.optimizer", "=") == ["adam", "adamw", "sgd"]
    assert "mamba-cl" in completed("train", "--method", "m") and "ridge" in completed("train", "--classifier", "r")
    assert completed("train", "--backbone", "defocus_mamba_n") == ["defocus_mamba_nano"]
    assert completed("train", "--backbone", "demo") == [] and completed("train", "--fast", "") == ["true", "false"]
    assert completed("tune", "demo", "--metric", "final") == ["final_accuracy_tasks", "final_accuracy_images"]
    assert completed("sweep", "--engine", "") == ["local", "ray", "slurm"]
    assert completed("train", "--stream.root", "") == []  # the shell completes the path
    assert completed("train", "--help", "tra") == ["training"] and completed("models", "--help", "") == []
    known = completed("pretrain", "--")
    for name, option in walk(PretrainConfig):
        assert (f"--{name}" in known) != (is_group(option.kind) or is_mapping(option.kind)), name


def test_the_program_answers_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["__complete", "train", "--training.optimizer", "s"]) == 0
    assert capsys.readouterr().out == "sgd\n"
    for shell, script in SCRIPTS.items():
        assert main(["completion", shell]) == 0 and capsys.readouterr().out == script


def in_shell(shell: str, text: str, folder: Path) -> list[str]:
    """The words that a script prints, in a shell that finds this package as `mambacl`."""
    program = folder / "bin" / "mambacl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mambacl "$@"\n')
    program.chmod(0o755)
    variables = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [shell, "-c", text], cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash(tmp_path: Path) -> None:
    """Loads the script, and calls what bash would call when the tab key is pressed."""
    text = """
eval "$(mambacl completion bash)"
complete -p mambacl
press() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _mambacl mambacl "${!#}"; echo "${COMPREPLY[@]}" "|"; }
press mambacl tr
press mambacl train demo-vi
press mambacl train demo --training.optimizer = ad
press mambacl train demo --stream.root ""
"""
    found = " ".join(in_shell("bash", text, tmp_path))
    assert found == ("complete -o default -F _mambacl mambacl train | demo-vim | adam adamw | |"), (
        "the second line is what bash was told"
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    text = """
mambacl completion fish | source
complete -C "mambacl tr"
complete -C "mambacl train demo --training.optimizer=ad"
complete -C "mambacl train demo --training.optimizer s"
complete -C "mambacl train demo --stream.root ph"
"""
    expected = ["train", "--training.optimizer=adam", "--training.optimizer=adamw", "sgd", "photos/"]
    assert in_shell("fish", text, tmp_path)[: len(expected)] == expected  # fish can describe a path


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_can_read_its_script(tmp_path: Path) -> None:
    """Its completion runs only in a terminal, so this is the syntax alone."""
    (tmp_path / "script").write_text(SCRIPTS["zsh"])
    subprocess.run(["zsh", "-n", str(tmp_path / "script")], check=True, timeout=60)
