"""Ridge regression on lifted features: sums over images in, one linear classifier over all classes out.

    h = act(((f - m) / s) W)                  the lift: `lift.py`
    G = sum h h^T,  Q = sum h y^T             over all images so far, y one-hot
    scores = h (G + r I)^-1 Q                 no bias

The sums of all tasks give exactly the classifier that all images together would give, so nothing is forgotten as long
as features do not move. RanPAC and ACIL are the same classifier with other settings (`ridge_options.RULES`).

When each part is fixed:
- m and s: with the first `finish_task`, from all features until then, or earlier by `fit_scale`. Later images never
  change them. Until then, `scores` answers as if the first task ended now.
- W: from the seed. The state does not contain W, only a few of its values, to recognise it.
- G and Q: features wait until their task ends, `scores` or `state_dict` is called, or there are more than WAITING bytes
  of them (which also fixes m and s). Then they enter the sums and are dropped. Up to rounding, the state does not
  depend on the order of the images or their division into batches.

Memory in bytes, for M units, C classes and n waiting images with d features:
- at rest (`nbytes`): 2 M^2 for G (1.5 M^2 as int24, 1 M^2 as int16, 0.75 M^2 as factor, 4 M^2 as float64), 8 M C for
  Q and the solution;
- beside it, never saved: W, 2 d M, or 4 d M if the activation is not fourier;
- during an update: 4 n d for what waits, 4 n M (at most LIFTED) for lifted features;
- while solving: 16 M^2, or 8 M^2 above FLOAT64_UNITS units;
- with `storage: factor`, 16 M^2 whenever G is read or written (24 M^2 while merging), and 4 n d for n images that are
  in Q but not in G yet: writing rounds all of G, so it waits until the task ends, the state is saved or there are more
  than WAITING bytes of features. Until then, solving adds their products to what it reads.

Sums of at most `gram.ROWS` products are in float32 (never TF32), sums of those in float64; each stored value is
rounded once per LIFTED bytes of lifted features, which is once per task in most cases. With `storage: float64`,
everything is in float64.
"""

import zlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers import factor, least_squares, left_out
from mambacl.classifiers import gram as storage_of
from mambacl.classifiers.base import Classifier, StatisticsClassifier
from mambacl.classifiers.drift import FollowsDrift, transported
from mambacl.classifiers.factor import Factor
from mambacl.classifiers.gram import Gram
from mambacl.classifiers.lift import draw, fit_scale, lift, projections
from mambacl.classifiers.registry import CLASSIFIERS
from mambacl.classifiers.ridge_options import RidgeOptions, resolved
from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.ops.precision import at_least_float32, float32_products, full_precision
from mambacl.options import build_config

WAITING = 10**9  # bytes of features that wait at most
LIFTED = 10**9  # bytes of lifted features at a time
FLOAT64_UNITS = 32768  # more are solved in float32


