"""`--import FILE`: what a user's script registers, on the command line."""

import sys
from pathlib import Path

import pytest
import yaml
from cli_help import fails
from small_run import CONFIG

from mambacl.cli import main
from mambacl.methods.registry import METHODS

SCRIPT = """
import helper_of_mine
from mambacl.methods.frozen import Frozen
from mambacl.methods.registry import METHODS

class Mine(Frozen):
    name = helper_of_mine.NAME
    summary = "registered in a script"

METHODS.add(Mine.name, Mine)
if __name__ == "__main__":
    raise SystemExit("This part is only for `python FILE`.")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_a_method_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("helper_of_mine.py").write_text('NAME = "mine"')
    Path("my_method.py").write_text(SCRIPT)
    Path("small.yaml").write_text(yaml.safe_dump({**CONFIG, "method": "mine"}))
    try:
        assert "no method 'mine'" in fails(capsys, "train", "small.yaml")
        train = ["train", "small.yaml", "--training.passes", "1", "--import", "my_method.py"]
        assert main(train) == 0 and main([*train, "--seed", "1"]) == 0
        with monkeypatch.context() as another_process:
            another_process.delitem(METHODS._entries, "mine")
            sentence = fails(capsys_cleared(capsys), "evaluate", "runs/small-mine-0")
            assert "no method 'mine'" in sentence and sentence.endswith("add --import FILE.")
            another_process.delitem(sys.modules, "my_method")
            assert main(["evaluate", "runs/small-mine-0", "--import", "my_method.py"]) == 0
            assert "The run recorded the same counts." in capsys.readouterr().out
            METHODS._entries.pop("mine")
    finally:
        METHODS._entries.pop("mine", None)
        for name in ("my_method", "helper_of_mine"):
            sys.modules.pop(name, None)


def capsys_cleared(capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    capsys.readouterr()
    return capsys


def test_files_that_cannot_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("faulty.py").write_text("import no_such_package_of_mine")
    Path("notes.txt").write_text("not Python")
    for file, words in (
        ("missing.py", "There is no file missing.py to import"),
        ("faulty.py", "faulty.py cannot be imported (ModuleNotFoundError: No module named 'no_such_package_of_mine')"),
        ("notes.txt", "notes.txt is not a Python file: its name must end in .py."),
    ):
        assert words in fails(capsys, "train", "demo", "--import", file)
    assert "faulty" not in sys.modules
