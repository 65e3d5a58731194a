"""How the null space sees a model: blocks, the parts of their parameters by kind, and a way to observe their features.

An adapter is a function from a module and its name to a `Block`; it is registered for the module's class. Other
packages add their own through the entry point group `mambacl.adapters`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from mambacl.backbones.defocus import Mixer
from mambacl.nullspace.covariance import Features
from mambacl.nullspace.projectors import Side
from mambacl.registry import Registry

Record = Callable[[Features], None]


@dataclass(frozen=True)
class Part:
    """A parameter, or some of its rows, that plays one role in the block."""

    kind: str  # W_delta, W_B, W_C, A, out
    parameter: str  # full name in the model
    rows: tuple[int, int] | None = None
    side: Side = "right"  # where the projector stands: update P, or P update

    @property
    def name(self) -> str:
        return self.parameter if self.rows is None else f"{self.parameter}[{self.rows[0]}:{self.rows[1]}]"

    def of(self, parameter: Tensor) -> Tensor:
        """The part's rows of its parameter, or of anything in its shape."""
        return parameter if self.rows is None else parameter[self.rows[0] : self.rows[1]]


@dataclass(frozen=True)
class Block:
    name: str
    parts: tuple[Part, ...]
    observe: Callable[[Record | None], None]  # starts showing features to the record, or stops


Adapter = Callable[[nn.Module, str], Block]
ADAPTERS: Registry[tuple[type[nn.Module], Adapter]] = Registry("null-space adapter", "mambacl.adapters")


def find_blocks(model: nn.Module) -> list[Block]:
    """The blocks of a model that an adapter knows, in the model's order."""
    adapters = [ADAPTERS.get(name) for name in ADAPTERS.names()]
    blocks = []
    for name, module in model.named_modules():
        for module_class, adapter in adapters:
            if isinstance(module, module_class):
                blocks.append(adapter(module, name))
    return blocks


def selective_ssm(module: nn.Module, name: str) -> Block:
    """Our own mixers: x_proj holds the rows of W_delta, W_B and W_C; the module shows its features to `observer`."""
    assert isinstance(module, Mixer)
    rank, states = module.config.time_step_rank, module.config.state_size
    prefix = f"{name}." if name else ""
    x_proj = prefix + "x_proj.weight"

    def observe(record: Record | None) -> None:
        module.observer = record

    return Block(
        name,
        (
            Part("W_delta", x_proj, (0, rank)),
            Part("W_B", x_proj, (rank, rank + states)),
            Part("W_C", x_proj, (rank + states, rank + 2 * states)),
            Part("A", prefix + "A_log", side="left"),
            Part("out", prefix + "out_proj.weight"),
        ),
        observe,
    )


ADAPTERS.add("defocus_mamba", (Mixer, selective_ssm))
