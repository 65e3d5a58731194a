"""`NullSpace`: what a model must not change, gathered after each task and kept out of every later update."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.files import read_tensors, write_tensors
from mambacl.log import logger
from mambacl.nullspace import selective  # noqa: F401  (registers its adapters)
from mambacl.nullspace.adapters import Block, Form, Part, Side, find_blocks, named_modules, named_parameters
from mambacl.nullspace.audit import Drift, drift, record
from mambacl.nullspace.bank import Bank, Fence, Snapshot, fences
from mambacl.nullspace.describing import description
from mambacl.nullspace.elementwise import Box
from mambacl.nullspace.gathering import Gathered, Key, Wanted, gather, run_batches, wanted_feature
from mambacl.nullspace.optimizer import project_steps
from mambacl.nullspace.projectors import AT_A_TIME, SMALL, Decomposition, Projector, decompose
from mambacl.nullspace.settings import KINDS, Setting, setting_named
from mambacl.nullspace.shelf import Shelf
from mambacl.nullspace.states import State, from_tensors, to_tensors
from mambacl.registry import did_you_mean

CARRIED = "carried."


@dataclasses.dataclass(frozen=True)
class Consolidation:
    """What `consolidate` did: images seen, and the seconds of its two halves."""

    images: int
    covariance_seconds: float
    decomposition_seconds: float


@dataclasses.dataclass(frozen=True)
class Protection:
    """A parameter (or rows of it), the feature that multiplies it, from which side, and in which way."""

    name: str
    block: str
    kind: str
    feature: str
    side: Side
    form: Form


class NullSpace:
    """Finds the selective SSMs of a model, remembers the features of finished tasks, and projects updates.

        space = NullSpace(model, setting="paper", eta=0.95)
        optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=2e-4))
        ...                        # train one task as usual
        space.consolidate(loader)  # after each task

    `setting`: a name ("paper", "public-code", "exact") or a `Setting`; `overrides` change fields of it. `leave`: names
    of modules that are none of its business, such as a classifier. `folder`: for covariances that are kept on disk.
    """

    def __init__(
        self,
        model: nn.Module,
        setting: str | Setting = "paper",
        *,
        leave: str | Sequence[str] = (),
        folder: str | Path | None = None,
        **overrides: Any,
    ) -> None:
        self.setting = (setting_named(setting) if isinstance(setting, str) else setting).override(**overrides)
        self.model = unwrapped(model)
        self.leave = (leave,) if isinstance(leave, str) else tuple(leave)
        for name in self.leave:
            if name not in (modules := named_modules(self.model)):
                raise UserError(f"The model has no module '{name}' to leave.{did_you_mean(name, modules)}")
        every_layer = self.setting.layers == "all"
        found = [block for block in find_blocks(self.model, every_layer) if not self.leaves(block.name)]
        found = [
            dataclasses.replace(block, parts=tuple(part for part in block.parts if not self.leaves(part.parameter)))
            for block in found
        ]
        if not every_layer:
            found = [dataclasses.replace(block, parts=_of_the_ssm(block.parts)) for block in found]
        if not any(block.parts for block in found):
            advice = "nor a linear or convolution layer for it" if every_layer else "layers='all' protects plain layers"
            raise UserError(
                "NullSpace found nothing to protect: the model has no selective SSM that an adapter knows; "
                f"{advice}; or register an adapter in the entry point group 'mambacl.adapters'."
            )
        self._check_blocks(sum(block.selective for block in found))
        places = {block.name: i for i, block in enumerate(block for block in found if block.selective)}
        self.blocks = [b for b in found if not b.selective or self.setting.trains_block(places[b.name])]
        self._outside = [block.name for block in found if block not in self.blocks]  # not to be fine-tuned
        self.tasks = 0
        self.moved: list[dict[str, Tensor]] = []  # by task, then by part: see `Bank.moved`
        self._wrapped: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._shelf = Shelf(self.setting.covariances, self._device(), None if folder is None else Path(folder))
        self.gathered: list[Gathered] = []  # a task each, or all in one
        self._spectra: dict[Key, tuple[Tensor, Tensor]] = {}
        self.bank: Bank | None = None
        self._fences: list[Fence] = []
        self._rules = {kind: self.setting.rule(kind) for kind in KINDS}
        named = named_parameters(self.model)
        if self.setting.relax > 0 and any(p.kind == "A" and named[p.parameter].dim() == 1 for _, p in self.parts()):
            raise UserError("relax is not there for blocks whose A is a number a head, as in Mamba-2: use relax 0.")
        self._carried: dict[str, Tensor] = {}  # counts of this task from before a merge
        self._fixed = [part for _, part in self.parts() if not self._rules[part.kind].trains]
        logger.info("%s", self.describe())

    def _check_blocks(self, count: int) -> None:
        wanted = self.setting.blocks
        highest = wanted - 1 if isinstance(wanted, int) else max(wanted, default=-1) if wanted is not None else 0
        if wanted is not None and (highest >= count or highest < 0):
            raise UserError(f"blocks = {wanted} does not fit a model of {count} blocks.")

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def leaves(self, name: str) -> bool:
        """Whether a module or parameter is one to leave alone."""
        return any(name == module or name.startswith(f"{module}.") for module in self.leave)

    # What is trained and what is protected

    def parts(self) -> Iterator[tuple[Block, Part]]:
        for block in self.blocks:
            for part in block.parts:
                yield block, part

    def _others(self) -> list[str]:
        """With every layer trained: names of parameters that are no part of a block."""
        if self.setting.layers != "all":
            return []
        known = {part.parameter for _, part in self.parts()}
        names = [name for name in named_parameters(self.model) if name not in known and not self.leaves(name)]
        return [name for name in names if not any(name.startswith(f"{block}.") for block in self._outside)]

    def trained_names(self) -> list[str]:
        """Parameters of which some rows are trained in some task, in the model's order."""
        trained = {part.parameter for _, part in self.parts() if self._rules[part.kind].trains}
        if self.setting.others != "fixed":
            trained |= set(self._others())
        return [name for name in named_parameters(self.model) if name in trained]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters to give to an optimizer."""
        named = named_parameters(self.model)
        return [named[name] for name in self.trained_names()]

    def freeze_others(self) -> None:
        """Only what this space trains, or leaves, keeps its gradient."""
        trained = set(self.trained_names())
        for name, parameter in named_parameters(self.model).items():
            parameter.requires_grad_(name in trained or self.leaves(name))

    def describe(self) -> str:
        """One line a kind: what is trained, what is protected, and from which feature."""
        protects = next(iter(self.protected()), None) is not None
        return description(self.setting, self.blocks, named_parameters(self.model), self._others(), protects)

    def protections(self) -> list[Protection]:
        """What is protected, and by what, as data."""
        return [
            Protection(part.name, block.name, part.kind, wanted.key[1], part.side, _form(part, wanted))
            for block, part, wanted in self.protected()
        ]

    def protected(self) -> Iterator[tuple[Block, Part, Wanted]]:
        for block, part in self.parts():
            rule = self._rules[part.kind]
            if rule.trains and rule.projected:
                yield block, part, wanted_feature(block, part, rule.feature)

    def projected(self) -> Iterator[tuple[Part, Key]]:
        """Protected parts that have a projector, and its key."""
        for _, part, wanted in self.protected():
            if not wanted.elementwise:
                yield part, wanted.key

    def projectors(self) -> dict[str, Projector]:
        """The projector in force for each protected part, by parameter name and rows."""
        eta, scaling = self.setting.eta, self.setting.scaling
        return {name: decomposition.projector(eta, scaling) for name, decomposition in self.decompositions().items()}

    def decompositions(self) -> dict[str, Decomposition]:
        """Spectrum, null rank and basis for each protected part, by parameter name and rows."""
        if self.bank is None:
            return {}
        return {part.name: self._decomposition(part, key) for part, key in self.projected()}

    def _decomposition(self, part: Part, key: Key) -> Decomposition:
        assert self.bank is not None
        stack, slot, number = self.bank.slots[part.name]
        spectrum, ranks = self._spectra[key]
        width = int(torch.minimum(ranks, spectrum.shape[-1] - ranks).max())
        basis = stack.basis[slot.places[number], :, :, :width]
        return Decomposition(spectrum, ranks, basis if ranks.dim() else basis[0])

    def covariances(self) -> dict[str, Tensor]:
        """The accumulated covariance for each protected part, by parameter name and rows."""
        if not self.gathered:
            return {}
        return {part.name: self._covariance(key) for part, key in self.projected()}

    def _covariance(self, key: Key) -> Tensor:
        first, *rest = (gathered.covariances[key] for gathered in self.gathered)
        for other in rest:
            first = first + other
        return first

    def boxes(self) -> dict[str, Box]:
        """Where each part that is protected element by element may be."""
        return {name: box for fence in self._fences for name, box in fence.boxes().items()}

    # Training

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The same optimizer; from now on each of its steps is projected, and rows that do not train stay as they
        are. Wrapping it again changes nothing."""
        if optimizer not in self._wrapped:
            project_steps(optimizer, self)
            self._wrapped.add(optimizer)
        return optimizer

    def _pinned(self) -> list[str]:
        fixed = self.setting.others == "fixed" or (self.setting.others == "first-task" and self.tasks > 0)
        return self._others() if fixed else []

    def remember(self, tensors: Mapping[str, Tensor]) -> Snapshot:
        """Parameters as they are now, so that `Snapshot.project` can replace their change by what is allowed of it."""
        whole = [name for name in self._pinned() if name in tensors]
        parts = [part for part in self._fixed if part.parameter in tensors]
        with torch.no_grad():
            return Snapshot(
                {name: tensors[name].detach().clone() for name in whole},
                [(part, part.of(tensors[part.parameter]).detach().clone()) for part in parts],
                None if self.bank is None else self.bank.remember(tensors),
                [(fence, fence.remember(tensors)) for fence in self._fences],
            )

    def project(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], *, counted: bool = True) -> None:
        """Replaces the change of parameters from `before` to `after`, in place, by what is allowed of it."""
        self.remember(before).project(after, counted=counted)

    # The end of a task

    def consolidate(self, loader: Iterable[Any], forward: Callable[..., Any] | None = None) -> Consolidation:
        """Adds the features of a finished task to what is protected.

        `loader` gives batches: tensors, tuples that begin with one, or mappings of the forward function's arguments.
        They go through `forward`, by default the model, in evaluation mode. Before the first task, it protects what the
        model knows from elsewhere. Nothing changes if it fails.
        """
        with torch.inference_mode(False):
            return self._consolidate(loader, forward)

    def _consolidate(self, loader: Iterable[Any], forward: Callable[..., Any] | None) -> Consolidation:
        if isinstance(loader, Tensor) and loader.dim() <= 4:  # five: batches of images
            raise UserError("consolidate takes batches, got a tensor: give it [images], or images.split(100).")
        setting, started = self.setting, time.perf_counter()
        run = self.model if forward is None else forward
        protected = list(self.protected())
        gathered, images = gather(
            self.model,
            self.blocks,
            protected,
            lambda: run_batches(loader, run, self._device()),
            getattr(torch, setting.products),
            setting.accumulate == "batch-mean",
            setting.relax,
        )
        self._check_sizes(gathered)
        gathered = Gathered({key: self._shelf.put(c) for key, c in gathered.covariances.items()}, gathered.boxes)
        covered = time.perf_counter()
        self.take([*self.gathered, gathered], self.tasks + 1, [*self.moved, self.moved_now()])
        self._carried = {}
        self._say_what_is_protected()
        return Consolidation(images, covered - started, time.perf_counter() - covered)

    def _check_sizes(self, gathered: Gathered) -> None:
        named = named_parameters(self.model)
        for part, key in self.projected():
            size, covariance = part.matrix(named[part.parameter]).shape[-1], gathered.covariances[key]
            if covariance.shape[-1] != size:
                raise UserError(
                    f"{part.name} multiplies {size} values, the feature {key[1]} has {covariance.shape[-1]}: "
                    "choose another feature for it."
                )

    def take(self, gathered: list[Gathered], tasks: int, moved: list[dict[str, Tensor]]) -> None:
        """What was gathered, decomposed and in force; all at the end, so that a failure changes nothing. Unless tasks
        are kept apart, there are at most two to add up, and the newest is ours to change."""
        if not self.setting.keep_tasks and len(gathered) > 1:
            older, newest = gathered
            gathered = [newest.add_(older)]
        before, self.gathered = self.gathered, gathered
        try:
            decompositions = self._decompose() if gathered else {}
        except BaseException:
            self.gathered = before
            raise
        self._install(decompositions, State(tasks, gathered).boxes())
        self.tasks, self.moved = tasks, moved

    def _decompose(self) -> dict[Key, Decomposition]:
        setting, device = self.setting, self._device()
        keys = list(dict.fromkeys(key for _, key in self.projected()))
        precision, dtype = getattr(torch, setting.spectrum), self.basis_dtype()
        decompositions: dict[Key, Decomposition] = {}
        if setting.rank_over == "block":
            together: dict[object, list[Key]] = {}  # small ones of a shape, large ones a few at a time
            for number, key in enumerate(keys):
                shape = self.gathered[-1].covariances[key].shape
                together.setdefault(shape if shape[-1] <= SMALL else number // AT_A_TIME, []).append(key)
            for some in together.values():
                covariances = [self._covariance(key).to(device) for key in some]
                decompositions |= zip(some, decompose(covariances, setting.rank, precision, dtype), strict=True)
            return {key: decompositions[key] for key in keys}
        for label in dict.fromkeys(label for _, label in keys):  # a feature of all blocks at a time
            alike = [key for key in keys if key[1] == label]
            found = decompose([self._covariance(key).to(device) for key in alike], setting.rank, precision, dtype, True)
            decompositions |= zip(alike, found, strict=True)
        return decompositions

    def basis_dtype(self) -> torch.dtype:
        if next(self.model.parameters()).dtype == torch.float64:
            return torch.float64
        return getattr(torch, self.setting.storage)

    def _install(self, decompositions: Mapping[Key, Decomposition], boxes: Mapping[str, Box]) -> None:
        setting, device = self.setting, self._device()
        users: dict[Key, list[Part]] = {}
        for part, key in self.projected():
            users.setdefault(key, []).append(part)
        shapes = {name: parameter.shape for name, parameter in named_parameters(self.model).items()}
        uses = [(decomposition, users[key]) for key, decomposition in decompositions.items()]
        self.bank = Bank(uses, shapes, setting.eta, setting.scaling, self.basis_dtype(), device) if uses else None
        self._spectra = {key: (d.spectrum, d.ranks) for key, d in decompositions.items()}
        fenced = [part for _, part, _ in self.protected() if part.name in boxes]
        self._fences = fences(fenced, boxes, setting.eta, setting.relax > 0)

    def _say_what_is_protected(self) -> None:
        sizes = sorted(
            (spectrum.numel() - int(ranks.sum()), spectrum.numel()) for spectrum, ranks in self._spectra.values()
        )
        if not sizes:
            return
        count, size = sizes[len(sizes) // 2]
        hint = ""
        if "corner" in self.setting.rank and count < 0.1 * size:
            hint = "; the corner leaves nearly all free, energy:0.9 would protect more"
        elif count > 0.98 * size:
            other = "a smaller share" if self.setting.rank.startswith("energy") else "energy:0.99"
            hint = f"; {self.setting.rank} leaves nearly nothing free, {other} would leave more to learn with"
        logger.info("protected after task %d: %d of %d directions (median)%s", self.tasks, count, size, hint)

    def moved_now(self) -> dict[str, Tensor]:
        """By part, since the last consolidation: sums over steps of the squares of the optimizer's update, of its
        share in protected directions, of the update applied, and of that one's share: (4,) each."""
        moved = {} if self.bank is None else self.bank.moved()
        for fence in self._fences:
            moved |= {part.name: fence.energy[i] for i, part in enumerate(fence.parts)}
        rows = {name: row.cpu() for name, row in moved.items()}
        for name, row in self._carried.items():
            rows[name] = rows[name] + row if name in rows else row
        return rows

    def record(self, images: Any, forward: Callable[..., Any] | None = None) -> dict[str, Tensor]:
        """What the blocks make of a batch of images now (or of whatever `consolidate` takes): delta, A, B, C and the
        output, to audit later."""
        if not any(block.selective for block in self.blocks):
            raise UserError("There is nothing to record: the audit is about selective SSMs, and this model has none.")
        return record(self.model, self.blocks, images, forward)

    def audit(self, images: Any, recorded: Mapping[str, Tensor], forward: Callable[..., Any] | None = None) -> Drift:
        """How far delta, exp(delta A), delta B, C and the output of each block have moved on these images since they
        were recorded, relative to their norms. `moved` and `moved_now` say how much of the updates was protected."""
        now = self.record(images, forward)
        if {name: t.shape for name, t in now.items()} != {name: t.shape for name, t in recorded.items()}:
            raise UserError("This record is of another model, or of other images: its blocks or their sizes differ.")
        return drift({name: tensor.to(now[name].device) for name, tensor in recorded.items()}, now)

    # Several spaces, and tasks taken back

    def merge(self, other: "NullSpace") -> None:
        """Protects also what `other` does: a branch of the same model, trained apart. Covariances add."""
        self._check_same_setting(dataclasses.asdict(other.setting), "The other null space has")
        mine, theirs = self._signature(), other._signature()
        if mine != theirs:
            shown = ", ".join(sorted({name for name, *_ in mine ^ theirs})[:6])
            raise UserError(f"The other null space is of another model; it differs in {shown}.")
        if not other.gathered:
            return
        moved_in = [
            Gathered(
                {key: self._shelf.put(covariance.clone()) for key, covariance in one.covariances.items()},
                {name: box.to(self._device()) for name, box in one.boxes.items()},
            )
            for one in other.gathered
        ]
        counts = self.moved_now()
        self.take([*self.gathered, *moved_in], self.tasks + other.tasks, [*self.moved, *other.moved])
        self._carried = counts

    def _signature(self) -> set[tuple[str, Key, torch.Size]]:
        """What is protected, by what, and in which size."""
        named = named_parameters(self.model)
        return {(part.name, wanted.key, part.of(named[part.parameter]).shape) for _, part, wanted in self.protected()}

    def forget(self, task: int) -> None:
        """Takes back the consolidation of one task, counted from 0, as if it had never been."""
        if not self.setting.keep_tasks:
            raise UserError("forget needs each task's covariances: build the NullSpace with keep_tasks=True.")
        if not 0 <= task < self.tasks:
            raise UserError(f"There is no task {task} to forget: {self.tasks} were consolidated, counted from 0.")
        left = [one for number, one in enumerate(self.gathered) if number != task]
        moved = [one for number, one in enumerate(self.moved) if number != task]
        counts = self.moved_now()
        self.take(left, self.tasks - 1, moved)
        self._carried = counts

    # Saving

    def state_dict(self) -> dict[str, Tensor]:
        """Everything gathered so far, by parameter name and rows. Parts that share a feature share its tensors."""
        decompositions = {key: self._decomposition(part, key) for part, key in self.projected()} if self.bank else {}
        state = State(self.tasks, self.gathered, decompositions, self.moved)
        return to_tensors(state, list(self.protected()), self.setting.keep_tasks)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes up a saved state. One of another model or setting is an error, and changes nothing."""
        named = named_parameters(self.model)
        found = from_tensors(state, list(self.protected()), named, self.setting.keep_tasks)
        for one in found.gathered:
            one.covariances = {key: self._shelf.put(covariance) for key, covariance in one.covariances.items()}
        self._install(found.decompositions, found.boxes())
        self.gathered, self.tasks, self.moved = found.gathered, found.tasks, found.moved
        self._carried = {}

    def step_state_dict(self) -> dict[str, Tensor]:
        """What changes with each step: how much of the updates fell into protected directions so far."""
        slots = {} if self.bank is None else self.bank.slots
        energies = {name: slot.energy[number] for name, (_, slot, number) in slots.items()}
        for fence in self._fences:
            energies |= {part.name: fence.energy[i] for i, part in enumerate(fence.parts)}
        return {**energies, **{f"{CARRIED}{name}": row for name, row in self._carried.items()}}

    def load_step_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._carried = {n.removeprefix(CARRIED): row.cpu() for n, row in state.items() if n.startswith(CARRIED)}
        for name, tensor in self.step_state_dict().items():
            if name in state:
                tensor.copy_(state[name])

    def save(self, path: str | Path) -> None:
        """The state as safetensors; tensors that parts share are written once."""
        write_tensors(Path(path), self.state_dict(), {"setting": json.dumps(dataclasses.asdict(self.setting))})

    def load(self, path: str | Path) -> None:
        tensors, text = read_tensors(Path(path))
        self._check_same_setting(json.loads(text.get("setting", "{}")), f"{path} was saved under another setting:")
        self.load_state_dict(tensors)

    def _check_same_setting(self, other: Mapping[str, Any], words: str) -> None:
        own = dataclasses.asdict(self.setting)
        for name in (*KINDS, "layers", "accumulate", "keep_tasks"):
            if name in other and other[name] != own[name]:
                raise UserError(f"{words} {name} {other[name]}, this one {own[name]}.")


def _of_the_ssm(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Without whole linear and convolution layers, which are none of its business unless every layer is trained."""
    return tuple(part for part in parts if part.kind not in ("linear", "conv") or part.index)


def _form(part: Part, wanted: Wanted) -> Form:
    if wanted.elementwise:
        return "elementwise"
    return "convolution" if part.kind == "conv" else "linear"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`'s, `DataParallel`'s or `DistributedDataParallel`'s wrapper."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model
