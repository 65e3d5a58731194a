"""The interface of continual-learning methods, which the training loop calls.

A method combines parts: what trains in the backbone (`tuning/`), a classifier (`classifiers/`), a loss, and what
happens when a task ends. `Method` trains a classifier on a fixed backbone; a subclass overrides what differs. To add a
method, derive from it and call `METHODS.add` in a new file in this folder, or in another package that lists it in the
entry point group `mambacl.methods`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl import processes
from mambacl.backbones.reading import FeatureReader
from mambacl.classifiers.base import Classifier, NoOptions, TaskHeads
from mambacl.classifiers.calibration import Calibration, calibrated
from mambacl.classifiers.drift import FollowsDrift
from mambacl.classifiers.drifts.base import TaskEnd
from mambacl.classifiers.kept import KeptFeatures
from mambacl.classifiers.registry import CLASSIFIERS
from mambacl.errors import UserError
from mambacl.features import FeatureOptions
from mambacl.nullspace import Setting
from mambacl.nullspace.shards import cut_like, let_go
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import build_config
from mambacl.stored import StoredImages
from mambacl.tuning import ModelParameters, Tuning
from mambacl.tuning.passes import with_attention

CLASSIFIER = "classifier/"  # prefix of a classifier's tensors in a task's state
START = "start/"  # prefix of the trained parameters in a task's state: the next task starts from them
CALIBRATION = "calibration/"  # prefix of a calibration in a task's state
KEPT = "kept/"  # prefix of the features that the next calibration needs
HEADS = "heads."  # prefix of the tensors that change with each step in the state of heads


@dataclass(frozen=True)
class Setup:
    """What a method gets from the configuration."""

    setting: Setting = field(default_factory=Setting)
    warm_second_head: bool = False
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    classifier: str = "auto"
    """auto for the method's default, or a name in `CLASSIFIERS`"""
    classifier_options: Mapping[str, Any] = field(default_factory=dict)
    features: FeatureOptions = field(default_factory=FeatureOptions)
    """what a classifier sees that is computed from features"""
    known_classifier: nn.Linear | None = None
    """for the first task's classes, if the model already knows them"""
    folder: Path | None = None
    """a folder for large temporary files"""
    tasks: int = 0
    """number of tasks of the run; 0 if unknown, as for a model that only predicts"""
    classes: int = 0
    """number of classes of all tasks together; 0 if unknown"""
    epochs: int = 0
    """epochs of each task; 0 if unknown"""
    class_names: tuple[str, ...] = ()
    """of all tasks, by label; empty if unknown"""
    share_steps: bool = False
    """whether the processes of a run share out the projection of a step"""


@dataclass(frozen=True)
class Task:
    index: int
    classes: int
    first_label: int
    seed: int  # for the random numbers of this task
    steps: int = 0  # of the optimizer; 0 if unknown


@dataclass(frozen=True)
class Phase:
    """Epochs of a task in which the same parameters train with the same loss."""

    name: str = ""
    """for `loss`, which can ask for `self.current.name`"""
    roles: tuple[str, ...] | None = None
    """the roles of `named_parameters` that train; None for all. Without any, an epoch takes no steps"""
    rate: float = 1.0
    """factor of all learning rates"""
    first: int = 0
    """with `epochs`: the epoch in which the schedule of the learning rates begins"""
    epochs: int = 0
    """the epochs that the schedule takes; 0 for one schedule over the whole task"""
    new_optimizer: bool = False
    """whether the phase starts with a new optimizer; otherwise momenta are kept, and parameters that do not train stay
    as they are"""


