"""Recordings of EWC, LwF, iCaRL and DER in public toolboxes (tests/goldens/adapters): small networks in float64."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "goldens" / "adapters"
TOLERANCE = 1e-9  # relative to a tensor's largest value; a few updates of small networks add nothing to it


class Recording:
    """The tensors by name, and which of them a test has compared."""

    def __init__(self, name: str) -> None:
        self.tensors, self.compared = load_file(FOLDER / f"{name}.safetensors"), set[str]()

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def near(self, name: str, found: Tensor | float, tolerance: float) -> None:
        stored, found = self[name], torch.as_tensor(found, dtype=torch.float64).detach()
        self.compared.add(name)
        assert found.shape == stored.shape, f"{name}: {tuple(found.shape)} is not {tuple(stored.shape)}"
        error = (found - stored).abs().max() / max(float(stored.abs().max()), 1e-6)
        assert error <= tolerance, f"{name}: {float(error):.1e}"

    def check_all(self, *prefixes: str) -> None:
        """That everything with these prefixes has been compared."""
        missing = {name for name in self.tensors if name.startswith(prefixes)} - self.compared
        assert not missing, f"not compared: {sorted(missing)[:5]}"


class Network(nn.Sequential):
    """Named layers in float64; the last linear one has as many outputs as there are features."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.double().eval()

    @property
    def num_features(self) -> int:
        return [layer for layer in self if isinstance(layer, nn.Linear)][-1].out_features


@torch.no_grad()
def copy(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Into parameters of the same names."""
    for name, parameter in module.named_parameters():
        parameter.copy_(values[name])
