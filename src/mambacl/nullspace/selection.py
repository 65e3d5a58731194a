"""Selects, for a setting, the parameters of a model that train, and those protected with their features."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from mambacl.errors import UserError
from mambacl.nullspace.block_readers import find_blocks
from mambacl.nullspace.blocks import Block, Part, Side, named_modules, named_parameters
from mambacl.nullspace.covariance import GRAMS
from mambacl.nullspace.projectors import Key
from mambacl.nullspace.settings import Setting
from mambacl.registry import did_you_mean

ELEMENTWISE = "delta-elementwise"
SIDES: tuple[Side, ...] = ("right", "left")


@dataclass(frozen=True)
class Protection:
    """A part whose updates a feature of its block restricts."""

    block: str
    part: Part
    feature: str  # its name in settings
    inputs: tuple[str, ...]  # the block's names for the inputs of the feature
    projector: str = "null-space"  # the setting's

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def label(self) -> str:
        """The feature, with the block's names for its inputs if they are not the usual ones."""
        if self.projector == "weights":
            return self.name
        usual = ("delta",) if self.elementwise else GRAMS[self.feature].inputs
        return self.feature if self.inputs == usual else f"{self.feature}({', '.join(self.inputs)})"

    @property
    def key(self) -> Key:
        """Parts that multiply the same tensors of a block have the same key and share a projector."""
        return self.block, self.label

    @property
    def elementwise(self) -> bool:
        """Whether a box restricts it, not a projector."""
        return self.feature == ELEMENTWISE


class Selection:
    """What trains and what is protected. Made once: parameters added to the model later are ignored, like those of the
    modules in `leave`."""

    def __init__(self, model: nn.Module, setting: Setting, leave: Sequence[str] = ()) -> None:
        self.leave = tuple(leave)
        for name in self.leave:
            if name not in (modules := named_modules(model)):
                raise UserError(f"The model has no module '{name}' to leave.{did_you_mean(name, modules)}")
        self.shapes = {name: parameter.shape for name, parameter in named_parameters(model).items()}
        found = self._found(model, every_layer=setting.layers == "all")
        selective = [block for block in found if block.selective]
        wanted = setting.blocks
        highest = wanted - 1 if isinstance(wanted, int) else max(wanted, default=-1) if wanted is not None else 0
        if wanted is not None and not 0 <= highest < len(selective):
            raise UserError(f"blocks = {wanted} does not fit a model of {len(selective)} blocks.")
        outside = {block.name for i, block in enumerate(selective) if not setting.trains_block(i)}
        self.blocks = [block for block in found if block.name not in outside]
        claimed = {part.parameter for _, part in self.parts()}
        self.others: list[str] = []
        """with layers="all": names of parameters that belong to no block"""
        if setting.layers == "all":
            self.others = [
                name
                for name in self.shapes
                if name not in claimed
                and not self.leaves(name)
                and not any(name.startswith(f"{block}.") for block in outside)
            ]
        rules = {part.kind: setting.rule(part.kind) for _, part in self.parts()}
        self.fixed = [part for _, part in self.parts() if not rules[part.kind].trains]
        projector = setting.projector
        protected = [(b, p) for b, p in self.parts() if rules[p.kind].trains and rules[p.kind].projected]
        if projector == "weights":
            self.protections = self._of_weights(protected)
        else:
            self.protections = [_protection(b, part, rules[part.kind].feature, projector) for b, part in protected]
        if projector == "recursive":
            self._check_no_experts(protected)
        trained = {part.parameter for _, part in self.parts() if rules[part.kind].trains}
        if setting.others != "fixed":
            trained |= set(self.others)
        self.trained = [name for name in self.shapes if name in trained]
        """parameters with rows that train in some task, in the model's order"""
        one_per_head = any(p.kind == "A" and len(self.shapes[p.parameter]) == 1 for _, p in self.parts())
        if setting.relax > 0 and one_per_head:
            raise UserError("relax does not support an A with one number per head, as in Mamba-2: use relax 0.")

    def _found(self, model: nn.Module, every_layer: bool) -> list[Block]:
        found = []
        for block in find_blocks(model, every_layer):
            if not self.leaves(block.name):
                parts = [part for part in block.parts if not self.leaves(part.parameter)]
                if not every_layer:  # plain layers inside a block do not train
                    parts = [part for part in parts if part.kind not in ("linear", "conv") or part.index]
                found.append(dataclasses.replace(block, parts=tuple(parts)))
        if not any(block.parts for block in found):
            advice = "nor a linear or convolution layer for it" if every_layer else "layers='all' protects plain layers"
            raise UserError(
                "NullSpace found nothing to protect: the model has no selective SSM that a block reader knows; "
                f"{advice}; or register a block reader in the entry point group 'mambacl.block_readers'."
            )
        return found

    def _check_no_experts(self, protected: Sequence[tuple[Block, Part]]) -> None:
        for block, part in protected:
            if block.may_rest or (part.kind == "linear" and len(self.shapes[part.parameter]) == 3):
                raise UserError(
                    f"projector recursive does not protect experts, as {block.name}: the batches' mean inputs that it "
                    f"absorbs leave out some of them. Use rule='gpm', or leave=('{block.name}',)."
                )

    def _of_weights(self, protected: Sequence[tuple[Block, Part]]) -> list[Protection]:
        """Both sides of each matrix that has protected rows."""
        found: dict[str, Protection] = {}
        for block, part in protected:
            index = part.index[:1] if len(self.shapes[part.parameter]) == 3 and part.kind != "conv" else ()
            for side in SIDES:
                both = Part("weight", part.parameter, index, side, mark=".outputs" if side == "left" else "")
                if part.kind == "conv":
                    raise UserError("projector weights does not protect convolutions: set conv.trains to false.")
                found.setdefault(both.name, Protection(block.name, both, "weight", (), "weights"))
        return list(found.values())

    def parts(self) -> Iterator[tuple[Block, Part]]:
        for block in self.blocks:
            for part in block.parts:
                yield block, part

    def projected(self) -> Iterator[Protection]:
        """The protections with a projector that a decomposition gives."""
        return (p for p in self.protections if not p.elementwise and p.projector != "recursive")

    def recursive(self) -> dict[Key, list[Part]]:
        """By feature, the parts with a projector that changes during training."""
        found: dict[Key, list[Part]] = {}
        for p in self.protections:
            if p.projector == "recursive":
                found.setdefault(p.key, []).append(p.part)
        return found

    def leaves(self, name: str) -> bool:
        """Whether a module or parameter is in `leave`."""
        return any(name == module or name.startswith(f"{module}.") for module in self.leave)

    def is_new(self, name: str) -> bool:
        """Whether a parameter was added to the model after the selection was made."""
        return name not in self.shapes and not self.leaves(name)


def _protection(block: Block, part: Part, feature: str, projector: str) -> Protection:
    names = ("delta",) if feature == ELEMENTWISE else GRAMS[feature].inputs
    return Protection(block.name, part, feature, tuple(part.inputs.get(name, name) for name in names), projector)