class Method:
    """One head per task and cross-entropy over the current task's classes; the model stays in evaluation mode.

    The state has two parts: `state_dict` changes with each step, `task_state_dict` only at the end of a task.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    options_class: ClassVar[type] = NoOptions
    own_classifier: ClassVar[str] = "separate"
    """the heads that train; they also predict, unless the configuration names another classifier"""
    own_depths: ClassVar[str | int] = "final"
    """depths of the features for a classifier that is computed from them, unless the configuration names others"""
    trains: ClassVar[bool] = True
    """whether anything trains; if not, tasks have no epochs"""
    own_answer: ClassVar[bool] = False
    """whether it combines scores in a way of its own, so that it works only with the heads that it trains"""
    needs_attention: ClassVar[bool] = False
    """whether it changes attention, so that it needs a vit backbone"""
    first_task_only: ClassVar[bool] = False
    """whether only the first task trains; later ones have no epochs"""
    stores_images: ClassVar[bool] = False
    """whether it keeps images of earlier tasks, so that results and tables mark its runs"""
    recordable: ClassVar[bool] = True
    """whether a CUDA graph can replay its steps: `loss` never waits for the GPU and does the same for every batch"""
    splits: bool = True
    """whether `loss` is a mean over images that do not affect each other, so that the losses of parts of a batch,
    weighted by their sizes, add up to that of the batch; terms without images count in each part"""

    takes_shards: ClassVar[bool] = False
    """whether it works on a backbone whose parameters are cut among the processes of a run (FSDP2)"""
    adds_up: ClassVar[bool] = False
    """whether `finish_task` adds up over the processes of a run what each finds in its own batches; if not, each gets
    all batches"""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.model, self.setup = model.eval().requires_grad_(False), setup
        self.num_features: int = model.num_features  # type: ignore[assignment]
        self.device = next(model.parameters()).device
        self.known_tasks = int(setup.known_classifier is not None)  # tasks in which nothing trains
        self.options = build_config(self.options_class, setup.options, self.name)
        if self.needs_attention:
            with_attention(model, self.name)
        self.tuning = self.make_tuning()
        depths = setup.features.depths
        self.reader = FeatureReader(model, self.own_depths if depths == "auto" else depths, setup.features.pool)
        self.classifier = self.make_classifier()  # predicts
        self.heads = self.classifier if isinstance(self.classifier, TaskHeads) else self.make_heads()  # train
        self.start: dict[str, Tensor] = {}
        """the trained parameters when the task started, if the classifier follows the drift of the features"""
        self.calibration: Calibration | None = None
        """of the classifier's scores, since the last `calibrate`"""
        self.current = Phase()
        """the phase that trains now"""
        if self.reader.indices and type(self).features is not Method.features:
            raise UserError(
                f"The method '{self.name}' changes the final feature, which other depths do not show: set "
                "features.depths to final."
            )
        self.kept = KeptFeatures(
            0 if self.why_not_calibrated() else setup.features.kept, len(self._learned_views(torch.empty(0, 0, 0, 0))),
            self.classifier.num_features, setup.seed,
        )  # fmt: skip

    # The parts

    def make_tuning(self) -> Tuning:
        """What trains in the backbone; by default nothing."""
        return ModelParameters(self.model)

    def make_heads(self) -> TaskHeads:
        """The heads that train if the classifier is computed when a task ends."""
        heads = CLASSIFIERS.get(self.own_classifier)(self.num_features)
        assert isinstance(heads, TaskHeads)
        return heads

    def classifier_defaults(self) -> dict[str, Any]:
        """Options of the method's own classifier, where they differ from the classifier's defaults."""
        return {}

    @property
    def input_features(self) -> int:
        """Number of values in a row of `classifier_input`."""
        return self.reader.num_features

    def make_classifier(self) -> Classifier:
        """The classifier that the configuration names."""
        named = self.setup.classifier
        if self.own_answer and (named not in ("auto", self.own_classifier) or self.reader.indices):
            raise UserError(
                f"The method '{self.name}' answers with the heads that it trains, on the final feature: leave "
                "classifier at auto and set features.depths to final."
            )
        kind = CLASSIFIERS.get(self.own_classifier if named == "auto" else named)
        given = {**(self.classifier_defaults() if named == "auto" else {}), **self.setup.classifier_options}
        if any(option.name == "seed" for option in fields(kind.options_class)):
            given.setdefault("seed", self.setup.seed)
        options = build_config(kind.options_class, given, kind.name)
        if kind.trains and self.features_stay:
            raise UserError(
                f"The method '{self.name}' trains {'only in the first task' if self.trains else 'nothing'}, but the "
                f"classifier '{kind.name}' has to be trained: choose the method frozen, or a classifier that is "
                "computed from features, such as ridge."
            )
        if kind.trains and self.reader.indices and type(self).loss is not Method.loss:
            raise UserError(
                f"The heads of '{self.name}' train on the final feature: set features.depths to final, or choose a "
                "classifier that is computed from features, such as ridge."
            )
        if getattr(options, "drift", "none") == "efc" and self.input_features != self.num_features:
            raise UserError(
                "The drift efc works on the final feature, which heads train on: set features.depths to final, or "
                "choose another drift."
            )
        return kind(self.input_features, **asdict(options))

    def overview(self) -> str:
        """What trains and how it is protected, in one line for the start of a run; empty if there is nothing to say."""
        return ""

    # One task

    def trains_in(self, task: int) -> bool:
        """Whether this task has steps."""
        return self.trains and task >= self.known_tasks and not (self.first_task_only and task)

    @property
    def features_stay(self) -> bool:
        """Whether the features of an image stay the same from the end of the first task on."""
        return self.first_task_only or not self.trains

    def start_task(self, task: Task) -> None:
        """Called before the first step of a task."""
        if task.index < self.known_tasks:
            assert self.setup.known_classifier is not None
            self.heads.take_over(self.setup.known_classifier)
        else:
            self.heads.add_task(task.classes, task.seed, self.setup.warm_second_head and task.index == 1)
        self.heads.to(self.device)
        self._follow_heads()
        self.start = {name: tensor.clone() for name, tensor in self._trained().items()}

    def named_parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """The parameters that the current task trains, by role: "backbone" and "classifier" have separate learning
        rates."""
        return {"backbone": self.tuning.trained(), "classifier": self.heads.trained()}

    def rate_factors(self) -> dict[str, float]:
        """For each further role of `named_parameters`: the factor of `training.lr` that is its learning rate."""
        return {}

    @property
    def task(self) -> int:
        """Index of the current task, or of the last one learned."""
        return len(self.heads.heads) - 1

    def phase(self, epoch: int, epochs: int) -> Phase:
        """What trains in an epoch of a task; the same for the same arguments and state, so that a run can resume in any
        epoch. Asked before `start_epoch`, and again after it, which may have decided otherwise."""
        return Phase()

    def enter(self, phase: Phase) -> None:
        """Called when a phase begins or resumes."""
        self.current = phase
        for role, named in self.named_parameters().items():
            for _, parameter in named:
                parameter.requires_grad_(phase.roles is None or role in phase.roles)

    def start_epoch(self, epoch: int, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
        """Called before each epoch. `batches()` gives its training images, augmented, for methods that need to see
        them all first. Random numbers must come from the task's seed and the epoch."""

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Called with the optimizer of each task; returns the optimizer to use."""
        return optimizer

    def features(self, images: Tensor) -> Tensor:
        """The final feature, (b, d)."""
        return self.model(images)

    def classifier_input(self, images: Tensor) -> Tensor:
        """What the classifier gets that predicts, (b, d): features of several depths, or the final one."""
        return self.reader(images) if self.reader.indices else self.features(images)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch of the current task, and the number of correctly classified images."""
        predict = self.heads is self.classifier  # then they see what the configuration says, else the final feature
        return self.task_loss((self.classifier_input if predict else self.features)(images), labels)

    def task_loss(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy over the classes of the current task, for features (b, d), and the number of correct images."""
        logits = self.heads.task_logits(features)
        labels = labels - (self.heads.classes - logits.shape[1])  # the current head counts from 0
        return F.cross_entropy(logits, labels), (logits.argmax(dim=1) == labels).sum()

    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Called after the last step of a task, with its training images under evaluation transforms. Returns seconds
        by phase."""
        return {}

    def stored(self) -> StoredImages | None:
        """Images of earlier tasks that join the training batches of the current one, and that follow its images in the
        batches of `finish_task`. The same object as long as they are the same."""
        return None

    def keep_images(self, read: Callable[[int], Tensor]) -> None:
        """Called after `finish_task` if it `stores_images`: `read` gives the pixels, uint8 (3, h, w), of one of the
        task's images by its position in those batches."""

    def follow_drift(self, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
        """Called before `fit_classifier`; `batches()` gives the same images. Corrects the classifier for what the task
        has done to the features of old classes. Only if `start` is kept."""
        assert isinstance(self.classifier, FollowsDrift)
        self.classifier.follow(self.moved_features(batches()), self.task_end(batches))

    @torch.no_grad()
    def moved_features(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """What the classifier gets for images before the task and after it, and their labels."""
        for images, labels in self._views_to_learn(batches):
            new = at_least_float32(self.classifier_input(images))
            with self.before_task():
                old = at_least_float32(self.classifier_input(images))
            yield old, new, labels

    def task_end(self, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> TaskEnd:
        """What kinds of drift correction may need beside these features."""
        return TaskEnd(
            seed=1000 * self.setup.seed + self.task,
            heads=self.heads,
            images=lambda: (images for images, _ in self._views_to_learn(batches())),
            features=lambda images: at_least_float32(self.classifier_input(images)),
            before=self.before_task,
        )

    def before_task(self) -> AbstractContextManager[None]:
        """Within it, the trained parameters are those from before the task. Only if `start` is kept."""
        return self.with_values(self.start)

    @contextmanager
    def with_values(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it, the trained parameters have these values."""
        now = {name: parameter.detach().clone() for name, parameter in self.tuning.trained()}
        try:
            self._set_values(values)
            yield
        finally:
            self._set_values(now)

    @torch.no_grad()
    def _set_values(self, values: Mapping[str, Tensor]) -> None:
        let_go(self.model)
        for name, parameter in self.tuning.trained():
            parameter.copy_(values[name])

    def _learned_views(self, images: Tensor) -> list[Tensor]:
        return [images, images.flip(3)] if self.setup.features.mirror != "none" else [images]

    def _views_to_learn(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in batches:
            labels = labels.to(self.device)
            for view in self._learned_views(images.to(self.device)):
                yield view, labels

    def _trained(self) -> dict[str, Tensor]:
        """The trained parameters, if the classifier follows the drift; empty if nothing can move."""
        follows = isinstance(self.classifier, FollowsDrift) and self.classifier.options.drift != "none"
        return {name: p.detach() for name, p in self.tuning.trained()} if follows else {}

    @torch.no_grad()
    def fit_classifier(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Called after `finish_task`, with the same images, if the classifier is computed from features. With several
        processes, each computes the features of its own part of a batch, of which some images may have no label: they
        do not count."""
        for images, labels in batches:
            images, labels, views = images.to(self.device), labels.to(self.device), []
            every_label = processes.rows(labels)
            for view in self._learned_views(images):
                features = self.classifier_input(view)
                with full_precision(features):  # autocast is for the backbone only
                    views.append(processes.rows(at_least_float32(features)[: len(labels)]))
                    self.classifier.update(views[-1], every_label)
            self.kept.add(views, every_label)
        with full_precision(next(self.model.parameters())):
            self.classifier.finish_task()

    @torch.no_grad()
    def calibrate(self) -> None:
        """Called when the classifier is complete for a task: calibrates its probabilities, on the features that were
        kept, as if it had never seen them."""
        self.calibration = None
        features, labels = self.kept.read()
        if len(labels):
            with full_precision(next(self.model.parameters())):
                known, foreign = self.classifier.left_out(features.to(self.device), labels.to(self.device))
            views = len(self.views(torch.empty(0, 0, 0, 0)))
            known, foreign = known[:, :views].mean(1), foreign[:, :views].mean(1)
            estimates = self.classifier.estimates_probabilities
            self.calibration = calibrated(known, foreign, labels.to(self.device), estimates)

    def why_not_calibrated(self) -> str:
        """Why `calibrate` can do nothing, as the end of a sentence with the remedy; empty if it can."""
        name = self.classifier.name
        if type(self).make_tuning is not Method.make_tuning and not self.features_stay:
            return f"the method {self.name} trains the backbone, which moves old features: use the method analytic"
        if not self.classifier.updates or not self.classifier.leaves_out:
            return f"the classifier {name} cannot be: use ridge, lda or nearest-mean"
        if not self.setup.features.kept:
            return "the run keeps no features for it: train it with --features.kept 500"
        return ""

    def moved(self) -> list[dict[str, Tensor]]:
        """For each finished task, how much of its updates was protected: see `NullSpace.update_energy`."""
        return []

    def protected(self) -> dict[str, Any]:
        """For results.json: how much of earlier tasks' features is protected; empty if nothing is."""
        return {}

    def free(self) -> dict[str, float]:
        """The share of directions in which each protected part can still move; empty if nothing is protected."""
        return {}

    def predict(self, images: Tensor) -> Tensor:
        """Scores of all classes seen so far, by label."""
        return self.classifier.scores(self.classifier_input(images))

    def views(self, images: Tensor) -> list[Tensor]:
        """The images to predict from: with `features.mirror: both`, also the mirror images."""
        return [images, images.flip(3)] if self.setup.features.mirror == "both" else [images]

    def answer(self, images: Tensor) -> Tensor:
        """The sum of what `predict` says about each view."""
        return torch.stack([self.predict(view) for view in self.views(images)]).sum(0)

    def scores(self, inputs: list[Tensor]) -> Tensor:
        """The same from the classifier's input for each view."""
        return torch.stack([self.classifier.scores(x) for x in inputs]).sum(0)

    # State

    def state_dict(self) -> dict[str, Tensor]:
        heads = {name: tensor for name, tensor in self.heads.state_dict().items() if name.startswith(HEADS)}
        return {**self.tuning.state_dict(), **heads}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises KeyError or RuntimeError if the state does not match."""
        heads = {name: tensor for name, tensor in state.items() if name.startswith(HEADS)}
        self.tuning.load_state_dict({name: tensor for name, tensor in state.items() if name not in heads})
        others = {name: tensor for name, tensor in self.heads.state_dict().items() if not name.startswith(HEADS)}
        self.heads.load_state_dict({**others, **heads})
        self.heads.to(self.device)
        self._follow_heads()

    @property
    def needs_task_state(self) -> bool:
        """Whether `predict` needs the tensors of `task_state_dict`."""
        return self.classifier.updates

    @property
    def answers_from_statistics(self) -> bool:
        """Whether `predict` goes by statistics that `finish_task` has gathered, without the heads that train."""
        return self.needs_task_state and not self.classifier.updates

    def task_state_dict(self) -> dict[str, Tensor]:
        if not self.classifier.updates:
            return {}
        state = self.classifier.state_dict()
        own = {CLASSIFIER + name: tensor for name, tensor in state.items() if not name.startswith(HEADS)}
        own |= {START + name: tensor for name, tensor in self._trained().items()}
        if self.kept.room:
            own |= {KEPT + name: tensor for name, tensor in self.kept.state_dict().items()}
        if self.calibration is not None:
            own |= {CALIBRATION + name: tensor for name, tensor in self.calibration.state_dict().items()}
        return own

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.classifier.updates:
            own = {name.removeprefix(CLASSIFIER): t for name, t in state.items() if name.startswith(CLASSIFIER)}
            heads = {name: t for name, t in self.classifier.state_dict().items() if name.startswith(HEADS)}
            self.classifier.load_state_dict({**heads, **own})
            self.classifier.to(self.device)
            self._follow_heads()
            start = {name.removeprefix(START): t for name, t in state.items() if name.startswith(START)}
            trained = dict(self.tuning.trained()) if start else {}
            self.start = {name: cut_like(tensor, trained[name]) for name, tensor in start.items()}
            self._load_calibration(state)

    def _load_calibration(self, state: Mapping[str, Tensor]) -> None:
        """Without features of the tasks so far, those of later tasks are no sample of all: none are kept."""
        found, kept = (
            {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
            for prefix in (CALIBRATION, KEPT)
        )
        self.calibration = Calibration.from_state(found)
        if kept and self.kept.room:
            self.kept.load_state_dict(kept)
        elif not kept:
            self.kept.room = 0

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The parts of `state_dict` and `task_state_dict` that `answer` needs. A method that has loaded them predicts,
        but cannot continue to train."""
        kept = {name: tensor for name, tensor in task_state.items() if not name.startswith((START, KEPT))}
        return dict(state), kept if self.needs_task_state else {}

    def task_text(self) -> dict[str, str]:
        """Metadata for readers of the task's state."""
        return {}

    def _follow_heads(self) -> None:
        """Adds the current task's classes to a classifier that does not train, when a task starts or resumes."""
        if not self.classifier.trains:
            self.classifier.add_task(self.heads.classes - self.classifier.classes, self.setup.seed)
            self.classifier.to(self.device)
