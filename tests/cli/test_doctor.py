"""The command doctor: how findings are printed, and the exit code."""

import json

import pytest

from mambacl.cli import main
from mambacl.cli.doctor import lines, show, verdict
from mambacl.diagnosis import CHECKS, Finding
from mambacl.ops import cpu

OK = Finding("Python", "version", "ok", "3.11")
SLOW = Finding("PyTorch", "load", "slow", "12.0 on 2 cores", "wait for other programs")
MISSING = Finding("Extras", "bench", "missing", "not installed: onnx>=1.16", "pip install 'mambacl[bench]'")
BROKEN = Finding("Extras", "other", "broken", "word " * 40, "remedy " * 30)


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_findings_are_printed_by_group_with_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(iter([OK, SLOW, MISSING, BROKEN])) == [OK, SLOW, MISSING, BROKEN]
    printed = capsys.readouterr().out
    assert printed.startswith(
        "\nPython\n"
        "  ok      version: 3.11\n"
        "\nPyTorch\n"
        "  slow    load: 12.0 on 2 cores\n"
        "          -> wait for other programs\n"
        "\nExtras\n"
        "  missing bench: not installed: onnx>=1.16\n"
        "          -> pip install 'mambacl[bench]'\n"
        "  broken  other: word word"
    )
    assert printed.endswith("\n\n1 broken, 1 slow, 1 missing; fix what is broken first.\n")


def test_long_lines_are_wrapped() -> None:
    made = lines(BROKEN)
    assert len(made) > 3 and all(len(line) <= 100 for line in made)
    assert all(line.startswith(" " * 10) for line in made[1:])
    assert " ".join(" ".join(made).split()) == f"broken other: {'word ' * 40}-> {'remedy ' * 30}".strip()


def test_the_verdict() -> None:
    assert verdict([OK]) == "Everything works."
    assert verdict([OK, SLOW, MISSING]) == "1 slow, 1 missing; everything else works."


def test_the_command_prints_what_it_found_as_json_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cpu.ENVIRONMENT_VARIABLE, raising=False)
    code = main(["doctor"])
    text = capsys.readouterr().out
    assert code == main(["doctor", "--json"])
    made = json.loads(capsys.readouterr().out)
    assert code == int(any(finding["status"] == "broken" for finding in made["findings"]))
    assert text.startswith(made["system"]) and all(f"\n{group}\n" in text for group in CHECKS)
    assert all(f"  {finding['status']:8}{finding['name']}: " in text for finding in made["findings"]
               if finding["name"] != "load")  # fmt: skip


@pytest.mark.skipif(not cpu.built(), reason="the C++ scan is not built")
def test_something_broken_gives_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cpu.ENVIRONMENT_VARIABLE, "altivec")
    assert main(["doctor"]) == 1
    assert "broken  library: MAMBACL_CPU=altivec does not run here" in " ".join(capsys.readouterr().out.split("\n"))
