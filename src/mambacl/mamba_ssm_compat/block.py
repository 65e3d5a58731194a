"""mamba-ssm's `Mamba` module, with the options that Vim's copy of mamba-ssm adds: the same parameter names and shapes,
and the same state for generation.

`use_fast_path` has no effect. The only path calls its layers as modules, so that hooks see their inputs and outputs.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.mamba_ssm_compat.conv import causal_conv1d_fn, causal_conv1d_update
from mambacl.mamba_ssm_compat.scan import selective_scan_fn, selective_state_update
from mambacl.ops.precision import at_least_float32

States = tuple[Tensor, Tensor]


class Mamba(nn.Module):
    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        bimamba_type: str = "none",
        if_divide_out: bool = False,
        init_layer_scale: float | None = None,
    ) -> None:
        """`bimamba_type`: "none"; "v1", a second direction that differs only in A; "v2", a second direction with
        separate weights. `if_divide_out`: with "v2", use the mean of both directions, not the sum. `init_layer_scale`:
        initial value of gamma, a factor per channel."""
        super().__init__()
        if dt_init not in ("random", "constant"):
            raise UserError(f"dt_init must be 'random' or 'constant', got {dt_init!r}.")
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner = int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if isinstance(dt_rank, str) else dt_rank
        self.use_fast_path, self.layer_idx = use_fast_path, layer_idx
        self.bimamba_type, self.if_divide_out, self.init_layer_scale = bimamba_type, if_divide_out, init_layer_scale
        self.activation, self.act = "silu", nn.SiLU()

        place: dict[str, Any] = {"device": device, "dtype": dtype}
        if init_layer_scale is not None:
            self.gamma = nn.Parameter(torch.full((d_model,), float(init_layer_scale), device=device))
        # In mamba-ssm's order, so that a seed gives the same weights and an optimizer's state fits.
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias, **place)
        self.conv1d, self.x_proj, self.dt_proj = self._layers(conv_bias, place)
        self._initialize_dt(dt_min, dt_max, dt_init, dt_scale, dt_init_floor)
        self.A_log, self.D = self._constants(device)
        if bimamba_type == "v1":
            self.A_b_log, _ = self._constants(device)
        elif bimamba_type == "v2":
            self.A_b_log, self.D_b = self._constants(device)
            self.conv1d_b, self.x_proj_b, self.dt_proj_b = self._layers(conv_bias, place)
        elif bimamba_type != "none":
            raise UserError(f"bimamba_type must be 'none', 'v1' or 'v2', got {bimamba_type!r}.")
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **place)

    def _layers(self, conv_bias: bool, place: dict[str, Any]) -> tuple[nn.Conv1d, nn.Linear, nn.Linear]:
        """The layers of one direction: convolution, x_proj, dt_proj."""
        inner, taps = self.d_inner, self.d_conv
        conv = nn.Conv1d(inner, inner, taps, groups=inner, padding=taps - 1, bias=conv_bias, **place)
        x_proj = nn.Linear(inner, self.dt_rank + 2 * self.d_state, bias=False, **place)
        return conv, x_proj, nn.Linear(self.dt_rank, inner, **place)

    def _constants(self, device: torch.device | str | None) -> tuple[nn.Parameter, nn.Parameter]:
        """A_log and D of one direction, always in float32 and without weight decay."""
        rates = torch.arange(1, self.d_state + 1, dtype=torch.float32, device=device)
        found = nn.Parameter(rates.log().repeat(self.d_inner, 1)), nn.Parameter(torch.ones(self.d_inner, device=device))
        for parameter in found:
            parameter._no_weight_decay = True  # type: ignore[attr-defined]  # read by public code's optimizers
        return found

    @torch.no_grad()
    def _initialize_dt(self, low: float, high: float, kind: str, scale: float, floor: float) -> None:
        """Initialises dt_proj so that softplus(bias) is log-uniform between `low` and `high`. The second direction
        keeps PyTorch's default, as in Vim."""
        spread = self.dt_rank**-0.5 * scale
        if kind == "constant":
            self.dt_proj.weight.fill_(spread)
        else:
            self.dt_proj.weight.uniform_(-spread, spread)
        bias = self.dt_proj.bias
        dt = torch.rand(bias.shape, device=bias.device, dtype=bias.dtype) * (math.log(high) - math.log(low))
        dt = (dt + math.log(low)).exp().clamp(min=floor)
        bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        bias._no_reinit = True  # type: ignore[attr-defined]  # models that zero their biases skip it

    def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Tensor:
        """Maps tokens (b, l, e) to tokens. `inference_params` (mamba-ssm's, or any object with `key_value_memory_dict`
        and `seqlen_offset`) stores the state after the last token; later calls continue from it."""
        states = None
        if inference_params is not None:
            states = self._get_states_from_cache(inference_params, len(hidden_states))
            if inference_params.seqlen_offset > 0:
                return self.step(hidden_states, *states)[0]
        x, z = self.in_proj(hidden_states).mT.chunk(2, dim=1)  # (b, d, l) each
        if self.bimamba_type == "v2":
            back = self._direction(x.flip(-1), z.flip(-1), "_b", "A_b_log").flip(-1)
            y = self._direction(x, z, "", "A_log", states) + back
            y = y / 2 if self.if_divide_out else y
        else:
            y = self._direction(x, z, "", "A_log", states, second="A_b_log" if self.bimamba_type == "v1" else "")
        out = self.out_proj(y.mT)
        return out if self.init_layer_scale is None else out * self.gamma

    def _direction(
        self, x: Tensor, z: Tensor, suffix: str, A_log: str, states: States | None = None, second: str = ""
    ) -> Tensor:
        """One direction, from x and the gate, (b, d, l). `second`: name of the A of a backward scan over the same
        tokens."""
        conv, dt_proj = getattr(self, f"conv1d{suffix}"), getattr(self, f"dt_proj{suffix}")
        if states is not None:
            states[0].copy_(F.pad(x, (self.d_conv - x.shape[-1], 0)))  # the last inputs, padded with zeros in front
        x = causal_conv1d_fn(x, conv.weight.squeeze(1), conv.bias, activation="silu")  # type: ignore[assignment]
        projected = getattr(self, f"x_proj{suffix}")(x.mT)  # (b, l, rank + 2 n)
        dt, B, C = projected.split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta, B, C = F.linear(dt, dt_proj.weight).mT, B.mT, C.mT
        D = getattr(self, f"D{suffix}")

        def scan(A_log: str, *tokens: Tensor) -> tuple[Tensor, Tensor]:
            x, delta, B, C, z = tokens
            found = selective_scan_fn(
                x, delta, -torch.exp(at_least_float32(getattr(self, A_log))), B, C, D, z, dt_proj.bias, True, True
            )
            assert isinstance(found, tuple)
            return found

        y, last = scan(A_log, x, delta, B, C, z)
        if states is not None:
            states[1].copy_(last)
        if second:
            y = y + scan(second, *(tensor.flip(-1) for tensor in (x, delta, B, C, z)))[0].flip(-1)
        return y

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One token (b, 1, e) from the states, which are updated in place and also returned."""
        if hidden_states.shape[1] != 1:
            raise UserError(f"step takes one token, got {hidden_states.shape[1]}: call it once per token.")
        if self.bimamba_type != "none":
            raise UserError(
                "A block that also scans backwards needs all tokens at once: call the block itself, not its step."
            )
        x, z = self.in_proj(hidden_states.squeeze(1)).chunk(2, dim=-1)  # (b, d) each
        x = causal_conv1d_update(x, conv_state, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.activation)
        dt, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        dt, A = F.linear(dt, self.dt_proj.weight), -torch.exp(at_least_float32(self.A_log))
        y = selective_state_update(ssm_state, x, dt, A, B, C, self.D, z=z, dt_bias=self.dt_proj.bias, dt_softplus=True)
        return self.out_proj(y).unsqueeze(1), conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> States:
        """Zero states for `step`: the last inputs of the convolution (b, d, k) and the scan's state (b, d, n)."""
        conv, scan = self.conv1d.weight, self.dt_proj.weight
        conv_state = conv.new_zeros(batch_size, self.d_inner, self.d_conv, dtype=dtype or conv.dtype)
        return conv_state, scan.new_zeros(batch_size, self.d_inner, self.d_state, dtype=dtype or scan.dtype)

    def _get_states_from_cache(self, inference_params: Any, batch_size: int, initialize_states: bool = False) -> States:
        if self.layer_idx is None:
            raise UserError("Give each Mamba a layer_idx: its state is stored under it.")
        kept = inference_params.key_value_memory_dict
        if self.layer_idx not in kept:
            kept[self.layer_idx] = self.allocate_inference_cache(batch_size, 0)
        elif initialize_states:
            for state in kept[self.layer_idx]:
                state.zero_()
        return kept[self.layer_idx]
