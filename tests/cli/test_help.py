"""The help of commands and of groups of options."""

import dataclasses

import pytest

from mambacl.cli import COMMANDS, main
from mambacl.config import RunConfig, preset_names
from mambacl.options import is_group, walk
from mambacl.pretraining import PretrainConfig

SCREEN = 40  # lines


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120
    return out


def test_the_help_of_train_fits_a_screen_and_names_every_group_and_preset(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "train", "--help")
    assert len(text.splitlines()) <= 30
    for group in (
        "run",
        "nullspace",
        "nullspace.W_delta",
        "training",
        "stream",
        "stream.transforms",
        "options",
        "features",
    ):
        assert f"\n  {group} " in text
    assert "\n  options             the method's options; also backbone_options, classifier_options\n" in text
    assert all(name in text for name in preset_names())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_of_one_screen_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, *command.split(), "--help")
    assert text.startswith(f"usage: mambacl {command}") and len(text.splitlines()) <= SCREEN
    assert all(f"  {option}" in text for option in COMMANDS[command].options)
    example = COMMANDS[command].example
    assert f"\nexample: {example}\n" in text and "`" not in COMMANDS[command].summary
    program, *words = example.split()
    assert program == "mambacl" and words[: len(command.split())] == command.split()
    COMMANDS[command].read(words[len(command.split()) :])  # refuses options that do not exist


def test_the_list_of_commands_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help")
    assert len(text.splitlines()) <= SCREEN and "example: mambacl train demo" in text
    for name in COMMANDS:
        first = name.split()[0]
        assert f"\n  {name} " in (text if first == name or first not in COMMANDS else printed(capsys, first, "--help"))
    assert "\n  data check " in printed(capsys, "data", "--help")


def test_mambacl_alone_names_commands_to_begin_with(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    named = [line.split()[1:] for line in text.splitlines() if line.startswith("  mambacl ")]
    assert [words[0] for words in named] == ["doctor", "train", "train", "report"] and len(text.splitlines()) <= 24
    for name, *words in named:
        COMMANDS[name].read(words)
    assert {words[1] for words in named if words[0] == "train"} <= set(preset_names())


def test_the_help_of_bench_names_its_parts_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    from mambacl.bench import PARTS, SHAPES

    text = printed(capsys, "bench", "--help")
    assert all(name in text for name in (*PARTS, *SHAPES))


def test_a_group_is_listed_with_types_defaults_and_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "train", "--help", "training")
    assert "  --training.optimizer one of adam, adamw, sgd (default adam)\n      adam adds L2" in text
    assert "  --training.passes a whole number, must be at least 1 (default 50)\n      passes over" in text
    assert "--seed" not in text and "nullspace" not in text
    assert "(default false)" in printed(capsys, "train", "--help", "nullspace.W_dt")  # that kind's, not a rule's
    assert printed(capsys, "train", "demo", "--help", "stream.transforms").startswith("stream.transforms: How images")
    assert printed(capsys, "paper", "eta", "--help", "seed").startswith("  --seed a whole number")


def test_all_options_of_a_run_are_listed_and_each_has_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "train", "--help", "all")
    lines = text.splitlines()
    for name, option in walk(RunConfig):
        if is_group(option.kind):
            assert f"\n{name}: " in text
            continue
        place = next(number for number, line in enumerate(lines) if line.startswith(f"  --{name} "))
        assert lines[place + 1].startswith("      "), name


def test_a_command_with_other_options_lists_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "pretrain", "--help")
    assert len(text.splitlines()) <= 24 and "\n  stream.transforms " in text and "nullspace" not in text
    text = printed(capsys, "pretrain", "--help", "all")
    for name, option in walk(PretrainConfig):
        assert f"\n{name}: " in text if is_group(option.kind) else f"  --{name} " in text, name
    assert "(default folders)" in printed(capsys, "pretrain", "--help", "stream")  # its own default
    assert main(["pretrain", "--stream", "x"]) == 2 and "`mambacl pretrain --help stream`" in capsys.readouterr().err
    assert main(["pretrain", "--training.lr", "1"]) == 2 and "Did you mean '--lr'?" in capsys.readouterr().err


def test_the_options_of_a_method_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    from mambacl.methods import METHODS

    text = printed(capsys, "train", "--method", "ease", "--help", "options")
    fields = [field.name for field in dataclasses.fields(METHODS.get("ease").options_class)]
    assert fields and all(f"--options.{name} " in text for name in fields) and "mamba-cl" not in text
    assert "mamba-cl" in printed(capsys, "train", "--help", "options")
    text = printed(capsys, "train", "--backbone", "vim_tiny", "--help", "backbone_options")
    assert "vim_tiny:" in text and "--backbone_options.embed_dim a whole number (default 192)" in text
    assert "--backbone_options.mamba.state_size" in printed(capsys, "train", "--help", "backbone_options")


def test_a_wrong_group_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "trainin"]) == 2
    assert "There is no group of options 'trainin'. Did you mean 'training'?" in capsys.readouterr().err