class Ridge(FollowsDrift, StatisticsClassifier):
    """Ridge regression on a random lift of the features. Keywords are the options of `RidgeOptions`, e.g.
    `state_limit="100MB"`."""

    name = "ridge"
    summary = "ridge regression on a random lift of the features, from sums over all tasks"
    options_class: ClassVar[type] = RidgeOptions
    estimates_probabilities: ClassVar[bool] = True
    follows_features: ClassVar[bool] = False
    center: Tensor  # m (d,); empty until it is fixed
    scale: Tensor  # s (d,)
    gram: Tensor  # G, in storage: see `Gram` and `Factor`
    spread: Tensor
    sums: Tensor  # Q (classes, units)
    weights: Tensor  # the solution (classes, units)
    counts: Tensor  # images per class
    ridge: Tensor  # the ridge of the solution
    waiting: Tensor  # features (n, d) that are not in G and Q yet
    waiting_labels: Tensor
    identity: Tensor  # recognises the lift
    projection: Tensor | None  # W, times the bandwidth; not saved

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features)
        self.asked = build_config(RidgeOptions, options, self.name)
        self._build(resolved(self.asked, num_features))
        self.prepare_drift()

    def _build(self, options: RidgeOptions) -> None:
        """An empty state."""
        self.options, num_features, fixed = options, self.num_features, options.standardize == "none"
        self.units = int(options.width or 0) or num_features
        self.dtype = torch.float64 if options.storage == "float64" else torch.float32
        storage, correlations = str(options.storage), options.storage in ("int24", "int16")
        factored = storage == "factor"
        gram = factor.empty(self.units) if factored else storage_of.empty(self.units, options.blocks, storage)
        empty: dict[str, Tensor] = {
            "center": torch.zeros(num_features if fixed else 0, dtype=self.dtype),
            "scale": torch.ones(num_features if fixed else 0, dtype=self.dtype),
            "gram": gram,
            "spread": torch.zeros(self.units if correlations else 0, dtype=torch.float64),
            "sums": torch.zeros(0, self.units, dtype=self.dtype),
            "weights": torch.zeros(0, self.units, dtype=self.dtype),
            "counts": torch.zeros(0, dtype=torch.int64),
            "ridge": torch.tensor(0.0, dtype=torch.float64),
            "waiting": torch.zeros(0, num_features, dtype=self.dtype),
            "waiting_labels": torch.zeros(0, dtype=torch.int64),
            "identity": torch.zeros(0, dtype=torch.float64),
        }
        for name, tensor in empty.items():
            self.register_buffer(name, tensor)
        self.register_buffer("projection", None, persistent=False)
        self._arrived: list[tuple[Tensor, Tensor]] = []  # joins `waiting` when needed
        self._arrived_bytes = 0
        self._unstored: list[Tensor] = []  # features that are in Q, but not in G: see `Factor`
        self._unstored_bytes = 0
        self._stored_totals: tuple[Tensor, int] | None = None  # without them; None if there are none
        self._solved = True
        self._provisional: list[Ridge] = []  # answers until m and s are fixed

    @classmethod
    def like(cls, other: "Ridge") -> "Ridge":
        """An empty classifier with the same lift, which can later be merged into the other."""
        made = cls(other.num_features, **asdict(other.options))
        made.center, made.scale = other.center.clone(), other.scale.clone()
        made.projection = other.projection  # never changes
        return made.to(other.sums.device)

    @property
    def classes(self) -> int:
        return len(self.counts)

    @property
    def scaled(self) -> bool:
        """Whether m and s are fixed."""
        return len(self.scale) > 0

    def add_task(self, classes: int, seed: int = 0) -> None:
        if self.options.state_limit and self.classes <= self.options.expected_classes < self.classes + classes:
            logger.warning(
                "The ridge classifier has more classes than expected_classes (%d), so its state will exceed the "
                "state_limit of %s.", self.options.expected_classes, self.options.state_limit,
            )  # fmt: skip
        rows = (0, 0, 0, classes)
        self.sums, self.weights = F.pad(self.sums, rows), F.pad(self.weights, rows)
        self.counts = F.pad(self.counts, (0, classes))

    # Sums

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Also accepts classes without `add_task`, and more images of old classes."""
        if self.classes and not len(self.sums):
            raise UserError("This ridge classifier has no sums and can only predict: update that of the run.")
        features, labels = self.checked(features, labels)
        if not len(labels):
            return
        self._arrive(features.to(self.dtype, copy=True), labels.clone())
        held = self._arrived_bytes + self.waiting.nbytes + self._unstored_bytes
        if held > WAITING and self.options.ridge != "current-task":
            self._absorb(fix=True)
            self._store()

    @torch.no_grad()
    def fit_scale(self, features: Tensor) -> None:
        """Fixes m and s, from these features (n, d), before the first task ends."""
        if self.scaled:
            raise UserError("The scale of this ridge classifier is fixed already: build a new one.")
        center, scale = fit_scale(features.to(self.sums.device))
        self.center, self.scale = center.to(self.dtype), scale.to(self.dtype)

    @torch.no_grad()
    def finish_task(self) -> None:
        """Fixes m and s if it is the first task, and solves."""
        self._gather()
        if self.options.ridge == "current-task" and len(self.waiting) > 1:
            targets = F.one_hot(self.waiting_labels, self.classes)
            errors = least_squares.current_task_errors(self.lifted(self.waiting), targets, self.options.held_out)
            self.ridge = least_squares.CURRENT[errors.argmin().cpu()].to(self.ridge.device)
        self._absorb(fix=True)
        self._store()
        self._solve()

    def _arrive(self, features: Tensor, labels: Tensor) -> None:
        self._arrived.append((features, labels))
        self._arrived_bytes += features.nbytes
        self._solved, self._provisional = False, []

    def _gather(self) -> None:
        """Moves what arrived to `waiting`."""
        if not self._arrived:
            return
        parts, device = [(self.waiting, self.waiting_labels), *self._arrived], self.sums.device
        self._arrived, self._arrived_bytes = [], 0
        self.waiting = torch.cat([features.to(device) for features, _ in parts])
        self.waiting_labels = torch.cat([labels.to(device) for _, labels in parts])

    def _absorb(self, fix: bool = False) -> None:
        """Adds what waits to Q and G, if m and s are fixed; `fix` fixes them. A factor gets it from `_store`."""
        self._gather()
        if not len(self.waiting) or not (self.scaled or fix):
            return
        if not self.scaled:
            self.fit_scale(self.waiting)
        rows = self._rows()
        for features, labels in zip(self.waiting.split(rows), self.waiting_labels.split(rows), strict=True):
            before, lifted = self._gram(), self.lifted(features)
            members = F.one_hot(labels, self.classes).to(lifted.dtype)
            total = self.sums.double()
            with float32_products(tf32=False), full_precision(total):
                for h, y in zip(lifted.split(storage_of.ROWS), members.split(storage_of.ROWS), strict=True):
                    total += y.T @ h
                self.sums = total.to(self.dtype)
                self.counts = self.counts + members.sum(0).long()
                if isinstance(before, Factor):
                    self._stored_totals = before.sums, before.images
                    self._unstored.append(features)
                    self._unstored_bytes += features.nbytes
                else:
                    self._keep(before.add(lifted, *self._totals()))
        self.waiting, self.waiting_labels = self.waiting[:0].clone(), self.waiting_labels[:0].clone()

    def _store(self) -> None:
        """Adds to a factor what `_absorb` has left."""
        if not self._unstored:
            return
        with float32_products(tf32=False), full_precision(self.sums):
            whole = self._whole(slice(0, self.units), torch.float64)
            self._keep(self._gram().replaced(whole, *self._totals()))
        self._unstored, self._unstored_bytes, self._stored_totals = [], 0, None

    def _whole(self, block: slice, dtype: torch.dtype) -> Tensor:
        """G (units, units) of one block."""
        whole = self._gram().block(block, dtype)
        if self._unstored:
            features = torch.cat([part.to(whole.device) for part in self._unstored])
            for part in features.split(self._rows()):
                factor.add_products(whole, self.lifted(part))
        return whole

    def _rows(self) -> int:
        """Images that are lifted at a time."""
        return max(1, LIFTED // (self.units * self.dtype.itemsize))

    def _gram(self) -> Gram | Factor:
        """As it is in storage."""
        if self.options.storage == "factor":
            sums, images = self._stored_totals or self._totals()
            return Factor(self.gram, sums.to(self.gram.device), images)
        return Gram(self.gram, self.options.blocks, *self._totals(), self.spread)

    def _totals(self) -> tuple[Tensor, int]:
        """The sum of h over all images, and their number."""
        return self.sums.sum(0, dtype=torch.float64), int(self.counts.sum())

    def _keep(self, gram: Gram | Factor) -> None:
        self.gram, self.spread = gram.flat, gram.spread if isinstance(gram, Gram) else self.spread

    @torch.no_grad()
    def merge(self, other: Classifier) -> None:
        """Adds the images of another, which has the same options and the same m and s, or none yet: see `like`."""
        if not isinstance(other, Ridge) or other.num_features != self.num_features or other.options != self.options:
            raise UserError("Only another ridge classifier with the same number of features and options can be merged.")
        other._absorb()
        other._store()
        if self.scaled and other.scaled and not (
            torch.equal(self.center, other.center.to(self.center.device))
            and torch.equal(self.scale, other.scale.to(self.scale.device))
        ):  # fmt: skip
            raise UserError(
                "These ridge classifiers scale features differently, so their sums cannot be added: build the second "
                "one with Ridge.like(first)."
            )
        device = self.sums.device
        self.add_task(max(0, other.classes - self.classes))
        if other.scaled and not self.scaled:
            self.center, self.scale = other.center.clone().to(device), other.scale.clone().to(device)
        self._absorb()
        self._store()
        before: Any = self._gram()  # both are of one kind
        theirs = other._gram().to(device)
        self.sums[: other.classes] += other.sums.to(device)
        self.counts[: other.classes] += other.counts.to(device)
        self._keep(before.merge(theirs, *self._totals()))
        self._arrive(other.waiting.to(device), other.waiting_labels.to(device))

    # Drift, of lifted features

    def drift_features(self, features: Tensor) -> Tensor:
        return self.lifted(features)

    @torch.no_grad()
    def class_means(self) -> tuple[Tensor, Tensor]:
        self._absorb(fix=True)
        return self.sums.double() / self.counts.clamp(min=1)[:, None], self.counts

    @torch.no_grad()
    def transport(
        self, matrix: Tensor | None = None, offset: Tensor | None = None, residual: Tensor | None = None
    ) -> None:
        """The matrix is (units, units): without a lift, units are the features (f - m) / s."""
        if matrix is None and offset is None:  # nothing moves, not even by rounding
            return
        means, counts = self.class_means()
        sums, counts = self.sums.double(), counts.double()
        sums = sums if matrix is None else sums @ matrix
        b = means.new_zeros(means.shape) if offset is None else offset.to(means).expand(means.shape)
        self._store()
        before = self._gram()
        with float32_products(tf32=False), full_precision(means):
            whole = before.block(slice(0, self.units), torch.float64)
            whole = transported(whole, sums, counts, b, matrix)
            if residual is not None:
                whole.add_(residual, alpha=float(counts.sum()))
            self.sums = (sums + counts[:, None] * b).to(self.dtype)
            self._keep(before.replaced(whole, *self._totals()))
        self._solved = False

    # The solution

    def _solve(self) -> None:
        """The solution from G and Q."""
        if self._solved or not int(self.counts.sum()):
            return
        dtype = torch.float64 if self.units <= FLOAT64_UNITS * self.options.blocks else torch.float32
        sums, gram, images = self.sums.double(), self._gram(), int(self.counts.sum())
        least = 2 * gram.jitter if isinstance(gram, Factor) else 0.0
        targets, given, parts = sums, self.options.ridge, []
        if self.options.balanced:  # class means, times the mean number of images
            targets = sums / self.counts.clamp(min=1)[:, None] * self.counts.double().mean()
        with float32_products(tf32=False), full_precision(sums):
            for place, block in enumerate(storage_of.blocks_of(self.units, self.options.blocks)):
                whole = self._whole(block, dtype)
                diagonal = whole.diagonal().clone()
                if isinstance(given, float):
                    self.ridge.fill_(given)
                elif place == 0 and (given == "auto" or not self.ridge):  # the other blocks are of the same kind
                    chosen, lower = least_squares.choose(whole, diagonal, sums[:, block], images, least)
                    self.ridge.fill_(chosen)
                    parts.append(least_squares.solution(lower, targets[:, block]))
                    continue
                if given == "current-task":
                    chosen, lower = least_squares.allowed(whole, diagonal, float(self.ridge))
                    self.ridge.fill_(chosen)
                    parts.append(least_squares.solution(lower, targets[:, block]))
                    continue
                parts.append(least_squares.solve(whole, diagonal, targets[:, block], float(self.ridge)))
        self.weights = torch.cat(parts, dim=1).to(self.dtype) / self.options.blocks
        if self.options.unit:
            self.weights = F.normalize(self.weights, dim=1)
        self._solved = True

    @torch.no_grad()
    def favour_rare(self, first: int) -> None:
        """Multiplies the scores of these classes by sqrt(m / n) where n < m, for n images of a class and a mean of m
        images per class before `first`. The factor m / n of `balanced` multiplies the noise of a few images as well,
        and makes them win too often."""
        if self.options.balanced or not 0 < first < self.classes:
            return
        self._solve()
        usual, counts = self.counts[:first].double().mean(), self.counts[first:].clamp(min=1)
        self.weights[first:] *= (usual / counts).clamp(min=1).sqrt()[:, None].to(self.dtype)

    def _draw(self) -> Tensor | None:
        if self.options.width and self.projection is None:
            options, columns = self.options, projections(self.units, str(self.options.activation))
            drawn = draw(self.num_features, columns, options.seed, str(options.distribution), self.sums.device)
            self.projection = drawn.mul_(float(options.bandwidth or 1.0)).to(self.dtype)
        return self.projection

    def lifted(self, features: Tensor) -> Tensor:
        """h (b, units), in full precision: for sums"""
        with float32_products(tf32=False), full_precision(features):
            return self._lifted(features)

    def _lifted(self, features: Tensor) -> Tensor:
        x, drawn = features.to(self.dtype), self._draw()
        return lift(x, self.center, self.scale, drawn, str(self.options.activation))[:, : self.units]

    @torch.inference_mode(False)  # so that what is computed once can be updated later
    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        """Estimates of the classes' probabilities; minus infinity for a class without images."""
        self._absorb()
        if len(self.waiting):  # m and s are not fixed: answer as if the first task ended now
            if not self._provisional:
                self._provisional = [Ridge.like(self)]
                self._provisional[0].add_task(self.classes)
                self._provisional[0].update(self.waiting, self.waiting_labels)
                self._provisional[0].finish_task()
            return self._provisional[0](features)
        self._solve()
        if not self.scaled:  # no image yet
            return features.new_full((len(features), self.classes), -torch.inf)
        with full_precision(features):  # in TF32 if that is switched on: on an H200 it takes a third of the time
            scores = (self._lifted(features) @ self.weights.T).to(at_least_float32(features).dtype)
        return scores.masked_fill(self.counts == 0, -torch.inf)

    @torch.no_grad()
    def left_out(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """With the ridge of the solution. What weights classes (`balanced`, `favour_rare`) multiplies columns of the
        solution, and those of the scores without an image just as well."""
        self._absorb()
        self._solve()
        labels, counts = labels.to(self.sums.device), self.counts
        lifted = self.lifted(features.to(self.sums.device).flatten(0, 1)).unflatten(0, features.shape[:2])
        dtype = torch.float64 if self.units <= FLOAT64_UNITS * self.options.blocks else torch.float32
        found = torch.zeros(2, *lifted.shape[:2], self.classes, dtype=torch.float64, device=lifted.device)
        sums = self.sums.double()
        with float32_products(tf32=False), full_precision(sums):
            for block in storage_of.blocks_of(self.units, self.options.blocks):
                whole = self._whole(block, dtype)
                lower = least_squares.checked_factor(whole, whole.diagonal().clone(), float(self.ridge))
                plain, *both = left_out.regression(lower, lifted[..., block], sums[:, block], counts, labels)
                factors = (self.weights[:, block].double() * plain).sum(1) / plain.square().sum(1).clamp(min=1e-300)
                found += factors * torch.stack(both)
        known, foreign = found.masked_fill(counts == 0, -torch.inf)
        return known, left_out.without_own(foreign, labels)

    # State

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Includes the solution. Contains features only if the first task has not ended."""
        self._absorb()
        self._store()
        self._solve()
        self.identity = self._identity()
        return super().state_dict(*args, **kwargs)

    def for_scores(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The solution without the sums."""
        return {**state, **{name: state[name][:0].clone() for name in ("gram", "spread", "sums")}}

    def _identity(self) -> Tensor:
        """A checksum of the options that a state depends on, and the first values of W."""
        drawn = self._draw()
        first = [] if drawn is None else drawn.flatten()[:4].tolist()
        checksum = self._checksum(self.options)
        return torch.tensor([checksum, *first], dtype=torch.float64, device=self.sums.device)

    def _checksum(self, options: RidgeOptions) -> int:
        chosen = (self.num_features, options.width, options.activation, options.bandwidth, options.distribution,
                  options.seed, options.blocks, options.storage)  # fmt: skip
        return zlib.crc32(repr(chosen).encode())

    def _adopt_storage(self, state: Mapping[str, Any]) -> None:
        """Takes the storage of a state with the same options if they leave it open: `state_limit` has not always chosen
        the same."""
        if self.asked.storage is None and self.options.storage == "factor":
            other = resolved(replace(self.asked, storage="int24"), self.num_features)
            if state["identity"][:1].tolist() == [self._checksum(other)]:
                device = self.sums.device
                self._build(other)
                self.to(device)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Changes the number of classes to that of the state."""
        self._adopt_storage(state)
        own, theirs = self._identity(), state["identity"].to(self.sums.device)
        if own.shape != theirs.shape or own[0] != theirs[0] or not torch.allclose(own, theirs, rtol=1e-5, atol=1e-6):
            raise UserError("The state is of a ridge classifier with other options: use the options it was made with.")
        for name, buffer in self.named_buffers():
            if name in state:
                setattr(self, name, buffer.new_empty(state[name].shape))
        self._arrived, self._arrived_bytes, self._provisional, self._solved = [], 0, [], True
        self._unstored, self._unstored_bytes, self._stored_totals = [], 0, None
        return super().load_state_dict(state, strict, assign)


CLASSIFIERS.add(Ridge.name, Ridge)
