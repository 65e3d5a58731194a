"""docs/extending.md as a newcomer would follow it: its files and diffs go into a copy of the package, and that runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
NEW_FILES = dict(re.findall(r"New file `(src/\S+)`[^`]*```python\n(.*?)```", TEXT, re.S))
SCRIPTS = [code for code in re.findall(r"```python\n(.*?)```", TEXT, re.S) if code not in NEW_FILES.values()]
DIFFS = re.findall(r"```diff\n(.*?)```", TEXT, re.S)

USES = """
import json
from pathlib import Path

import numpy as np
import torch
import mambacl
from safetensors.torch import load_file
from mambacl.cli import main
from mambacl.training.metrics import METRICS
from small_run import CONFIG

torch.set_num_threads(1)
short = {"training.passes": 1, "stream.train_per_class": 4, "stream.tasks": [5, 5]}
CONFIG = {key: value for key, value in CONFIG.items() if key != "nullspace"}


def train(name, **overrides):
    run = mambacl.train(CONFIG, out=name, **{**short, **overrides})
    assert mambacl.evaluate(run.folder).counted == run.results["correct"][-1]
    assert run.results["status"] == "finished"
    return run


assert "bias-only" in mambacl.list_methods() and "city-block" in mambacl.list_classifiers()
run = train("method", method="bias-only", classifier="city-block")
state = load_file("method/checkpoints/last.safetensors")
trained = [name.split(".")[-2:] for name in state if name.startswith("method.model.")]
assert trained == [["dt_proj", "bias"]] * 2

total = run.results["total"]
worst = min(right / count for right, count in zip(run.results["correct"][-1], total))
assert run.results["metrics"]["worst_task"] == worst
entry = METRICS.get("worst_task")
assert f"| `worst_task` | {entry.formula} | {entry.used_by} |" in Path("docs/metrics.md").read_text()
page = mambacl.report(run.folder).read_text()
assert entry.meaning in page and "Bar chart of the accuracy on each task after the last one." in page
assert Path("method/figures/last-row.png").stat().st_size > 1000

draw = np.random.default_rng(0)
arrays = {split: draw.integers(0, 256, (12, 16, 16, 3), dtype=np.uint8) for split in ("train", "test")}
labels = {f"{split}_labels": np.arange(12) % 4 for split in ("train", "test")}
np.savez("images.npz", **arrays, **labels, class_names=["cat", "dog", "cow", "hen"])
own = {"stream.dataset": "npz", "stream.root": ".", "stream.tasks": [2, 2], "stream.order": "natural"}
assert train("data", **own, method="frozen").results["class_names"] == ["cat", "dog", "cow", "hen"]
assert main(["data", "list"]) == 0

model = mambacl.create_model("plain_mamba_nano", num_classes=3)
images = torch.randn(2, 3, 32, 32)
assert torch.equal(model.get_classifier()(model.forward_head(model.forward_features(images), True)), model(images))
backbone = {"backbone": "plain_mamba_nano", "backbone_options": {"img_size": 16, "embed_dim": 32, "depth": 2}}
train("backbone", **backbone, classifier="city-block")
parts = {part["kind"] for part in mambacl.audit("backbone")["updates"][0]["parts"]}
assert parts == {"A", "W_B", "W_C", "W_delta", "out"}


class MyMixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.out(x)


block_reader, statistics = json.loads(SCRIPTS)
exec(block_reader, {})
space = mambacl.NullSpace(torch.nn.Sequential(MyMixer()))
space.consolidate([torch.randn(2, 5, 4)])
assert space.trained_names() == ["0.out.weight"]
batches = [(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 1, 2])) for _ in range(2)]
names = {"model": model, "loader": batches}
exec(statistics, names)
with torch.no_grad():
    ones = torch.cat([model(images)[labels == 1] for images, labels in batches])
torch.testing.assert_close(names["means"][1].float(), ones.mean(0))
"""


def follow(root: Path) -> None:
    """Does in a copy of the repository what the page says. Python files must still compile."""
    for name, code in NEW_FILES.items():
        assert not (root / name).exists(), f"{name} is there already"
        (root / name).write_text(code, encoding="utf-8")
    for diff in DIFFS:
        for name, hunk in re.findall(r"^--- (\S+)\n(.*?)(?=^--- |\Z)", diff, re.S | re.M):
            lines = hunk.splitlines(keepends=True)
            before, after = ("".join(line[1:] for line in lines if line[0] in sign) for sign in (" -", " +"))
            text = (root / name).read_text(encoding="utf-8")
            assert text.count(before) == 1, f"{name} has changed: correct its lines in docs/extending.md"
            (root / name).write_text(text.replace(before, after), encoding="utf-8")
    changed = [*NEW_FILES, *re.findall(r"^--- (\S+\.py)$", "".join(DIFFS), re.M)]
    for name in changed:
        compile((root / name).read_text(encoding="utf-8"), name, "exec")


@pytest.fixture
def followed(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "metrics.md", tmp_path / "docs")
    shutil.copytree(
        ROOT / "src" / "mambacl", tmp_path / "src" / "mambacl", ignore=shutil.ignore_patterns("__pycache__")
    )
    follow(tmp_path)
    return tmp_path


def test_the_files_and_diffs_fit_the_package(followed: Path) -> None:
    assert len(NEW_FILES) == 4 and len(DIFFS) == 3 and len(SCRIPTS) == 2
    assert all((followed / name).is_file() for name in NEW_FILES)


@pytest.mark.slow
def test_the_examples_run(followed: Path) -> None:
    path = os.pathsep.join([str(followed / "src"), str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", USES.replace("json.loads(SCRIPTS)", f"json.loads({json.dumps(SCRIPTS)!r})")]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=followed, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "your own images in one NumPy file" in done.stdout
