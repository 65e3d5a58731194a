"""The code of the README and of docs/ runs: every block does, here or in the test named below, or says why not.

Shell blocks run line by line in this process, in a folder with small images and a small run. Runs of presets are made
shorter by the options in SHORTER.
"""

import functools
import glob
import importlib.util
import io
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_help import fewer_test_images, write_images
from docs_help import BLOCKS, PAGES, SOURCE, code, commands, words
from small_run import CONFIG

import mambacl
from mambacl.cli import COMMANDS, main
from mambacl.cli.command import Command
from mambacl.config import resolve
from mambacl.options import REQUIRED

# Lines of shell blocks that do not run here: what they match, and why
NOT_RUN = {
    r"pip install|make demo": "needs a network",
    r"hf auth|mambacl (push|pull) ": "needs an account; tests/deploy/test_hub.py runs them against a server of its own",
    r"mambacl data prepare": "needs a network; tests/data/test_preparing.py",
    r"mambacl .*\b(imagenet-r|domainnet-s200|domainnet-345|cifar100)": "needs a data set that is not in the package",
    r"mambacl paper (main|ablation) --(scale|root)": "needs hours, or data; tests/paper runs the same design, smaller",
    r"python examples/(tune_rivals|drift)": "needs hours; tests/paper and tests/test_examples.py run them smaller",
    r"mambacl train images .*--stream.session_lists": "needs a protocol's lists; tests/data/test_few_shot.py",
    r"mambacl pretrain|mambacl train images .*--pretrained pretrained/": "needs minutes; tests/pretraining",
    r"mambacl (sweep|tune) ": "needs minutes; tests/sweeps reads the page's file and searches, and runs smaller ones",
    r"torchrun ": "starts several processes; tests/training/test_several_processes.py",
    r"mambacl bench": "needs minutes; tests/bench",
    r"mambacl plan (examples|.*--gpus)": "needs many seconds; tests/training/test_planning.py",
    r"mambacl (serve|watch runs/demo-mamba-cl-0$)|curl |python -m mambacl.deploy.clients": (
        "runs until it is stopped; tests/deploy has the server and its clients, tests/training the view"
    ),
    r"mambacl export RUN --to": "needs an extra; tests/deploy/test_shipping.py",
    r"mambacl .*hf://": "needs a network; tests/deploy/test_hub.py",
    r"mambacl train demo .*--track": "needs an extra; tests/training/test_tracking.py",
    r"mambacl learn model.safetensors": "needs a checkpoint; tests/deploy/test_learning_checkpoints.py",
    r"mambacl report .*--import": "needs logs of other tools; tests/reports/test_import.py",
    r"mambacl train demo --(compare|seeds|setting paper)": "needs a minute; tests/cli, tests/test_options.py",
}
# Python blocks that other tests run: page, the numbers of its blocks, file and test
ELSEWHERE = [
    ("backbones.md", {0, 1}, "backbones/test_reading.py", "test_the_pages_code_runs"),
    (
        "classifiers.md",
        {0, 1},
        "classifiers/test_ridge_options.py",
        "test_the_page_shows_every_option_and_its_code_runs",
    ),
    ("compat.md", {0, 1, 2}, "mamba_ssm_compat/test_compat_names.py", "test_a_block_runs"),
    ("deploy.md", {0, 1, 4}, "deploy/test_commands.py", "test_the_code_of_the_page_runs"),
    ("deploy.md", {2, 3}, "deploy/test_shipping_runs.py", "test_the_code_of_the_page_runs_without_mambacl"),
    ("extending.md", {0, 1, 2, 3, 4, 5}, "test_extending.py", "test_the_examples_run"),
    ("hub.md", {0}, "deploy/test_hub.py", "test_the_code_of_the_page_runs"),
    ("integrations.md", {0}, "test_lightning.py", "test_the_code_of_the_documentation"),
    ("integrations.md", {1}, "test_avalanche.py", "test_the_code_of_the_documentation"),
    ("learn.md", {0}, "deploy/test_learning_commands.py", "test_the_code_of_the_page_runs"),
    ("python.md", {0}, "test_docs.py", "test_the_loop_of_your_own"),
    ("sweeps.md", {0}, "sweeps/test_pages.py", "test_the_code_of_the_page_runs"),
    ("python.md", {4}, "test_docs.py", "test_classifiers_on_features"),
    ("scale.md", {0}, "tuning/test_recomputing.py", "test_the_code_of_the_page_runs"),
]
HERE = [("README.md", {0, 1, 2}), ("data.md", {0, 1}), ("python.md", {1, 2, 3, 5, 6, 7}), ("tutorial.md", {0, 1})]

