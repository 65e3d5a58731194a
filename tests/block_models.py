"""A small model of every kind that the null space has a reader for, and inputs that leave room beside them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from mambacl.backbones import create_model
from mambacl.ops import selective_scan_reference


class PlainMamba(nn.Module):
    """A block with the parameters and the order of calls of `mamba_ssm`'s plain path: x_proj takes (images x tokens,
    channels), dt_proj is used by its weight, in_proj too."""

    def __init__(self, width=16, inner=32, states=8, rank=2, kernel=4):
        super().__init__()
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1)
        self.x_proj = nn.Linear(inner, rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)
        self.fused = False

    def forward(self, hidden_states):
        batch, length, _ = hidden_states.shape
        x, z = (hidden_states @ self.in_proj.weight.T).mT.chunk(2, dim=1)  # (b, d, l)
        x = F.silu(self.conv1d(x)[..., :length])
        rows = x.mT.reshape(batch * length, -1)
        projected = F.linear(rows, self.x_proj.weight) if self.fused else self.x_proj(rows)
        rank, states = self.dt_proj.weight.shape[1], self.A_log.shape[1]
        dt, B, C = projected.split([rank, states, states], dim=-1)
        delta = (dt @ self.dt_proj.weight.T).unflatten(0, (batch, length)).mT
        B, C = (M.unflatten(0, (batch, length)).mT for M in (B, C))
        y = selective_scan_reference(
            x, F.softplus(delta + self.dt_proj.bias[:, None]), -self.A_log.exp(), B[:, None], C[:, None]
        )[0]
        return self.out_proj(((y + self.D[:, None] * x) * F.silu(z)).mT)


def _images(size) -> Callable:
    return lambda seed, count=1: torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def _tokens(seed, count=1):
    return torch.randint(0, 40, (count, 8), generator=torch.Generator().manual_seed(seed))


def _rows(seed, count=1):
    return torch.randn(count, 8, 16, generator=torch.Generator().manual_seed(seed))


def _plain():
    return nn.Sequential(PlainMamba(), nn.LayerNorm(16), PlainMamba())


def _language(kind, **options):
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, use_cache=False, **options
    )
    return config, transformers


def _mamba():
    config, library = _language("Mamba", state_size=4)
    return library.MambaForCausalLM(config)


def _mamba_backbone():
    config, library = _language("Mamba", state_size=4)
    return library.MambaModel(config)


def _falcon():
    config, library = _language("FalconMamba", state_size=4)
    return library.FalconMambaForCausalLM(config)


def _mamba2():
    config, library = _language("Mamba2", state_size=8, num_heads=4, head_dim=16, n_groups=2, chunk_size=4)
    return library.Mamba2ForCausalLM(config)


TINY_MIXER = {"intermediate_size": 64, "state_size": 8, "time_step_rank": 4, "group_norm_size": 16}
MODELS = {  # how to build it, its inputs, and how many blocks have a selective SSM
    "defocus": (
        lambda: create_model(
            "defocus_mamba", img_size=16, patch_size=4, embed_dim=32, depth=2, use_aux_loss=False, num_classes=0,
            mamba=TINY_MIXER,
        ),
        _images(16),
        2,
    ),
    "vim": (
        lambda: create_model("vim", img_size=16, patch_size=4, stride=4, embed_dim=32, depth=2, num_classes=0),
        _images(16),
        2,
    ),
    "vmamba": (lambda: create_model("vmamba", depths=(1, 1), dims=16, num_classes=0), _images(16), 2),
    "vanilla_vmamba": (
        lambda: create_model("vanilla_vmamba_nano", depths=(1, 1), dims=16, ssm_d_state=4, num_classes=0),
        _images(16),
        2,
    ),
    "mambavision": (
        lambda: create_model(
            "mambavision_nano", dim=8, in_dim=4, depths=(1, 1, 2, 1), num_heads=(1, 1, 2, 2), num_classes=0
        ),
        _images(16),
        2,
    ),
    "mamba_ssm": (_plain, _rows, 2),
    "MambaForCausalLM": (_mamba, _tokens, 2),
    "MambaModel": (_mamba_backbone, _tokens, 2),
    "FalconMamba": (_falcon, _tokens, 2),
    "Mamba2": (_mamba2, _tokens, 2),
}  # fmt: skip


def build(name) -> tuple[nn.Module, Callable, int]:
    make, inputs, blocks = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "proj" in parameter_name and "weight" in parameter_name and "conv" not in parameter_name:
                parameter.normal_(std=0.3)  # well above the small values that training starts from
    return model, inputs, blocks


def output(model, batch) -> torch.Tensor:
    result = model(batch)
    if isinstance(result, torch.Tensor):
        return result
    return result.logits if "logits" in result else result.last_hidden_state
