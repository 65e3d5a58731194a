"""What every test file shares: the recorded numbers, a tiny model, the number of threads."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

if not torch.cuda.is_available():  # Triton's interpreter then runs the kernels; it must know before it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from data_help import fewer_test_images
from kernels_help import kernels_run
from small_run import VIT

from mambacl.backbones import create_model
from mambacl.heap import keep_freed_memory
from mambacl.methods import METHODS

# One thread unless asked for: pytest runs two processes on two cores.
torch.set_num_threads(int(os.environ.setdefault("MAMBACL_TEST_THREADS", "1")))

keep_freed_memory()  # as the commands do

GOLDENS = Path(__file__).parent / "goldens"
LONG_IN_THE_INTERPRETER = ("test_scan_layouts", "test_scan_tiles")  # test_scan_triton has the same scans
NOT_PASSED = ("family", "final_norm", "input_hw")  # entries of a golden's configuration that describe the recording
TINY = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 2,
    "use_aux_loss": False,
    "num_classes": 0,
    "mamba": {"intermediate_size": 64, "state_size": 8, "time_step_rank": 4, "group_norm_size": 16},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernels are slow in the interpreter, and skipped where there is not even that. Long tests are slow."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
    kernels = [item for item in items if item.get_closest_marker("kernels")]
    for item in kernels:
        if not kernels_run():
            item.add_marker(pytest.mark.skip(reason="there is neither a CUDA device nor Triton's interpreter"))
        elif not torch.cuda.is_available():
            item.add_marker(pytest.mark.slow)
            if item.path.stem in LONG_IN_THE_INTERPRETER:
                item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of the recorded numbers."""
    return GOLDENS


@pytest.fixture(scope="session")
def golden_model() -> Callable[[str], tuple[nn.Module, dict[str, Tensor], dict]]:
    """A golden's model with its recorded weights, all its tensors, and its whole configuration."""

    def build(name: str) -> tuple[nn.Module, dict[str, Tensor], dict]:
        tensors = load_file(GOLDENS / f"{name}.safetensors")
        config = json.loads((GOLDENS / f"{name}.json").read_text())["config"]
        recording = ("null_eta", "lr", "weight_decay", "trainable", *NOT_PASSED)
        options = {k: v for k, v in config.items() if k not in recording and not k.startswith("_")}
        families = {"vim_tiny_like": "vim", "vmamba_s2_like": "vmamba", "mambavision_T_like": "mambavision"}
        model = create_model(families.get(name, "defocus_mamba"), **options)
        weights = {k.removeprefix("state_dict/"): v for k, v in tensors.items() if k.startswith("state_dict/")}
        model.load_state_dict(weights)
        return model.eval(), tensors, config

    return build


@pytest.fixture
def tiny_model() -> Callable[..., nn.Module]:
    """A De-focus Mamba of a few thousand values; the same weights each time, and features of a usual size.

    Options are those of `create_model`, on top of the tiny ones.
    """

    def build(**options: object) -> nn.Module:
        mamba = {**TINY["mamba"], **options.pop("mamba", {})}
        torch.manual_seed(0)
        model = create_model("defocus_mamba", **{**TINY, **options, "mamba": mamba})
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "proj.weight" in name:  # well above the small values that training starts from
                    parameter.normal_(std=0.3)
        return model.eval()

    return build


@pytest.fixture
def tiny_model_for(tiny_model: Callable[..., nn.Module]) -> Callable[[str], nn.Module]:
    """A tiny model that a method can train: a ViT if it changes attention, else the De-focus Mamba above."""

    def build(method: str) -> nn.Module:
        if not METHODS.get(method).needs_attention:
            return tiny_model()
        torch.manual_seed(0)
        model = create_model("vit", num_classes=0, **VIT["backbone_options"])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=0.3)
        return model.eval()

    return build


@pytest.fixture
def few_test_images() -> Iterator[None]:
    """Ten test images of each embedded class instead of a hundred, for runs whose accuracy does not matter."""
    with fewer_test_images(10):
        yield


@pytest.fixture
def source(tiny_model):
    return tiny_model(num_classes=3)


@pytest.fixture
def target(tiny_model):
    """A model of the same kind with other values everywhere."""
    model = tiny_model(num_classes=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return model
