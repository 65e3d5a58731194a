"""`NullSpace`: gathers features after each task and projects later updates onto their null space.

`consolidate` gathers covariances (`statistics`, `covariance`), decomposes them (`projectors`, `ranks`) and builds the
`projected_step`; `wrap` applies it to an optimizer's steps (`optimizer`).
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.files import make_folder, read_tensors, write_tensors
from mambacl.log import logger
from mambacl.nullspace.audit import Drift, drift, record
from mambacl.nullspace.blocks import Block, Part, cut_again, named_parameters
from mambacl.nullspace.covariance import Covariance
from mambacl.nullspace.description import Protected, describe, what_is_protected
from mambacl.nullspace.elementwise import Activity, box
from mambacl.nullspace.fixed_parts import FixedParts, clamped_parts
from mambacl.nullspace.growth import grown_features, weight_directions
from mambacl.nullspace.memory import (
    FROM_COVARIANCES,
    Memory,
    Store,
    TaskStatistics,
    from_tensors,
    to_tensors,
)
from mambacl.nullspace.optimizer import inner_optimizer, register_projection
from mambacl.nullspace.projected_step import ProjectedStep, projected_parts
from mambacl.nullspace.projectors import Decomposition, Key, Projector, basis_dtype, decompose_features
from mambacl.nullspace.recursive import RecursiveParts, in_backward, mean_rows
from mambacl.nullspace.selection import Protection, Selection
from mambacl.nullspace.settings import KINDS, Setting, setting_named, system_named
from mambacl.nullspace.shards import of_whole_shape, whole
from mambacl.nullspace.statistics import Accumulator, Features, gather, value

MASTER = ".master"  # ends the name of a float32 master in a state
DECOMPOSED_BY = ("rank", "rank_step", "below_at_first", "rank_over", "spectrum", "storage")
"""fields of a setting that determine ranks and bases"""
FROM_A_FILE = (*DECOMPOSED_BY, "scaling", "eta", "relax", "acts_on", "alpha")
"""fields that `load` reads unless the caller set them"""


@dataclasses.dataclass(frozen=True)
class Consolidation:
    """The result of `consolidate`: number of images, seconds for the covariances and for their decomposition."""

    images: int
    covariance_seconds: float
    decomposition_seconds: float


class NullSpace:
    """Finds the selective SSMs of a model, keeps statistics of finished tasks and projects updates.

        space = NullSpace(model, setting="exact", rank="energy:0.99")
        optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=2e-4))
        ...                        # train one task as usual
        space.consolidate(loader)  # after each task

    `setting`: "paper" (default), "public-code", "exact" or a `Setting`; `overrides` change its fields. On real images
    the rank rules of "paper" and "public-code" protect few directions, and that of "exact" leaves nearly none to learn
    with: hence the rank above. `rule`: instead of a setting, the rule of another system for all linear layers: "gpm",
    "dual-gpm", "nscl", "owm" or "osf". `leave`: modules to ignore, e.g. the classifier; parameters added to the model
    later are ignored, too. `folder`: for what is kept on disk. `share_steps`: processes that train the same
    parameters each project a share of a step and send it to the others, which pays if bases have many columns.

    With several processes, all of them call the methods of their spaces, in the same order.
    """

    def __init__(
        self,
        model: nn.Module,
        setting: str | Setting | None = None,
        *,
        rule: str | None = None,
        leave: str | Sequence[str] = (),
        folder: str | Path | None = None,
        share_steps: bool = False,
        **overrides: Any,
    ) -> None:
        if rule is not None and setting is not None:
            raise UserError("NullSpace takes a setting or a rule, not both: change fields of a rule by their names.")
        named = system_named(rule) if rule is not None else setting_named("paper") if setting is None else setting
        chosen = setting_named(named) if isinstance(named, str) else named
        self.setting = chosen.override(**overrides)
        self._given = set(overrides) if setting is None else {f.name for f in dataclasses.fields(Setting)}
        self.model = unwrapped(model)
        self.selection = Selection(self.model, self.setting, (leave,) if isinstance(leave, str) else leave)
        self.memory = Memory()
        kept_in = None if folder is None else Path(folder)
        device, places = self._device(), self.setting
        self._store = Store(places.covariances, device, kept_in)
        self._projector_store = Store(places.projectors, device, kept_in, pinned=device.type == "cuda")
        self._wrapped: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._watching: list[Any] = []
        """handles of the hooks that show the inputs of training to recursive projectors"""
        self.share_steps = share_steps
        self.masters: dict[str, Tensor] = {}
        """float32 masters by parameter: see `wrap`"""
        self.projected_step = ProjectedStep()
        self.protected: Protected | None = None
        """how much the rank rule protects; None before the first consolidation, or if nothing is projected"""
        self.protect(self.memory)
        logger.debug("%s", self.describe())

    @property
    def tasks(self) -> int:
        """Number of consolidated tasks."""
        return self.memory.tasks

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    # What is trained and what is protected

    def trained_names(self) -> list[str]:
        """Names of the parameters with rows that train in some task, in the model's order."""
        return list(self.selection.trained)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters to give to an optimizer."""
        named = named_parameters(self.model)
        return [named[name] for name in self.selection.trained]

    def freeze_others(self) -> None:
        """Switches gradients off for all parameters except those that this space trains, leaves, or does not know
        because they were added later."""
        trained, selection = set(self.selection.trained), self.selection
        for name, parameter in named_parameters(self.model).items():
            parameter.requires_grad_(name in trained or selection.leaves(name) or selection.is_new(name))

    def describe(self) -> str:
        """What is trained, what is protected, and from which feature: one line per kind."""
        return describe(self.setting, self.selection, of_whole_shape(named_parameters(self.model)))

    def projectors(self) -> dict[str, Projector]:
        """The current projector of each protected part, by parameter name and rows."""
        eta, scaling = self.setting.eta, self.setting.scaling
        return {name: decomposition.projector(eta, scaling) for name, decomposition in self.decompositions().items()}

    def decompositions(self) -> dict[str, Decomposition]:
        """Spectrum, null rank and basis of each protected part, by parameter name and rows."""
        found = self._decompositions()
        return {p.name: found[p.key] for p in self.selection.projected() if found}  # none if all are recursive

    def _decompositions(self) -> dict[Key, Decomposition]:
        if not self.memory.statistics:
            return {}
        return {p.key: self.projected_step.decomposition(p.name) for p in self.selection.projected()}

    def covariances(self) -> dict[str, Tensor]:
        """The accumulated covariance of each protected part, by parameter name and rows."""
        if not self.memory.statistics or self.setting.projector not in FROM_COVARIANCES:
            return {}
        return {p.name: self.memory.covariance(p.key) for p in self.selection.projected()}

    # Training

    def wrap(self, optimizer: torch.optim.Optimizer, steps: int = 0, *, masters: bool = False) -> torch.optim.Optimizer:
        """Returns the same optimizer; its steps are projected from now on, and rows that do not train stay the same.
        Wrapping it again has no effect, except that `steps`, the number of steps of this task, restarts the decay of
        alpha of recursive projectors; without it, alpha has its last value. `masters`: float32 copies of parameters in
        half precision take up the updates, and the parameters are their rounding."""
        if steps:
            self.projected_step.clock.start(steps)
        if self.setting.projector == "recursive" and not self._watching:
            for block in self.selection.blocks:
                self._watching += block.register_hooks(partial(self._show, block))
        inner = inner_optimizer(optimizer)
        if inner not in self._wrapped:
            kept = self.masters if masters else None
            register_projection(inner, self.model, self.selection, lambda: self.projected_step, kept)
            self._wrapped.add(inner)
        return optimizer

    def _show(self, block: Block, features: Features) -> None:
        """Notes what a forward pass with gradients feeds to parts with recursive projectors."""
        if not torch.is_grad_enabled() or in_backward():
            return
        with torch.no_grad():
            for constraint, inputs in self._recursive.get(block.name, ()):
                if inputs[0] in features:
                    constraint.seen = mean_rows(value(features, inputs[0]))

    def update_energy(self, task: int | None = None) -> dict[str, Tensor]:
        """By part, (4,): squared norms, summed over the steps of a finished task or since the last consolidation, of
        the optimizer's update, of its share in protected directions, of the applied update, and of its share. Where
        gradients are projected, the same of gradients."""
        return self.projected_step.update_energy() if task is None else self.memory.update_energy[task]

    # The end of a task

    def consolidate(
        self, loader: Iterable[Any] | None = None, forward: Callable[..., Any] | None = None
    ) -> Consolidation:
        """Adds the features of a finished task to what is protected. The rules "owm" and "osf" need no `loader`.

        `loader` yields batches: tensors, tuples that begin with one, or mappings of the forward function's arguments.
        They go through `forward`, by default the model, in evaluation mode. Call it before the first task to protect
        what the model has learned elsewhere. If it fails, nothing changes.
        """
        loader = loader if self.setting.projector in FROM_COVARIANCES else ()
        if isinstance(loader, Tensor) and loader.dim() <= 4:  # five dimensions: a tensor of batches
            raise UserError("consolidate needs batches, got a tensor: pass [images] or images.split(100).")
        if loader is None or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise UserError(f"consolidate needs batches, got {type(loader).__name__}: pass a loader or a list of them.")
        with torch.inference_mode(False):
            started, memory = time.perf_counter(), self.memory
            statistics, images = TaskStatistics(), 0
            if self.setting.projector in FROM_COVARIANCES:
                statistics, images = self._gather(loader, forward)
            covered = time.perf_counter()
            energy = [*memory.update_energy, self.update_energy()]
            self.protect(Memory(memory.tasks + 1, [*memory.statistics, statistics], energy))
            if self.protected:
                logger.info("%s", self.protected.describe(self.tasks))
                if self.protected.little and self.tasks == 1:  # once per run
                    logger.warning("%s", self.protected.warning())
            return Consolidation(images, covered - started, time.perf_counter() - covered)

    def _gather(self, loader: Iterable[Any], forward: Callable[..., Any] | None) -> tuple[TaskStatistics, int]:
        named, relax = named_parameters(self.model), self.setting.relax
        blank = of_whole_shape(named)
        blocks = {block.name: block for block in self.selection.blocks}
        wanted: dict[Block, dict[str, Accumulator]] = {}
        for p in self.selection.protections:
            wanted.setdefault(blocks[p.block], {}).setdefault(p.label, self._accumulator(p))
        images = gather(self.model, wanted, loader, forward, getattr(torch, self.setting.products))
        cut_again(self.model)
        found = TaskStatistics()
        for p in self.selection.protections:
            totals, own = wanted[blocks[p.block]][p.label].totals, named[p.part.parameter]
            if p.elementwise:
                found.boxes[p.name] = box(p.part.of(whole(own.detach())), totals, relax)
                continue
            groups, _, size = p.part.matrix(blank[p.part.parameter]).shape
            if not totals:  # an expert that no token was sent to
                lead = (groups,) if groups > 1 else ()
                totals["covariance"] = torch.zeros(*lead, size, size, dtype=torch.float64, device=self._device())
            seen = totals["covariance"].shape[-1]
            if seen != size:
                raise UserError(
                    f"{p.name} multiplies {size} values, but the feature {p.label} has {seen}: choose another feature "
                    "for it."
                )
            if p.key not in found.covariances:
                found.covariances[p.key] = totals["covariance"]
        found.covariances = {key: self._store.put(covariance) for key, covariance in found.covariances.items()}
        return found, images

    def _accumulator(self, protection: Protection) -> Accumulator:
        if protection.elementwise:
            scan = protection.part.inputs.get("scan", "scan")
            return Activity(protection.inputs[0], scan, self.setting.relax > 0)
        return Covariance(protection.feature, protection.inputs, self.setting.accumulate)

    def protect(self, memory: Memory) -> None:
        """Protects what a memory holds, and decomposes it first if that has not been done. The space changes only at
        the end, so a failure leaves it as before. Unless tasks are kept apart, `memory` has at most two statistics; the
        older is added to the newer, in place."""
        setting, device, selection = self.setting, self._device(), self.selection
        dtype = basis_dtype(self.model, setting.storage)
        found = memory.decompositions
        if found is None and memory.statistics and setting.projector != "null-space":
            found = self._by_rule(memory, dtype)
        if not setting.keep_tasks and len(memory.statistics) > 1:
            older, newest = memory.statistics
            memory.statistics = [newest.add_(older)]
        if found is None and memory.statistics:
            found = decompose_features(
                list(dict.fromkeys(p.key for p in selection.projected())),
                lambda key: memory.covariance(key).to(device),
                lambda key: memory.statistics[-1].covariances[key].shape,
                setting.rank_at(memory.tasks - 1),
                getattr(torch, setting.spectrum),
                dtype,
                together=setting.rank_over == "all",
                device=device,
            )
        users: dict[Key, list[Part]] = {}
        for p in selection.projected():
            users.setdefault(p.key, []).append(p.part)
        uses = [(decomposition, users[key]) for key, decomposition in (found or {}).items()]
        boxes = memory.boxes()
        clamped = [p.part for p in selection.protections if p.name in boxes]
        others_fixed = setting.others == "fixed" or (setting.others == "first-task" and memory.tasks > 0)
        others = [Part("other", name) for name in selection.others] if others_fixed else []
        keep = None if setting.projectors == "device" else self._projector_store.put
        projected = projected_parts(uses, selection.shapes, setting.eta, setting.scaling, dtype, device, keep)
        recursive = self._recursive_parts(memory.projectors)
        self.projected_step = ProjectedStep(
            [
                FixedParts([*others, *selection.fixed]),
                *clamped_parts(clamped, boxes, setting.eta, setting.relax > 0),
                *projected,
                *recursive.values(),
            ],
            setting.acts_on,
        )
        self.projected_step.shared, self.projected_step.masters = self.share_steps, self.masters
        for one in recursive.values():
            one.clock = self.projected_step.clock
        self._recursive: dict[str, list[tuple[RecursiveParts, tuple[str, ...]]]] = {}
        for inputs, key in {p.key: (p.inputs, p.key) for p in selection.protections if p.key in recursive}.values():
            self._recursive.setdefault(key[0], []).append((recursive[key], inputs))
        memory.decompositions = memory.projectors = None  # the projected step holds bases and projectors
        self.memory, self.protected = memory, what_is_protected(setting.rank, (found or {}).values())

    def _by_rule(self, memory: Memory, dtype: torch.dtype) -> dict[Key, Decomposition]:
        """The decompositions of projectors that are not of the null space of all covariances together."""
        protections = list(self.selection.projected())
        if self.setting.projector == "weights":
            rank = self.setting.rank_at(memory.tasks - 1)
            return weight_directions(protections, named_parameters(self.model), rank, dtype)
        grows = len(memory.statistics) > 1 and not self.setting.keep_tasks  # otherwise all tasks are gone through
        keys = list(dict.fromkeys(p.key for p in protections))
        before = self._decompositions() if grows else {}
        return grown_features(memory, before, keys, self.setting, dtype, self._device())

    def _recursive_parts(self, projectors: Mapping[Key, Tensor] | None) -> dict[Key, RecursiveParts]:
        """By feature: recursive projectors that continue from those given, or else from the current ones."""
        current = {c.parts[0].name: c.projector for c in self.projected_step.recursive().values()}
        wanted, device = self.selection.recursive(), self._device()
        named = of_whole_shape(named_parameters(self.model))
        alphas = self.setting.alpha if isinstance(self.setting.alpha, list) else [self.setting.alpha] * len(wanted)
        if len(alphas) != len(wanted):
            raise UserError(f"alpha has {len(alphas)} values for {len(wanted)} layers: give one for all, or one each.")
        found = {}
        for (key, parts), alpha in zip(wanted.items(), alphas, strict=True):
            groups, _, size = parts[0].matrix(named[parts[0].parameter]).shape
            known = current.get(parts[0].name) if projectors is None else projectors.get(key)
            start = torch.eye(size, dtype=torch.float64).repeat(groups, 1, 1) if known is None else known
            found[key] = RecursiveParts(parts, start.to(device), alpha, self.projected_step.clock)
        return found

    # The audit

    def record(self, images: Any, forward: Callable[..., Any] | None = None) -> dict[str, Tensor]:
        """Records delta, A, B, C and the output of each block for one batch (of any kind that `consolidate` takes), to
        audit later."""
        if not any(block.selective for block in self.selection.blocks):
            raise UserError("There is nothing to record: the audit needs selective SSMs, and this model has none.")
        return record(self.model, self.selection.blocks, images, forward)

    def audit(self, images: Any, recorded: Mapping[str, Tensor], forward: Callable[..., Any] | None = None) -> Drift:
        """How much delta, exp(delta A), delta B, C and the output of each block have changed on these images since they
        were recorded, relative to their norms. `update_energy` says how much of the updates was protected."""
        now = self.record(images, forward)
        if {name: t.shape for name, t in now.items()} != {name: t.shape for name, t in recorded.items()}:
            raise UserError("This record belongs to another model or other images: its blocks or their sizes differ.")
        return drift({name: tensor.to(now[name].device) for name, tensor in recorded.items()}, now)

    # Merging spaces and removing tasks

    def merge(self, other: "NullSpace") -> None:
        """Also protects what `other` protects: a branch of the same model, trained separately. Covariances add up."""
        self._needs_covariances("merge")
        self._check_same_setting(dataclasses.asdict(other.setting), "The other null space has")
        mine, theirs = self._signature(), other._signature()
        if mine != theirs:
            shown = ", ".join(sorted({name for name, *_ in mine ^ theirs})[:6])
            raise UserError(f"The other null space belongs to another model; it differs in {shown}.")
        if not other.memory.statistics:
            return
        copied = [
            TaskStatistics(
                {key: self._store.put(covariance.clone()) for key, covariance in one.covariances.items()},
                {name: box.to(self._device()) for name, box in one.boxes.items()},
            )
            for one in other.memory.statistics
        ]
        own, theirs_too = self.memory, other.memory
        energy = [*own.update_energy, *theirs_too.update_energy]
        self._replace(Memory(own.tasks + theirs_too.tasks, [*own.statistics, *copied], energy))

    def _signature(self) -> set[tuple[str, Key, torch.Size]]:
        """What is protected, by which feature, and its size."""
        named = of_whole_shape(named_parameters(self.model))
        return {(p.name, p.key, p.part.of(named[p.part.parameter]).shape) for p in self.selection.protections}

    def forget(self, task: int) -> None:
        """Undoes the consolidation of one task, counted from 0, as if it had never happened."""
        self._needs_covariances("forget")
        if not self.setting.keep_tasks:
            raise UserError("forget needs each task's covariances: build the NullSpace with keep_tasks=True.")
        if not 0 <= task < self.tasks:
            raise UserError(f"There is no task {task} to forget: {self.tasks} were consolidated, counted from 0.")
        statistics, energy = self.memory.statistics, self.memory.update_energy
        left = [number for number in range(self.tasks) if number != task]
        self._replace(Memory(len(left), [statistics[i] for i in left], [energy[i] for i in left]))

    def _needs_covariances(self, word: str) -> None:
        if self.setting.projector not in FROM_COVARIANCES:
            raise UserError(f"{word} needs covariances, which projector {self.setting.projector} does not keep.")

    def _replace(self, memory: Memory) -> None:
        """Protects another memory in the middle of a task, and keeps the energy of its updates so far."""
        energy = self.update_energy()
        self.protect(memory)
        self.projected_step.carried = energy

    # Saving

    def state_dict(self) -> dict[str, Tensor]:
        """Everything gathered so far, by parameter name and rows. Parts that share a feature share its tensors."""
        projectors = {key: constraint.projector for key, constraint in self._recursive_by_key().items()}
        memory = dataclasses.replace(self.memory, decompositions=self._decompositions(), projectors=projectors)
        tensors = to_tensors(memory, self.selection.protections, self.setting.keep_tasks)
        return tensors | {f"{name}{MASTER}": whole(master).clone() for name, master in self.masters.items()}

    def _recursive_by_key(self) -> dict[Key, RecursiveParts]:
        found = self.projected_step.recursive()
        return {key: found[parts[0].name] for key, parts in self.selection.recursive().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads a saved state. Raises `UserError`, and changes nothing, if it belongs to another model or setting."""
        self._load(state, self.setting, decomposed=True)

    def _load(self, state: Mapping[str, Tensor], setting: Setting, decomposed: bool) -> None:
        named = of_whole_shape(named_parameters(self.model))
        masters = {name.removesuffix(MASTER): t for name, t in state.items() if name.endswith(MASTER)}
        state = {name: tensor for name, tensor in state.items() if not name.endswith(MASTER)}
        memory = from_tensors(state, self.selection.protections, named, setting.keep_tasks)
        for one in memory.statistics:
            one.covariances = {key: self._store.put(covariance) for key, covariance in one.covariances.items()}
        if not decomposed:
            memory.decompositions = None
        before, self.setting = self.setting, setting
        try:
            self.protect(memory)
        except BaseException:
            self.setting = before
            raise
        self.masters.clear()
        self.masters.update({name: tensor.clone() for name, tensor in masters.items()})

    def save(self, path: str | Path) -> None:
        """Writes the state as safetensors, and creates the folder if needed; tensors that parts share are written
        once."""
        path = Path(path)
        if path.is_dir():
            raise UserError(f"{path} is a folder: name a file in it, such as {path / 'space.safetensors'}.")
        make_folder(path.parent)
        write_tensors(path, self.state_dict(), {"setting": json.dumps(dataclasses.asdict(self.setting))})

    def load(self, path: str | Path) -> None:
        """Loads a saved space. Rank rule, eta and the like keep the values given when this space was built; those not
        given come from the file. If the rank rule differs from the file's, covariances are decomposed again."""
        tensors, text = read_tensors(Path(path))
        saved = json.loads(text.get("setting", "{}"))
        self._check_same_setting(saved, f"{path} was saved under another setting:")
        differing = [name for name in FROM_A_FILE if name in saved and saved[name] != getattr(self.setting, name)]
        if "relax" in differing and "relax" in self._given:
            raise UserError(
                f"{path} was saved with relax {saved['relax']}, this one has {self.setting.relax}, and the boxes of A "
                f"cannot be computed again without the images: build the NullSpace with relax={saved['relax']}."
            )
        taken = {name: saved[name] for name in differing if name not in self._given}
        again = [name for name in differing if name in self._given and name in DECOMPOSED_BY]
        if taken:
            logger.info("Taken from %s: %s", path, ", ".join(f"{name} {value}" for name, value in taken.items()))
        self._load(tensors, self.setting.override(**taken), decomposed=not again)

    def _check_same_setting(self, other: Mapping[str, Any], words: str) -> None:
        own = dataclasses.asdict(self.setting)
        for name in (*KINDS, "layers", "accumulate", "projector", "keep_tasks"):
            if name in other and other[name] != own[name]:
                raise UserError(f"{words} {name} {other[name]}, this one {own[name]}.")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`'s, `DataParallel`'s or `DistributedDataParallel`'s wrapper. FSDP2 has none."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise UserError(
            "NullSpace cannot read the flat parameters of FullyShardedDataParallel: shard the model with "
            "torch.distributed.fsdp.fully_shard (in Accelerate: fsdp_version 2)."
        )
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model