CALL = r"(^|\| |torchrun .* -m )mambacl "
NAMES = ("ant", "bee", "cow", "duck", "eel", "fox", "goat", "hen", "ibis", "jay")
SHORTER = ["--stream.train_per_class", "3", "--stream.transforms.image_size", "16", "--stream.tasks", "2"]


# What can be checked without running it


def command_of(given: list[str]) -> tuple[Command, list[str]]:
    both = " ".join(given[:2])
    return (COMMANDS[both], given[2:]) if both in COMMANDS else (COMMANDS[given[0]], given[1:])


def calls() -> list[str]:
    """Every line of a shell block that calls mambacl."""
    return sorted({line for _, line in commands() if re.search(CALL, line)})


@pytest.mark.parametrize("line", calls())
def test_every_command_can_be_read(line: str) -> None:
    """The command and its options exist, their values are right, and so is the preset."""
    command, rest = command_of([word.replace("PRESET", "demo") for word in words(line)])
    positional, _, overrides = command.read(rest)
    needed = [option for option in command.positionals if option.default is REQUIRED]
    assert len(positional) >= len(needed)
    if command.name == "train":
        resolve(positional[0], overrides)


def test_every_other_line_of_a_shell_block_is_right() -> None:
    makefile = (SOURCE / "Makefile").read_text(encoding="utf-8")
    project = (SOURCE / "pyproject.toml").read_text(encoding="utf-8")
    found = set()
    for page, line in commands():
        if re.search(CALL, line):
            continue
        if target := re.match(r"make (\S+)", line):
            assert f"\n{target[1]}:" in makefile, f"{page}: {line}"
        elif extras := re.match(r"pip install '(?:mambacl|\.)\[([\w,]+)\]'", line):
            assert all(f"\n{extra} = [" in project for extra in extras[1].split(",")), f"{page}: {line}"
        elif module := re.match(r"python -m (\S+)", line):
            assert importlib.util.find_spec(module[1]), f"{page}: {line}"
        elif script := re.match(r"python (\S+)", line):
            assert (SOURCE / script[1]).is_file(), f"{page}: {line}"
        else:
            assert line in ("pip install .", "pip install dist/*.whl") or line.split()[0] in ("curl", "hf"), (
                f"{page}: {line}"
            )
        found.add(line.split()[0])
    assert found >= {"pip", "make", "python"}


def test_commands_in_sentences_exist_with_their_options() -> None:
    count = 0
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
        for quoted in re.findall(r"`(mambacl [^`]+)`", text):
            line = re.sub(r" --help.*| \.\.\.", "", " ".join(quoted.split()))
            line = re.sub(r"(--\S+) N\b", r"\1 1", line).replace("COMMAND", "train")
            command, rest = command_of(words(line))
            command.read(rest)
            count += 1
    assert count > 100


# Everything runs, or says why not


def not_run(line: str) -> list[str]:
    return [pattern for pattern in NOT_RUN if re.match(pattern, line)]


def test_no_exception_is_out_of_date() -> None:
    used = {pattern for _, line in commands() for pattern in not_run(line)}
    assert used == set(NOT_RUN)


def test_every_python_block_runs_somewhere() -> None:
    listed = {(page, number) for page, numbers, *_ in [*ELSEWHERE, *HERE] for number in numbers}
    pages = {block.page for block in BLOCKS if block.language == "python"}
    assert listed == {(page, number) for page in pages for number in range(len(code(page)))}


