"""The files of docs/extending.md, as a newcomer would write them: each runs, and a run uses it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")

USES = """
import json
import torch
import mambacl
from safetensors.torch import load_file
from small_run import CONFIG

torch.set_num_threads(1)
short = {"training.passes": 1, "stream.train_per_class": 4, "stream.tasks": [5, 5]}
CONFIG = {key: value for key, value in CONFIG.items() if key != "nullspace"}


def train(name, **overrides):
    run = mambacl.train(CONFIG, out=name, **short, **overrides)
    assert mambacl.evaluate(run.folder).counted == run.results["correct"][-1]
    return run.results["status"]


assert "bias-only" in mambacl.list_methods() and "nearest-angle" in mambacl.list_classifiers()
found = {"method": train("method", method="bias-only", classifier="nearest-angle")}
state = load_file("method/checkpoints/last.safetensors")
found["trained"] = [name.split(".")[-2:] for name in state if name.startswith("method.model.")]
model = mambacl.create_model("plain_mamba_nano", num_classes=3)
images = torch.randn(2, 3, 32, 32)
assert torch.equal(model.get_classifier()(model.forward_head(model.forward_features(images), True)), model(images))
backbone = {"backbone": "plain_mamba_nano", "backbone_options": {"img_size": 16, "embed_dim": 32, "depth": 2}}
found["backbone"] = train("backbone", **backbone, classifier="nearest-angle")
found["parts"] = sorted({part["kind"] for part in mambacl.audit("backbone")["updates"][0]["parts"]})


class MyMixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.out(x)


space = mambacl.NullSpace(torch.nn.Sequential(MyMixer()))
space.consolidate([torch.randn(2, 5, 4)])
found["read"] = space.trained_names()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path) -> None:
    """In a process apart: what they register stays there."""
    files = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(files) == 4
    for number, text in enumerate(files):
        (tmp_path / f"file_{number}.py").write_text(text, encoding="utf-8")
    imports = "".join(f"import file_{number}\n" for number in range(len(files)))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", imports + USES]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["method"] == found["backbone"] == "finished"
    assert found["trained"] == [["dt_proj", "bias"]] * 2
    assert found["parts"] == ["A", "W_B", "W_C", "W_delta", "out"]
    assert found["read"] == ["0.out.weight"]
