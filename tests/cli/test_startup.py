"""What a command does before PyTorch is loaded, and where the seconds of a run go."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from small_run import CONFIG
from test_cli import EARLY
from torch import nn

from mambacl.training.optimizers import without_compiler
from mambacl.training.seconds import AROUND, Watch, with_other

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
REFUSED = [
    *(arguments for arguments, _ in EARLY),
    ["train", "--help", "trainin"],
    ["train", "demo", "--precision", "fp16"],
    ["train", "demo", "--nullspace.rank", "knee"],
    ["train", "demo", "--setting", "papr"],
    ["train", "demo", "--stream.scenario", "none"],
    ["evaluate", "nowhere", "--batch", "1"],
    ["predict", "nowhere", "a.png"],
    ["export", "nowhere", "--to", "onnx"],
    ["compare", "nowhere", "nowhere"],
    ["serve", "nowhere"],
    ["push", "nowhere", "ada/flowers"],
    ["predict", "hf://flowers", "a.png"],
    ["learn", "hf://ada/flowers", "--new", "photos"],
    ["resume", "nowhere", "--device", "tpu"],
    ["report", "--all"],
    ["paper", "nothing"],
    ["sweep"],
    ["sweep", "nowhere.yaml"],
    ["sweep", "nowhere.yaml", "--engine", "cloud"],
    ["tune", "demo"],
    ["tune", "demo", "--search", "training.lr=1e-5:1e-2"],
    ["tune", "demo", "--search", "training.lr=fast"],
    ["tune", "demo", "--search", "training.lr=1", "--metric", "final"],
    ["audit", "--all"],
    ["plan"],
    ["data", "show"],
    ["bench", "--all"],
    ["methods", "--all"],
    ["convert", "one"],
    ["pretrain"],
    ["pretrain", "--stream.root", "photos", "--minutes", "0"],
    ["pretrain", "--stream.root", "photos", "--stream.tasks", "5"],
]

REFUSAL = """
import sys
from mambacl.cli import main
for arguments in {commands!r}:
    assert main(arguments) == 2, arguments
    assert "torch" not in sys.modules, arguments
"""
QUICK = """
import sys
from mambacl.cli import COMMANDS, main
several = [["train", "--help", "all"], ["pretrain", "--help", "run"], ["data", "--help"], ["--version"], ["models"]]
several += [["methods"], ["completion", "bash"], ["__complete", "train", "--"], ["__complete", "plan", ""]]
for arguments in [[], ["--help"], *([*name.split(), "--help"] for name in COMMANDS), *several]:
    assert main(arguments) == 0, arguments
    assert "torch" not in sys.modules, arguments
"""


def test_mistakes_are_refused_before_pytorch_is_loaded(tmp_path: Path) -> None:
    code = REFUSAL.format(commands=REFUSED)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(REFUSED) and not any(tmp_path.iterdir())


def test_helps_and_lists_do_not_load_pytorch(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", QUICK], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_will_be_trained_is_said_before_pytorch_is_loaded(tmp_path: Path) -> None:
    code = """
import logging, sys
from mambacl.cli import main
from mambacl.log import logger
class Stop(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), "torch" in sys.modules)
        sys.exit(0)
logger.addHandler(Stop())
main(["train", "demo", "--method", "frozen", "--seed", "3"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    words = f"Training demo with frozen on defocus_mamba_nano, to {Path('runs') / 'demo-frozen-3'} False"
    assert done.stdout.splitlines() == [words], done.stderr


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
@pytest.mark.slow
def test_a_run_on_the_batched_engine_loads_neither_torchvision_nor_the_compiler(
    device: str, optimizer: str, tmp_path: Path
) -> None:
    """Each takes as long to load as PyTorch itself."""
    code = f"""
import sys
import mambacl
from small_run import CONFIG
CONFIG["stream"]["transforms"]["engine"] = "batched"
CONFIG["training"] |= {{"passes": 1, "optimizer": "{optimizer}"}}
run = mambacl.train(CONFIG, out="run", device="{device}")
mambacl.evaluate(run.folder)
assert "torchvision" not in sys.modules and "torch._dynamo" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=300)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_without_the_compiler_is_the_same(kind: type[torch.optim.Optimizer], fused: bool) -> None:
    found, calls = [], []
    for make in (kind, without_compiler(kind)):
        layer = nn.Linear(3, 2)
        with torch.no_grad():
            layer.weight.fill_(0.5)
            layer.bias.zero_()
        optimizer = make(layer.parameters(), lr=0.1, weight_decay=0.01, fused=fused)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        for step in range(4):
            optimizer.zero_grad()
            layer(torch.arange(6.0).view(2, 3) + step).square().sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        found.append(torch.cat([p.detach().flatten() for p in layer.parameters()]))
        assert isinstance(optimizer, kind) and type(optimizer).__name__ == kind.__name__
    assert torch.equal(*found) and len(calls) == 8


@pytest.mark.long
def test_seconds_add_up_to_the_wall_time(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(CONFIG))
    command = [sys.executable, "-m", "mambacl", "train", "small.yaml", "--out", "run"]
    began = time.perf_counter()
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=600)
    wall = time.perf_counter() - began
    seconds = json.loads((tmp_path / "run" / "results.json").read_text())["seconds"]
    assert {"train", "covariance", "decomposition", "evaluate", *AROUND} == set(seconds)
    assert all(value >= 0 for value in seconds.values()) and seconds["start"] > 0 and seconds["report"] > 0
    counted = sum(seconds.values())
    assert 0.5 * wall < counted <= wall  # the end of the process, which a busy machine draws out, is not counted

    again = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=600)
    assert "finished" in again.stderr  # shown as it is: nothing is added
    assert json.loads((tmp_path / "run" / "results.json").read_text())["seconds"] == seconds


def test_the_rest_is_what_is_missing_to_the_total() -> None:
    assert with_other({"train": 3.0, "other": 9.0}, 5.0) == {"train": 3.0, "other": 2.0}
    assert with_other({"train": 3.0}, 2.0) == {"train": 3.0, "other": 0.0}
    watch = Watch()
    with pytest.raises(RuntimeError), watch.phase("data"):
        raise RuntimeError
    watch.add("data", 1.0)
    assert watch.seconds["data"] >= 1.0 and watch.seconds["start"] == 0.0  # not of a process that does other things
