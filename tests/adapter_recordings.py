"""Recordings of public code for adapters and LoRA (tests/goldens/growing): their ViT, batches, what was compared.

The networks have separate layers for queries, keys and values; ours have one.
"""

import json
import re
from pathlib import Path

import torch
from prompt_recordings import Recording
from safetensors import safe_open
from torch import Tensor

FOLDER = Path(__file__).parent / "goldens" / "growing"
GIVEN = re.compile(r"backbone\.|(task\d\.)?initial\.|.*\.batch\d|test\.images|.*\.added\.")


class AdapterRecording(Recording):
    def __init__(self, name: str) -> None:
        with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
            self.config = json.loads(file.metadata()["configuration"])
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        self.compared = set()
        self.classes = self.config["classes"]

    def weights(self) -> dict[str, Tensor]:
        own = {n.removeprefix("backbone."): t for n, t in self.tensors.items() if n.startswith("backbone.")}
        state = {re.sub(r"\.(fc\d)\.", r".mlp.\1.", name): t for name, t in own.items() if "_proj." not in name}
        for name in own:
            if ".q_proj." in name:
                parts = [own[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                state[name.replace("q_proj", "qkv")] = torch.cat(parts)
        return state

    def batch(self, task: int, step: int) -> tuple[Tensor, Tensor]:
        """Of a step, counted from 0: the batches take turns."""
        name = f"task{task}.batch{step % self.config['batches']}"
        return self[f"{name}.images"], self[f"{name}.labels"]

    def batches(self, task: int) -> list[tuple[Tensor, Tensor]]:
        return [self.batch(task, step) for step in range(self.config["batches"])]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with it, by the rest of their names."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    def assert_all_compared(self) -> None:
        left = {name for name in self.tensors if not GIVEN.match(name)} - self.compared
        assert not left, sorted(left)
