"""The names of `mamba_ssm.utils` that public model files import."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambacl.errors import UserError


@dataclass
class InferenceParams:
    """A model's state between tokens: each block's states by its layer_idx."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0  # tokens already seen
    batch_size_offset: int = 0
    key_value_memory_dict: dict[int, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


class GenerationMixin:
    """A base class that public files use. It does not generate text; transformers does."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError(
            "mambacl does not generate text: use transformers' MambaForCausalLM and accelerate_transformers()."
        )


def load_config_hf(model_name: str) -> dict[str, Any]:
    """Reads config.json from a folder or a repository on the Hugging Face hub."""
    return json.loads(_file(model_name, "config.json").read_text(encoding="utf-8"))


def load_state_dict_hf(
    model_name: str, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Reads pytorch_model.bin from a folder or a repository on the Hugging Face hub, without running code in it."""
    location = "cpu" if dtype is not None else device  # convert before moving to the device
    tensors = torch.load(_file(model_name, "pytorch_model.bin"), map_location=location, weights_only=True)
    return {name: tensor.to(device=device, dtype=dtype or tensor.dtype) for name, tensor in tensors.items()}


def _file(model_name: str, name: str) -> Path:
    if Path(model_name).is_dir():
        return Path(model_name) / name
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise UserError(
            f"'{model_name}' is not a folder; to download it from the hub, pip install huggingface_hub."
        ) from None
    return Path(hf_hub_download(model_name, name))
