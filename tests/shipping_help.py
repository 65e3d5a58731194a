"""Small models that can be exported, without a run, and what their files answer in a process without mambacl."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mambacl.backbones import create_model
from mambacl.config import from_dict
from mambacl.data.transforms import Transforms
from mambacl.deploy.description import Description
from mambacl.deploy.foreign import FORMATS
from mambacl.deploy.predictor import Predictor
from mambacl.methods import METHODS
from mambacl.methods.base import Task
from mambacl.training.build import setup_of

SIZE = 32
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "defocus": (
        "defocus_mamba",
        {
            "img_size": SIZE,
            "patch_size": 8,
            "embed_dim": 32,
            "depth": 2,
            "use_aux_loss": False,
            "mamba": {"intermediate_size": 64, "state_size": 8, "time_step_rank": 4, "group_norm_size": 16},
        },
    ),
    "vim": ("vim_nano", {"patch_size": 8, "stride": 8, "embed_dim": 32, "depth": 2, "d_state": 8}),
    "vmamba": ("vmamba_nano", {"depths": (1, 1), "dims": 16}),
    "mambavision": ("mambavision_nano", {"depths": (1, 1, 2, 2), "num_heads": (2, 2, 2, 2)}),
}

WITHOUT_MAMBACL = """
import sys
sys.modules["mambacl"] = None  # an import fails
import numpy as np
given, path, to = np.load(sys.argv[1]), sys.argv[2], sys.argv[3]
if to == "onnx":
    import onnxruntime
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    run = lambda x: session.run(None, {"images": x})[0]
elif to == "openvino":
    import openvino
    model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    run = lambda x: model(x)[0].copy()
else:
    import torch
    program = torch.export.load(path).module()
    run = lambda x: program(torch.from_numpy(x)).detach().numpy()
np.savez(sys.argv[4], **{name: run(images) for name, images in given.items()})
"""


def needs(to: str) -> None:
    for module in FORMATS[to].modules:
        pytest.importorskip(module)


def elsewhere(path: str, to: str, batches: list[np.ndarray], folder: Path) -> list[torch.Tensor]:
    """Scores of each batch, from a process that cannot import mambacl."""
    np.savez(folder / "images.npz", **{str(number): batch for number, batch in enumerate(batches)})
    words = (str(folder / "images.npz"), path, to, str(folder / "out.npz"))
    subprocess.run([sys.executable, "-c", WITHOUT_MAMBACL, *words], check=True, cwd=folder)
    found = np.load(folder / "out.npz")
    return [torch.from_numpy(found[str(number)]) for number in range(len(batches))]


def predictor(family: str = "defocus", **options: Any) -> Predictor:
    """A model of two tasks with six classes; `options` are a run's. Its weights are random, but large enough for every
    part to matter."""
    backbone, sizes = BACKBONES[family]
    config = from_dict(
        {"backbone": backbone, "backbone_options": sizes, "pretrained": False, "precision": "float32", **options}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = create_model(backbone, num_classes=0, **sizes)
        for parameter in model.parameters():
            if parameter.dim() == 2 and parameter.shape[0] != 1:
                parameter.data += 0.05 * torch.randn_like(parameter)
        method = METHODS.get(config.method)(model.eval(), setup_of(config))
        for task, images in enumerate(torch.randn(2, 24, 3, SIZE, SIZE)):
            method.start_task(Task(task, 3, 3 * task, task))
            batches = [(images, torch.arange(24) % 3 + 3 * task)]
            method.finish_task(batches)
            if method.classifier.updates:
                method.fit_classifier(batches)
    transforms = Transforms.of_model(config.stream.transforms, model)
    names = [f"class {number}" for number in range(5)] + ["猫"]
    description = Description(names, config, transforms.describe()["evaluation"], "MIT", {"name": "small"})
    return Predictor(method, transforms, description, torch.device("cpu"))


def pictures(count: int, seed: int = 1) -> list[torch.Tensor]:
    """Images as uint8 (3, size, size)."""
    made = torch.randint(0, 256, (count, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(seed))
    return list(made.to(torch.uint8))
