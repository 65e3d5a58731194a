"""What runs on a GPU; skipped where there is none. By hand: `pytest -m gpu`."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from block_models import MODELS, build, output
from safetensors.torch import load_file
from small_run import CONFIG
from torch import Tensor, nn

import mambacl
from mambacl.nullspace.projectors import project_part
from mambacl.ops import selective_scan, selective_scan_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
@pytest.mark.parametrize("length", [1, 65, 197])
def test_the_scan_agrees_with_the_reference(dtype: torch.dtype, tolerance: float, length: int) -> None:
    torch.manual_seed(0)
    b, d, n = 3, 48, 16
    shapes = [(b, d, length), (b, d, length), (d, n), (b, n, length), (b, n, length)]
    inputs = [torch.randn(shape, dtype=dtype) for shape in shapes]
    inputs[1], inputs[2] = inputs[1].abs() * 0.1, -inputs[2].abs()

    def gradients(device: str, scan: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [tensor.detach().clone().to(device).requires_grad_() for tensor in inputs]
        y = scan(*leaves)
        y.square().sum().backward()
        return [y.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)]

    expected = gradients("cpu", lambda *leaves: selective_scan_reference(*leaves)[0])
    for found, wanted in zip(gradients("cuda", selective_scan), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=tolerance * max(1.0, wanted.abs().max().item()), rtol=0)


def test_the_pretrained_model_gives_the_recorded_classes(goldens: Path) -> None:
    recorded = load_file(goldens / "defocus_mamba_nano_tin32.parity.safetensors")
    model = mambacl.create_model("defocus_mamba_nano", pretrained="tin32-39ep").eval().cuda()
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (model.default_cfg["mean"], model.default_cfg["std"]))
    images = recorded["images_uint8"].float()
    images = images.permute(0, 3, 1, 2) if images.shape[-1] == 3 else images
    with torch.no_grad():
        logits = model(((images / 255 - mean) / std).cuda()).cpu()
    assert (logits.argmax(1) == recorded["logits"].argmax(1)).float().mean() >= 0.99


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_run(precision: str, tmp_path: Path) -> None:
    run = mambacl.train(CONFIG, device="cuda", precision=precision, out=str(tmp_path / "run"))
    results = json.loads((run.folder / "results.json").read_text())
    assert results["status"] == "finished" and results["peak_memory_bytes"] > 0
    evaluation = mambacl.evaluate(run.folder, 33)
    assert sum(abs(a - b) for a, b in zip(evaluation.counted, evaluation.recorded, strict=True)) <= 10


def test_null_spaces_agree_with_the_cpu(tiny_model: Callable[..., nn.Module]) -> None:
    images = torch.randn(20, 3, 16, 16)
    spaces = []
    for device in ("cpu", "cuda"):
        space = mambacl.NullSpace(tiny_model().to(device), "paper", rank="energy:0.9")
        space.consolidate([images[:12], images[12:]])
        spaces.append(space)
    cpu, gpu = spaces
    for name, covariance in cpu.covariances().items():
        error = torch.linalg.norm(gpu.covariances()[name].cpu() - covariance) / torch.linalg.norm(covariance)
        assert error < 1e-4, name
        assert abs(gpu.decompositions()[name].rank - cpu.decompositions()[name].rank) <= 1


@pytest.mark.parametrize("name", MODELS)
def test_the_exact_setting_leaves_old_outputs_alone(name: str) -> None:
    model, inputs, _ = build(name)
    model.cuda()
    space = mambacl.NullSpace(model, "exact")
    old = inputs(0)
    space.consolidate([old])
    with torch.no_grad():
        before = output(model, old.cuda())
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=1e-3, fused=True))
    for step in range(30):
        y = output(model, inputs(1000 + step, 4).cuda())
        optimizer.zero_grad()
        (y - 1).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        after = output(model, old.cuda())
    assert ((after - before).norm() / before.norm()).item() < 1e-5
    assert max(row[0].item() for row in space.update_energy().values()) > 0


@pytest.mark.parametrize("place", ["device", "cpu", "disk"])
def test_covariances_may_be_elsewhere_than_the_model(place: str, tiny_model: Callable[..., nn.Module]) -> None:
    images = torch.randn(20, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    spaces = [mambacl.NullSpace(tiny_model().cuda(), covariances=p, rank="fraction:0.8") for p in ("device", place)]
    for space in spaces:
        space.consolidate([images[:10]])
        space.consolidate([images[10:]])
    where = next(iter(spaces[1].covariances().values())).device.type
    assert where == ("cuda" if place == "device" else "cpu")
    for name, projector in spaces[0].projectors().items():
        assert spaces[1].projectors()[name].basis.device.type == "cuda"
        torch.testing.assert_close(spaces[1].projectors()[name].dense(), projector.dense(), rtol=0, atol=1e-5)


def test_the_batched_projection_is_the_plain_one(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model().cuda()
    space = mambacl.NullSpace(model, rank="energy:0.9")
    space.consolidate([torch.randn(20, 3, 16, 16)])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    batched = {name: tensor + torch.randn_like(tensor) for name, tensor in before.items()}
    plain = {name: tensor.clone() for name, tensor in batched.items()}
    for _, part in space.selection.parts():
        if part.name in space.projectors():
            project_part(before[part.parameter], plain[part.parameter], part, space.projectors()[part.name])
    space.projected_step.project(before, batched)
    for name in space.trained_names():
        torch.testing.assert_close(batched[name], plain[name], rtol=0, atol=2e-6)


LARGE = """
import torch
from mambacl.nullspace.projectors import SMALL, decompose
covariances = []
with torch.cuda.stream(torch.cuda.Stream()):
    for size in (SMALL + 8, SMALL + 16, 40, SMALL + 8, SMALL + 24, SMALL + 8):
        rows = torch.randn(2 * size, size, dtype=torch.float64, device="cuda")
        torch.cuda._sleep(10**8)
        covariances.append(rows.T @ rows)
    found = decompose(covariances, "energy:0.9")
for covariance, one in zip(covariances, found):
    wanted = torch.linalg.eigvalsh(covariance).flip(0).cpu()
    torch.testing.assert_close(one.spectrum, wanted, rtol=1e-9, atol=1e-9 * float(wanted.max()))
"""


def test_large_covariances_are_decomposed_beside_each_other_on_any_stream() -> None:
    """In a new process, where no thread has loaded the library of PyTorch's decompositions."""
    subprocess.run([sys.executable, "-c", LARGE], check=True)