@pytest.mark.parametrize("page, file, test", [(page, file, test) for page, _, file, test in ELSEWHERE])
def test_the_test_that_runs_it_exists(page: str, file: str, test: str) -> None:
    text = (SOURCE / "tests" / file).read_text(encoding="utf-8")
    assert f"def {test}(" in text and f'"{page}"' in text


# Running


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of ten classes, two of them new; a run on eight, once more with two tasks more, and an exported model."""
    root = tmp_path_factory.mktemp("made")
    for split, count, start in (("train", 6, 0), ("test", 2, 1000)):
        write_images((root / "photos" / split / name / f"{i}.png" for name in NAMES for i in range(count)), start)
    for number, name in enumerate(("cat", "dog")):
        write_images((root / "more-photos" / name / f"{i}.png" for i in range(4)), 2000 + 100 * number)
        write_images((root / "test-photos" / name / f"{i}.png" for i in range(2)), 3000 + 100 * number)
    shutil.copytree(root / "photos" / "test", root / "test-photos", dirs_exist_ok=True)
    for domain in ("photo", "sketch"):
        for split in ("train", "test"):
            write_images(root / "domains" / split / domain / name / "0.png" for name in NAMES)
    lines = [f"photos/{split}/{name}/0.png,{name},{split},{NAMES.index(name) // 5}" for name in NAMES
             for split in ("train", "test")]  # fmt: skip
    (root / "list.csv").write_text("\n".join(["path,label,split,task", *lines]))
    shutil.copy(root / "photos" / "test" / "ant" / "0.png", root / "photo.jpg")  # Pillow looks at the content
    stream = {"dataset": "folders", "root": str(root / "photos"), "tasks": 5, "transforms": {"image_size": 16}}
    own = {"method": "analytic", "classifier_options": {"width": 40}, "stream": stream}
    run = mambacl.train({**CONFIG, **own}, name="photos", out=str(root / "runs" / "run"))
    shutil.copytree(run.folder, root / "runs" / "other")
    return root


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a copy of what was made, the run as RUN."""
    here = shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(here)
    return here


