"""Block readers for De-focus Mamba, Vim, VMamba, MambaVision, the plain Mamba block, Mamba-2 and plain layers.

They recognise a module by its parameters, not by its class, so they work for our backbones, `mamba_ssm` and
`transformers`. De-focus Mamba is the exception, because its B and C are rotated. Hooks read the features: the input of
the block (tokens), the input of x_proj (x), its output (delta, also unbiased: without dt_proj's bias; B and C) and the
input of out_proj (out). The inputs of in_proj and of the convolution are computed from the tokens.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.backbones.defocus import Mixer
from mambacl.errors import UserError
from mambacl.nullspace.blocks import BLOCK_READERS, Block, Part, batched, first_tensor, named_modules, plain_name
from mambacl.nullspace.experts import experts
from mambacl.nullspace.shards import whole
from mambacl.nullspace.statistics import Features, Record
from mambacl.ops.precision import at_least_float32, full_precision


def has(module: nn.Module, *names: str) -> bool:
    return all(getattr(module, name, None) is not None for name in names)


def step_sizes(dt: Tensor, weight: Tensor, bias: Tensor | None, bias_times: int = 1) -> Tensor:
    """softplus(W_dt dt + b), in float32 or better."""
    with full_precision(dt):
        weight, bias = whole(weight), None if bias is None else bias_times * whole(bias)
        return F.softplus(at_least_float32(F.linear(dt.to(weight.dtype), weight, bias)))


def x_proj_parts(prefix: str, suffix: str, rank: int, states: int) -> list[Part]:
    """The parts of one direction of a Mamba-1 block. `suffix` distinguishes the directions in names and features."""
    own = ("x", "delta", "unbiased", "dt", "B", "C", "A", "scan")
    inputs = {name: name + suffix for name in own} if suffix else {}
    x_proj = f"{prefix}x_proj{suffix}.weight"
    return [
        Part("W_delta", x_proj, ((0, rank),), inputs=inputs),
        Part("W_B", x_proj, ((rank, rank + states),), inputs=inputs),
        Part("W_C", x_proj, ((rank + states, rank + 2 * states),), inputs=inputs),
        Part("W_dt", f"{prefix}dt_proj{suffix}.weight", inputs=inputs),
        Part("A", f"{prefix}A{suffix}_log", side="left", inputs=inputs),
    ]


def causal_windows(u: Tensor, kernel: int) -> Tensor:
    """The windows of a causal depthwise convolution: (images, tokens, channels, kernel)."""
    return F.pad(u, (0, 0, kernel - 1, 0)).unfold(1, kernel, 1)


def centred_windows(u: Tensor, kernel: int) -> Tensor:
    """The windows of a centred depthwise convolution: (images, tokens, channels, kernel)."""
    return F.pad(u, (0, 0, (kernel - 1) // 2, kernel // 2)).unfold(1, kernel, 1)


CAUSAL = {"conv1d": lambda u, z, conv: causal_windows(u, conv.kernel_size[0])}


def mamba_block(
    module: nn.Module,
    name: str,
    suffixes: tuple[str, ...] = ("",),
    convs: Mapping[str, Callable[[Tensor, Tensor, nn.Conv1d], Tensor]] = CAUSAL,
    bias_times: int = 1,
    finish: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None,
    scale: float = 1.0,
) -> Block:
    """A Mamba-1 block with one direction per suffix. `convs` computes the windows of its depthwise convolutions from
    the two outputs of in_proj; `finish` transforms dt, B and C."""
    named: Any = module
    prefix = f"{name}." if name else ""
    rank, states = named.dt_proj.weight.shape[1], named.A_log.shape[1]
    parts = [part for suffix in suffixes for part in x_proj_parts(prefix, suffix, rank, states)]
    convs = {conv: windows for conv, windows in convs.items() if has(module, conv, "in_proj")}
    for conv in convs:
        width = getattr(module, conv).weight.shape[0]
        parts.append(Part("conv", f"{prefix}{conv}.weight", groups=width, inputs={"in": conv}))
    if has(module, "in_proj"):
        parts.append(Part("linear", f"{prefix}in_proj.weight", inputs={"in": "tokens"}))
    parts.append(Part("out", f"{prefix}out_proj.weight"))

    def shown(x: Tensor, projected: Tensor, suffix: str) -> Features:
        dt, B, C = projected.split([rank, states, states], dim=-1)
        if finish is not None:
            dt, B, C = finish(dt, B, C)
        dt_proj: nn.Linear = getattr(module, f"dt_proj{suffix}")

        def delta(bias: Tensor | None = dt_proj.bias) -> Tensor:
            unscaled = step_sizes(dt, dt_proj.weight, bias, bias_times)
            return unscaled if scale == 1.0 else unscaled / scale

        A = getattr(module, f"A{suffix}_log")
        found: Features = {"x": x, "delta": delta, "unbiased": partial(delta, None), "dt": dt, "B": B, "C": C, "A": A}
        found = {**found, "scan": lambda: (x, delta(), A, B, C)}
        return {key + suffix: value for key, value in found.items()}

    def hooks(record: Record) -> list[Any]:
        batch: list[int] = []

        def enter(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            tokens = first_tensor(arguments, keywords)
            batch[:] = [len(tokens)]

            def windows(conv: str) -> Tensor:
                layer = named.in_proj
                bias = None if layer.bias is None else whole(layer.bias)
                u, z = F.linear(tokens, whole(layer.weight), bias).chunk(2, dim=-1)
                return convs[conv](u, z, getattr(module, conv))

            record({"tokens": tokens, **{conv: partial(windows, conv) for conv in convs}})

        def projected(suffix: str) -> Callable[..., None]:
            def show(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
                record(shown(batched(arguments[0], batch[0]), batched(output, batch[0]), suffix))

            return show

        def leave(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            record({"out": batched(arguments[0], batch[0]), "output": batched(output, batch[0])})

        handles = [module.register_forward_pre_hook(enter, with_kwargs=True)]
        for suffix in suffixes:
            handles.append(getattr(module, f"x_proj{suffix}").register_forward_hook(projected(suffix)))
        return [*handles, named.out_proj.register_forward_hook(leave)]

    return Block(name, module, tuple(parts), hooks)


def defocus(module: nn.Module, name: str) -> Block | None:
    if not isinstance(module, Mixer):
        return None

    def rotate(dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with full_precision(dt):
            return dt, module.rotate(B.unsqueeze(2)).squeeze(2), module.rotate(C.unsqueeze(2)).squeeze(2)

    return mamba_block(module, name, finish=rotate, scale=module.config.delta_scale_factor)


def vim(module: nn.Module, name: str) -> Block | None:
    """Two directions; the features of the backward one are in its own, flipped, order."""
    if not has(module, "x_proj", "x_proj_b", "dt_proj", "dt_proj_b", "A_log", "A_b_log", "out_proj"):
        return None
    backward = {"conv1d_b": lambda u, z, conv: causal_windows(u.flip(1), conv.kernel_size[0])}
    return mamba_block(module, name, suffixes=("", "_b"), convs={**CAUSAL, **backward})


def mambavision(module: nn.Module, name: str) -> Block | None:
    """The bias of delta enters twice; the convolutions of x and z are centred; the input of out_proj is the scan's
    output and z, concatenated."""
    if not has(module, "conv1d_x", "conv1d_z", "x_proj", "dt_proj", "A_log", "out_proj"):
        return None
    convs = {
        "conv1d_x": lambda u, z, conv: centred_windows(u, conv.kernel_size[0]),
        "conv1d_z": lambda u, z, conv: centred_windows(z, conv.kernel_size[0]),
    }
    return mamba_block(module, name, convs=convs, bias_times=2)


def mamba(module: nn.Module, name: str) -> Block | None:
    """The plain block, as in `mamba_ssm` and `transformers`; FalconMamba also normalises dt, B and C."""
    if not has(module, "x_proj", "dt_proj", "A_log", "out_proj") or has(module, "x_proj_b"):
        return None
    layers: Any = module
    normalised = has(module, "dt_layernorm", "b_layernorm", "c_layernorm")

    def normalise(dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return layers.dt_layernorm(dt), layers.b_layernorm(B), layers.c_layernorm(C)

    return mamba_block(module, name, finish=normalise if normalised else None)


def mamba2(module: nn.Module, name: str) -> Block | None:
    """Mamba-2: in_proj computes the gate, x, B, C and dt, so its input is the X of W_B, W_C and W_delta; its rows for
    the gate and x are a plain linear layer. A has one number per head."""
    if not has(module, "in_proj", "dt_bias", "A_log", "out_proj") or has(module, "x_proj"):
        return None
    layers: Any = module
    prefix = f"{name}." if name else ""
    heads, inner = len(layers.A_log), layers.out_proj.weight.shape[1]
    rows = layers.in_proj.weight.shape[0]
    states = (rows - heads - 2 * inner) // 2  # groups x states
    if layers.A_log.dim() != 1 or states < 1 or 2 * inner + 2 * states + heads != rows:
        return None
    in_proj, first = f"{prefix}in_proj.weight", 2 * inner
    parts = (
        Part("linear", in_proj, ((0, first),), inputs={"in": "x"}),
        Part("W_B", in_proj, ((first, first + states),)),
        Part("W_C", in_proj, ((first + states, first + 2 * states),)),
        Part("W_delta", in_proj, ((rows - heads, rows),)),
        Part("conv", f"{prefix}conv1d.weight", groups=inner + 2 * states, inputs={"in": "conv"}),
        Part("A", f"{prefix}A_log", side="left"),
        Part("out", f"{prefix}out_proj.weight"),
    )
    low, high = getattr(module, "time_step_limit", getattr(module, "dt_limit", (0.0, float("inf"))))
    kernel = layers.conv1d.weight.shape[-1]

    def hooks(record: Record) -> list[Any]:
        def projected(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            _, mixed, dt = output.split([inner, inner + 2 * states, heads], dim=-1)

            def delta() -> Tensor:
                return F.softplus(at_least_float32(dt) + at_least_float32(layers.dt_bias)).clamp(low, high)

            B, C = (mixed[..., inner:]).split(states, dim=-1)  # before their convolution
            record({"x": arguments[0], "delta": delta, "dt": dt, "B": B, "C": C, "A": layers.A_log,
                    "conv": lambda: causal_windows(mixed, kernel)})  # fmt: skip

        def leave(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            record({"out": arguments[0], "output": output})

        return [layers.in_proj.register_forward_hook(projected), layers.out_proj.register_forward_hook(leave)]

    return Block(name, module, parts, hooks)


def vmamba(module: nn.Module, name: str) -> Block | None:
    """SS2D: four directions over the same tokens, so they share X. Each direction's delta, B and C are in the order of
    the image, which does not affect covariances."""
    if not has(module, "A_logs", "dt_projs_weight", "dt_projs_bias", "x_proj_weight", "act", "out_proj"):
        return None
    layers: Any = module
    prefix = f"{name}." if name else ""
    directions, width, rank = layers.dt_projs_weight.shape
    states = layers.A_logs.shape[1]
    parts = []
    for k in range(directions):
        inputs = {key: f"{key}{k}" for key in ("delta", "unbiased", "dt", "B", "C", "A", "scan")}
        x_proj = f"{prefix}x_proj_weight"
        parts += [
            Part("W_delta", x_proj, (k, (0, rank)), inputs=inputs),
            Part("W_B", x_proj, (k, (rank, rank + states)), inputs=inputs),
            Part("W_C", x_proj, (k, (rank + states, rank + 2 * states)), inputs=inputs),
            Part("W_dt", f"{prefix}dt_projs_weight", (k,), inputs=inputs),
            Part("A", f"{prefix}A_logs", ((k * width, (k + 1) * width),), side="left", inputs=inputs),
        ]
    parts.append(Part("out", f"{prefix}out_proj.weight"))

    channels_last = getattr(module, "channels_last", not getattr(module, "channel_first", False))

    def tokens(image: Tensor) -> Tensor:
        """(b, l, d) from an image with channels first or last."""
        return image.flatten(1, 2) if channels_last else image.flatten(2).mT

    def hooks(record: Record) -> list[Any]:
        latest: list[Tensor] = []  # the first version calls `act` on its gate too, before x

        def activated(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
            latest[:] = [output]

        def leave(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            x = tokens(latest[0])
            height = latest[0].shape[1 if channels_last else 2]

            def ordered(values: Tensor, k: int) -> Tensor:
                """In the order of direction k: by rows, by columns, and both backwards."""
                if k % 2:
                    values = values.unflatten(1, (height, -1)).transpose(1, 2).flatten(1, 2)
                return values.flip(1) if k >= 2 else values

            found: dict[str, Any] = {"x": x}
            for k in range(directions):
                projected = F.linear(at_least_float32(x), at_least_float32(layers.x_proj_weight[k]))
                dt, B, C = projected.split([rank, states, states], dim=-1)

                def delta(k: int = k, dt: Tensor = dt, biased: bool = True) -> Tensor:
                    return step_sizes(dt, layers.dt_projs_weight[k], layers.dt_projs_bias[k] if biased else None)

                A = layers.A_logs[k * width : (k + 1) * width]

                def scan(k: int = k, delta: Any = delta, A: Tensor = A, B: Tensor = B, C: Tensor = C) -> Any:
                    return tuple(value if value is A else ordered(value, k) for value in (x, delta(), A, B, C))

                found |= {f"delta{k}": delta, f"unbiased{k}": partial(delta, biased=False), f"scan{k}": scan}
                found |= {f"dt{k}": dt, f"B{k}": B, f"C{k}": C, f"A{k}": A}
            record(found)
            record({"out": tokens(arguments[0]), "output": tokens(output)})

        return [layers.act.register_forward_hook(activated), layers.out_proj.register_forward_hook(leave)]

    return Block(name, module, tuple(parts), hooks)


def plain_layer(module: nn.Module, name: str) -> Block | None:
    """Any `nn.Linear`, `nn.Conv1d` or `nn.Conv2d`; its feature is its input. One of `experts` may get none."""
    if isinstance(module, nn.Linear):
        part = Part("linear", f"{name}.weight" if name else "weight")
    elif isinstance(module, (nn.Conv1d, nn.Conv2d)):
        part = Part("conv", f"{name}.weight" if name else "weight", groups=module.groups)
    else:
        return None

    def hooks(record: Record) -> list[Any]:
        def show(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = first_tensor(arguments, named)
            rows = x.flatten(1, -2) if isinstance(module, nn.Linear) and x.dim() > 2 else x
            if isinstance(module, nn.Linear):
                record({"in": rows if rows.dim() == 3 else rows[:, None]})
            else:
                record({"in": lambda: windows(module, x)})

        return [module.register_forward_pre_hook(show, with_kwargs=True)]

    return Block(name, module, (part,), hooks, selective=False, may_rest="experts" in name.split("."))


def windows(conv: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """The windows of each group of a convolution: (images, positions, groups, values)."""
    dims = len(conv.kernel_size)
    if x.dim() == dims + 1:
        x = x[None]
    if isinstance(conv.padding, str):
        totals = [d * (k - 1) if conv.padding == "same" else 0 for d, k in zip(conv.dilation, conv.kernel_size)]  # noqa: B905
        pads = [(total // 2, total - total // 2) for total in totals]
    else:
        pads = [(p, p) for p in conv.padding]
    flat = [side for pair in reversed(pads) for side in pair]
    x = F.pad(x, flat, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)
    kernel, stride, dilation = conv.kernel_size, conv.stride, conv.dilation
    if dims == 1:
        x, kernel, stride, dilation = x[:, :, None], (1, *kernel), (1, *stride), (1, *dilation)
    patches = F.unfold(x, kernel, dilation=dilation, stride=stride)  # (b, c k, positions)
    return patches.mT.unflatten(-1, (conv.groups, -1))


BUILT_IN = {reader.__name__: reader for reader in (defocus, vim, vmamba, mambavision, mamba, mamba2)}
for name, reader in BUILT_IN.items():
    BLOCK_READERS.add(name, reader)


def shared_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter that several modules share."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if plain_name(name) not in names.setdefault(id(parameter), []):
            names[id(parameter)].append(plain_name(name))
    return {name: together for together in names.values() if len(together) > 1 for name in together}


def find_blocks(model: nn.Module, layers: bool = False) -> list[Block]:
    """The selective SSMs of a model, in its order; with `layers` also the linear and convolution layers around them,
    and experts.

    Other packages' readers are tried first. A block whose parameters belong to a block found earlier is skipped. A
    plain layer that shares its weight, e.g. with an embedding, is skipped: its input is not all that the weight
    multiplies.
    """
    known = BLOCK_READERS.names()
    names = [*(name for name in known if name not in BUILT_IN), *(name for name in BUILT_IN if name in known)]
    readers = [BLOCK_READERS.get(name) for name in names]
    modules, shared = named_modules(model), shared_names(model)
    blocks: list[Block] = []
    claimed: set[str] = set()
    for name, module in modules.items():
        found = next((block for reader in readers if (block := reader(module, name)) is not None), None)
        if found is not None and not claimed & {part.parameter for part in found.parts}:
            blocks.append(found)
            claimed |= {part.parameter for part in found.parts}
    if tied := sorted(name for name in claimed if name in shared):
        users = ", ".join(name for name in shared[tied[0]] if name != tied[0])
        raise UserError(
            f"The parameter {tied[0]} of a selective SSM is shared with {users}: give each its own (a copy), or "
            "register a block reader for both."
        )
    if layers:
        for name, module in modules.items():
            layer = plain_layer(module, name) or experts(module, name)
            if layer is not None and not {part.parameter for part in layer.parts} & (claimed | set(shared)):
                blocks.append(layer)
        order = {name: place for place, name in enumerate(modules)}
        blocks.sort(key=lambda block: order[block.name])
    return blocks
