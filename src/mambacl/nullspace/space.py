"""`NullSpace`: what a model must not change, gathered after each task and kept out of every later update."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.nullspace.adapters import Block, Features, Part, find_blocks
from mambacl.nullspace.covariance import SHARES
from mambacl.nullspace.optimizer import project_steps
from mambacl.nullspace.projectors import Decomposition, Projector, decompose
from mambacl.nullspace.settings import KINDS, Setting, setting_named
from mambacl.tensorfile import read_tensors, write_tensors

Key = tuple[str, str]  # block, feature
WORDS = ("covariance", "spectrum", "basis", "rank")  # what is kept of each protected part


@dataclasses.dataclass(frozen=True)
class Consolidation:
    """What `consolidate` did: images seen, and the seconds of its two halves."""

    images: int
    covariance_seconds: float
    decomposition_seconds: float


class NullSpace:
    """Finds the selective SSMs of a model, remembers the features of finished tasks, and projects updates.

        space = NullSpace(model, setting="paper", eta=0.95)
        optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=2e-4))
        ...                        # train one task as usual
        space.consolidate(loader)  # after each task

    `setting`: a name ("paper", "public-code") or a `Setting`; `overrides` change fields of it.
    """

    def __init__(self, model: nn.Module, setting: str | Setting = "paper", **overrides: Any) -> None:
        self.setting = (setting_named(setting) if isinstance(setting, str) else setting).override(**overrides)
        self.model = model
        found = find_blocks(model)
        if not found:
            raise UserError(
                "NullSpace found nothing to protect: the model has no selective SSM that an adapter knows; "
                "register one in the entry point group 'mambacl.adapters'."
            )
        self._check_blocks(len(found))
        self.blocks = [block for i, block in enumerate(found) if self.setting.trains_block(i)]
        self.tasks = 0
        self._wrapped: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._covariances: dict[Key, Tensor] = {}
        self._decompositions: dict[Key, Decomposition] = {}
        self._projectors: dict[Key, Projector] = {}
        logger.info("%s", self.describe())

    def _check_blocks(self, count: int) -> None:
        wanted = self.setting.blocks
        highest = wanted - 1 if isinstance(wanted, int) else max(wanted, default=-1) if wanted is not None else 0
        if highest >= count or highest < 0:
            raise UserError(f"blocks = {wanted} does not fit a model of {count} blocks.")

    # What is trained and what is protected

    def parts(self) -> Iterator[tuple[Block, Part]]:
        for block in self.blocks:
            for part in block.parts:
                yield block, part

    def trained_names(self) -> list[str]:
        """Parameters of which some rows are trained, in the model's order."""
        trained = {part.parameter for _, part in self.parts() if self.setting.rule(part.kind).trains}
        return [name for name, _ in self.model.named_parameters() if name in trained]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters to give to an optimizer."""
        named = dict(self.model.named_parameters())
        return [named[name] for name in self.trained_names()]

    def freeze_others(self) -> None:
        """Only what this space trains keeps its gradient."""
        trained = set(self.trained_names())
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in trained)

    def describe(self) -> str:
        """One line a kind: what is trained, what is protected, and from which feature."""
        protects = any(True for _ in self._protected())
        how = f"eta {self.setting.eta}, rank by {self.setting.rank}" if protects else "nothing is protected"
        lines = [f"{len(self.blocks)} selective SSMs; {how}"]
        named = dict(self.model.named_parameters())
        for kind in KINDS:
            rule = self.setting.rule(kind)
            parts = [part for _, part in self.parts() if part.kind == kind]
            size = sum(part.of(named[part.parameter]).numel() for part in parts)
            what = (
                "fixed" if not rule.trains else f"protected by {rule.feature}" if rule.projected else "trained freely"
            )
            lines.append(f"  {kind:8} {size:>12,} values in {len(parts)} blocks, {what}")
        total = sum(parameter.numel() for parameter in named.values())
        tuned = sum(
            part.of(named[part.parameter]).numel() for _, part in self.parts() if self.setting.rule(part.kind).trains
        )
        lines.append(f"  trains {tuned:,} of {total:,} values; the rest of the model is left as it is")
        return "\n".join(lines)

    def projectors(self) -> dict[str, Projector]:
        """The projector in force for each protected part, by parameter name and rows."""
        return {part.name: self._projectors[key] for part, key in self._protected() if key in self._projectors}

    def decompositions(self) -> dict[str, Decomposition]:
        """Spectrum, null rank and basis for each protected part, by parameter name and rows."""
        return {part.name: self._decompositions[key] for part, key in self._protected() if key in self._decompositions}

    def covariances(self) -> dict[str, Tensor]:
        """The accumulated covariance for each protected part, by parameter name and rows."""
        return {part.name: self._covariances[key] for part, key in self._protected() if key in self._covariances}

    def _protected(self) -> Iterator[tuple[Part, Key]]:
        for block, part in self.parts():
            rule = self.setting.rule(part.kind)
            if rule.trains and rule.projected:
                yield part, (block.name, rule.feature)

    # Training

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The same optimizer; from now on each of its steps is projected, and rows that do not train stay as they
        are. Wrapping it again changes nothing."""
        if optimizer not in self._wrapped:
            project_steps(optimizer, self)
            self._wrapped.add(optimizer)
        return optimizer

    def constrained(self) -> dict[str, list[tuple[Part, Projector | None]]]:
        """Parameters whose updates are changed: for each, its parts and their projectors (None: no update at all)."""
        table: dict[str, list[tuple[Part, Projector | None]]] = {}
        for block, part in self.parts():
            rule = self.setting.rule(part.kind)
            projector = self._projectors.get((block.name, rule.feature)) if rule.projected else None
            if not rule.trains or projector is not None:
                table.setdefault(part.parameter, []).append((part, projector if rule.trains else None))
        return table

    # The end of a task

    def consolidate(self, loader: Iterable[Any], forward: Callable[[Tensor], Any] | None = None) -> Consolidation:
        """Adds the features of a finished task to what is protected.

        `loader` gives batches of images, alone or first in a tuple. They go through `forward`, by default the model, in
        evaluation mode. Nothing changes if it fails.
        """
        forward = forward or self.model
        keys = sorted({key for _, key in self._protected()})
        device = next(self.model.parameters()).device
        started = time.perf_counter()
        shares: dict[Key, Tensor] = {}
        images = 0
        with self._observed(keys, shares), _evaluating(self.model), torch.no_grad():
            for batch in loader:
                batch = batch[0] if isinstance(batch, (tuple, list)) else batch
                forward(batch.to(device))
                images += len(batch)
        if images == 0:
            raise UserError("consolidate got no images: the loader is empty.")
        if missing := [key for key in keys if key not in shares]:
            raise UserError(f"consolidate saw no features of {missing[0][0]}: the forward function does not run it.")
        covariances = {key: shares[key] + self._covariances.get(key, 0.0) for key in keys}
        gathered = time.perf_counter()
        precision = getattr(torch, self.setting.spectrum)
        decompositions = {key: decompose(covariances[key], self.setting.rank, precision) for key in keys}
        self._install(covariances, decompositions, self.tasks + 1)
        self._say_what_is_protected()
        return Consolidation(images, gathered - started, time.perf_counter() - gathered)

    def _say_what_is_protected(self) -> None:
        shares = sorted((len(d.spectrum) - d.rank, len(d.spectrum)) for d in self._decompositions.values())
        if shares:
            count, size = shares[len(shares) // 2]
            few = "corner" in self.setting.rank and count < 0.1 * size
            hint = "; the corner leaves nearly all free, energy:0.9 would protect more" if few else ""
            logger.info("protected after task %d: %d of %d directions (median)%s", self.tasks, count, size, hint)

    def _install(self, covariances: dict[Key, Tensor], decompositions: dict[Key, Decomposition], tasks: int) -> None:
        self._covariances, self._decompositions, self.tasks = covariances, decompositions, tasks
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        self._projectors = {}
        for key, decomposition in decompositions.items():
            exact = decomposition.projector(self.setting.eta, self.setting.scaling)
            self._projectors[key] = dataclasses.replace(exact, basis=exact.basis.to(dtype))

    @contextmanager
    def _observed(self, keys: list[Key], shares: dict[Key, Tensor]) -> Iterator[None]:
        """While open, each forward pass adds its share of each covariance."""
        products = getattr(torch, self.setting.products)

        def recorder(block: Block) -> Callable[[Features], None]:
            wanted = [feature for name, feature in keys if name == block.name]

            def record(features: Features) -> None:
                for feature in wanted:
                    value, rows = SHARES[feature](features, products)
                    if not torch.isfinite(value).all():
                        raise UserError(f"The feature {feature} of {block.name} holds NaN or infinite values.")
                    value = value.double() / (rows if self.setting.accumulate == "batch-mean" else 1)
                    shares[block.name, feature] = shares.get((block.name, feature), 0.0) + value

            return record

        try:
            for block in self.blocks:
                block.observe(recorder(block))
            yield
        finally:
            for block in self.blocks:
                block.observe(None)

    # Saving

    def state_dict(self) -> dict[str, Tensor]:
        """Everything gathered so far, by parameter name and rows. Parts that share a feature share its tensors."""
        state = {"tasks": torch.tensor(self.tasks)}
        for part, key in self._protected():
            if key in self._decompositions:
                decomposition = self._decompositions[key]
                rank = torch.tensor(decomposition.rank)
                tensors = (self._covariances[key], decomposition.spectrum, decomposition.basis, rank)
                state |= {f"{part.name}.{word}": tensor for word, tensor in zip(WORDS, tensors, strict=True)}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes up a saved state. One of another model or setting is an error, and changes nothing."""
        tasks = int(state.get("tasks", torch.tensor(0)))
        protected = list(self._protected()) if tasks else []
        wanted = {"tasks"} | {f"{part.name}.{word}" for part, _ in protected for word in WORDS}
        differing = sorted(wanted ^ set(state))
        if differing:
            shown = ", ".join(differing[:6]) + (", ..." if len(differing) > 6 else "")
            raise UserError(f"This null-space state is of another model or setting; names on one side only: {shown}.")
        named = dict(self.model.named_parameters())
        covariances: dict[Key, Tensor] = {}
        decompositions: dict[Key, Decomposition] = {}
        for part, key in protected:
            parameter = named[part.parameter]
            covariance, spectrum, basis, rank = (state[f"{part.name}.{word}"].to(parameter.device) for word in WORDS)
            size = parameter.shape[0 if part.side == "left" else 1]
            if covariance.shape != (size, size) or spectrum.shape != (size,) or basis.shape[0] != size:
                raise UserError(f"This null-space state is of another model: {part.name} has another size there.")
            if key in covariances and not torch.equal(covariances[key], covariance):
                raise UserError(f"This null-space state is of another setting: {part.name} had another feature there.")
            covariances[key], decompositions[key] = covariance, Decomposition(spectrum, int(rank), basis)
        self._install(covariances, decompositions, tasks)

    def save(self, path: str | Path) -> None:
        """The state as safetensors; tensors that parts share are written once."""
        write_tensors(Path(path), self.state_dict(), {"setting": json.dumps(dataclasses.asdict(self.setting))})

    def load(self, path: str | Path) -> None:
        tensors, text = read_tensors(Path(path))
        saved, own = json.loads(text.get("setting", "{}")), dataclasses.asdict(self.setting)
        for name in (*KINDS, "accumulate"):
            if name in saved and saved[name] != own[name]:
                raise UserError(
                    f"{path} was saved under another setting: {name} is {saved[name]} there, {own[name]} here."
                )
        self.load_state_dict(tensors)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for every module while open; each module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