def follow(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs one line as a reader would, with names in place of the placeholders."""
    run, other = "runs/run", "runs/other"
    names = {"RUN": run, "RUN...": other, "OLD": other, "NEW": run, "IMAGE...": "photo.jpg", "PRESET": "demo"}
    names |= {"FOLDER": "more-photos" if " learn " in line else "test-photos", "DIR": "domains"}
    given = [names.get(word, word) for word in words(line)]
    given = [path for word in given for path in (sorted(glob.glob(word)) if "*" in word else [word])]
    if given[0] == "train":
        given += SHORTER if given[1] == "demo" else SHORTER[2:4]
        given += (
            ["--training.passes", "1"]
            if {"--setting", "--method"} & set(given)
            else ["--classifier_options.width", "50"]
        )
    if given[0] == "learn" and run in given:  # such lines are alternatives
        shutil.rmtree(run)
        shutil.copytree(other, run)
    if given[0] == "watch":
        given.append("--once")
    if line.startswith("find "):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"photo.jpg\n")))
    assert main(given) in ((0, 1) if "--max-" in line or given[0] == "doctor" else (0,)), line


LINES = {page: [line for one, line in commands() if one == page and not not_run(line)] for page, _ in commands()}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, lines in LINES.items() if lines and page != "tutorial.md"])
def test_the_commands_of_the_page_run(page: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "data.md":
        datasets = pytest.importorskip("datasets")
        splits = datasets.load_dataset("imagefolder", data_dir="photos", cache_dir=str(place / "cache"))
        splits.save_to_disk("on-disk")
    with fewer_test_images(2):
        for line in LINES[page]:
            follow(line, monkeypatch)


def tutorial_parts() -> list[tuple[str, str]]:
    """Its blocks in order, as language and text."""
    return [(block.language, block.text) for block in BLOCKS if block.page == "tutorial.md"]


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every block in order, with a few images of each class."""
    monkeypatch.chdir(tmp_path)
    images, *_, model = (text for language, text in tutorial_parts() if language == "python")
    exec(images.replace("data.train, 50", "data.train, 3").replace("data.test, 20", "data.test, 2"), {})
    assert len(list(Path("photos/train").iterdir())) == 8 and len(list(Path("test-photos").iterdir())) == 10
    assert len(list(Path("more-photos").iterdir())) == 2
    for line in LINES["tutorial.md"]:
        follow(line, monkeypatch)
        if "predict runs/" in line:
            names: dict[str, Any] = {}
            exec(model, names)
            assert names["best"].name in names["model"].classes
    assert len(mambacl.load("clothes.safetensors").classes) == 10 and Path("answers.json").is_file()
    assert Path("runs/photos-analytic-0/report.html").is_file()


def shorten(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Adds options to every call of `mambacl.train`."""
    monkeypatch.setattr(mambacl, "train", functools.partial(mambacl.train, **options), raising=False)


@pytest.mark.slow
def test_the_python_of_the_readme_runs(
    place: Path, tiny_model: Callable[..., torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    shorten(monkeypatch, classifier_options={"width": 50})
    labels = torch.arange(20) % 4
    features = torch.randn(20, 8) + 4 * torch.nn.functional.one_hot(labels, 8)
    images = torch.randn(8, 3, 16, 16)
    names: dict[str, Any] = {"features": features, "labels": labels, "others": features, "torch": torch}
    names |= {"model": tiny_model(), "loader": images.split(4)}
    for text in code("README.md"):
        exec(text, names)
    assert names["run"].results["status"] == "finished" and torch.equal(names["predicted"], labels)
    assert names["space"].tasks == 1


@pytest.mark.slow
def test_a_hugging_face_data_set_is_trained_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(place / "cache"))
    shorten(monkeypatch, classifier_options={"width": 50})
    names: dict[str, Any] = {}
    first, second = code("data.md")
    exec(first, names)
    assert mambacl.load("runs/mine-analytic-0").classes == list(NAMES)
    names["splits"] = names["splits"].rename_columns({"image": "img", "label": "fine_label"})
    exec(second, names)
    assert Path("on-disk/train").is_dir()


@pytest.mark.slow
def test_a_hugging_face_model_is_protected() -> None:
    """With the space, the second kind of text costs the first less than without."""
    pytest.importorskip("datasets")
    pytest.importorskip("transformers")
    [text] = [text for text in code("python.md") if "MambaForCausalLM" in text]
    losses: dict[str, Any] = {}
    for kind, changed in {"protected": text, "free": text.replace("space.wrap(", "(")}.items():
        names: dict[str, Any] = {}
        exec(changed, names)
        losses[kind] = names["losses"]
    for (start, untrained), (_, learned) in losses.values():
        assert start < 1 and learned < 0.5 * untrained
    lost = {kind: rows[1][0] - rows[0][0] for kind, rows in losses.items()}
    assert lost["protected"] < 0.1 < 0.3 < lost["free"]


@pytest.mark.slow
def test_the_other_python_of_the_page_runs(
    place: Path, tiny_model: Callable[..., torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, known, rule, _, _, build, fast, whole = code("python.md")
    names: dict[str, Any] = {"model": tiny_model(num_classes=3), "mambacl": mambacl, "torch": torch}
    exec(known, names)
    assert names["heads"].classes == 3
    exec(rule, {})
    exec(build, names)
    names["images"] = torch.randn(2, 3, 16, 16)
    exec(fast, names)
    assert names["features"].shape == (2, 4)
    fixed = {"stream.train_per_class": 3, "stream.transforms.image_size": 16, "stream.tasks": 2}
    shorten(monkeypatch, **fixed)
    with fewer_test_images(2):
        exec(whole, names)
    assert names["run"].results["status"] == "finished" and names["page"].is_file()
