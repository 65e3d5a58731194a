"""The training loop: tasks, epochs, steps; after each task, the method finishes it, then evaluation and results.

It works with any method. Several processes train one run together (`processes`): each takes its share of the images
(`task_batches`), all end with the same parameters and statistics, and the first writes the files.
"""

import copy
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mambacl import processes
from mambacl.log import logger
from mambacl.methods import Method, Task
from mambacl.nullspace.sharing import is_cut
from mambacl.scenarios import AMONG_ALL, Scenario, chosen
from mambacl.training import auditing, checkpoints
from mambacl.training.checkpoints import Background, Checkpoint, Position, TaskState
from mambacl.training.confusion import count_confusion
from mambacl.training.folder import SCHEMA, RunFolder, task_file
from mambacl.training.metrics import accuracy_over_images, accuracy_over_tasks, all_metrics
from mambacl.training.optimizers import make_optimizer
from mambacl.training.progress import Progress
from mambacl.training.provenance import versions
from mambacl.training.recipe import Recipe
from mambacl.training.recorded import CUDAGraphs, Recorded
from mambacl.training.seconds import Watch, with_other
from mambacl.training.step import Recorder, TrainingStep, autocast
from mambacl.training.task_batches import Batches, TaskBatches, TaskStream, share
from mambacl.training.tracking import Trackers

CHECKPOINT_EVERY = 1.0  # seconds between background checkpoints: copying one takes longer than a step
STATE_EVERY = 10.0  # seconds between checkpoints on a GPU if nothing trains: a task takes less time than its state
KEPT = 1 << 30  # bytes of test images' features that an evaluation keeps for the next one
LARGE = 1 << 30  # bytes; a task state above this is not copied to be written in the background


class TrainingError(RuntimeError):
    """A run that cannot continue: one sentence with the remedy."""

    def __init__(self, words: str, everywhere: bool = False) -> None:
        """`everywhere`: whether all processes of the run say the same."""
        super().__init__(words)
        self.everywhere = everywhere


class Diverged(TrainingError):
    """The loss is not finite: another start would end alike."""


class Loop:
    def __init__(
        self,
        method: Method,
        stream: TaskStream,
        recipe: Recipe,
        folder: RunFolder,
        progress: Progress,
        header: dict[str, Any],
        device: torch.device,
        bf16: bool = False,
        seed: int = 0,
        audit_images: int = 0,
        fast: bool = True,
        scenario: Scenario = "class",
        watch: Watch | None = None,
        trackers: Trackers | None = None,
        sharded: bool = False,
    ) -> None:
        """`header`: further entries for results.json; `fast`: whether steps can be recorded as CUDA graphs; `watch`:
        counts the seconds since the run began; `trackers` also get the events of metrics.jsonl; `sharded`: whether the
        backbone's weights are cut among the processes, which then have to run it equally often."""
        self.watch = watch or Watch()
        self.seconds_before: dict[str, float] = {}  # in earlier processes
        self.saved_at = -math.inf  # time of the latest checkpoint
        self.scenario = scenario
        self.batches = TaskBatches(stream, method, recipe, sharded)
        self.audit_images, self.fast = audit_images, fast
        self.method, self.stream, self.recipe, self.folder = method, stream, recipe, folder
        self.progress, self.header, self.device, self.bf16, self.seed = progress, header, device, bf16, seed
        self.trackers = trackers or Trackers([])
        progress.figures, progress.memory = self._figures, lambda: peak_memory(device)
        self.position = Position()
        self.optimizer: torch.optim.Optimizer | None = None
        self.step: TrainingStep | None = None
        self.recorder = Recorder(device)
        # parts of a cut model are written by all processes together, so not beside the training
        self.background = Background(fast and device.type == "cuda" and not sharded)
        self.names: list[str] = []
        self.answers: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # of the latest evaluation, by task
        self.kept: dict[int, list[tuple[list[Tensor], Tensor]]] = {}  # test images' features, by task
        self.room = KEPT

    def run(self, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
        """Trains from the beginning, or from a checkpoint, to the end. Returns the results; the caller writes them when
        nothing else is left to do."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if checkpoint is not None:
            self._restore(checkpoint)
        elif processes.is_first():
            self.folder.truncate_events(0)
            self.write_results("running")
        for task in range(self.position.task, len(self.stream.tasks)):
            self._train_task(task)
            self._end_task(task)
        self.background.wait()
        return self.results("finished")

    def _phase(self, counted: str, text: str, task: int, of: int = 0, epoch: int = 0, epochs: int = 0) -> None:
        tasks = len(self.stream.tasks)
        self.progress.phase(counted, text, of, task=task + 1, tasks=tasks, epoch=epoch, epochs=epochs)

    def _figures(self) -> tuple[float, float]:
        assert self.step is not None
        return self.step.means()

    # One task

    def _start_task(self, task: int) -> None:
        recipe, classes = self.recipe, len(self.stream.tasks[task])
        steps = recipe.epochs * -(-self.stream.train_count(task) * recipe.passes_per_epoch // recipe.batch_size)
        first, seed = self.stream.first_label(task), task_seed(self.seed, task)
        self.method.start_task(Task(task, classes, first, seed, steps))
        if processes.count() > 1:
            self._check_equal(task)

    def _check_equal(self, task: int) -> None:
        """What each process computes by itself has to be the same everywhere, or they would train different models."""
        state = {**self.method.state_dict(), **self.method.task_state_dict()}
        different = processes.differing({name: tensor for name, tensor in state.items() if not is_cut(tensor)})
        if different is not None:
            raise TrainingError(
                f"The processes hold different values of {different} at the start of task {task + 1}, so they would "
                "train different models: use GPUs of one kind.",
                everywhere=True,
            )

    def _train_task(self, task: int) -> None:
        if self.position.epoch == 0:
            self._start_task(task)
        if not self.method.trains_in(task):
            return
        for epoch in range(self.position.epoch, self.recipe.epochs):
            self._enter_phase(epoch)
            self._train_epoch(task, epoch)
            self.position.epoch = epoch + 1
            self._save()
        self.optimizer = self.step = None

    def _enter_phase(self, epoch: int) -> None:
        """Makes optimizer and step when a task starts or resumes, and when the method's next phase begins."""
        method, epochs = self.method, self.recipe.epochs
        phase = method.phase(epoch, epochs)
        if self.step is not None and phase == method.current:
            return
        begins = self.step is not None or (epoch > 0 and method.phase(epoch - 1, epochs) != phase)
        method.enter(phase)
        if self.optimizer is None or (begins and phase.new_optimizer):
            self._new_optimizer()
        self._new_step()

    def _train_epoch(self, task: int, epoch: int) -> None:
        recipe = self.recipe
        place = f"task {task + 1}/{len(self.stream.tasks)} epoch {epoch + 1}/{recipe.epochs}"
        count = self.batches.count(task) * recipe.passes_per_epoch
        compiling = self.device.type == "cuda" and "train" not in self.watch.seconds
        self._phase("", "reading images", task, 0, epoch + 1, recipe.epochs)

        def epoch_batches() -> Batches:
            return self.batches.to_train(task, epoch)

        self.method.start_epoch(epoch, epoch_batches)
        self._enter_phase(epoch)
        if self.method.current.roles == ():
            self.progress.skip("train", count)
            return
        with self.watch.phase("data"):
            batches = share(epoch_batches())
        steps, size = len(batches), recipe.batch_size  # type: ignore[arg-type]
        self._phase("train", "compiling" if compiling else "training", task, count, epoch + 1, recipe.epochs)
        assert self.step is not None
        started = time.perf_counter()
        for step, (images, labels) in enumerate(batches):
            whole = len(labels) if processes.count() == 1 else min(size, count - step * size)
            self.step(images, labels, self._rate(epoch, step / steps), of=whole if processes.count() > 1 else 0)
            if step == 0 and compiling:
                self.progress.text("training")
            self.progress.step(whole)
        loss_sum, right, images_seen = self.step.take_sums()
        loss_mean, accuracy = loss_sum / images_seen, right / images_seen
        seconds = time.perf_counter() - started
        if not np.isfinite(loss_mean):
            raise Diverged(
                f"The loss in {place} is not finite: lower training.lr or training.head_lr, or use precision float32.",
                everywhere=True,
            )
        self.watch.add("train", seconds)
        self.position.images += images_seen
        self._record("epoch", task=task, epoch=epoch, loss=loss_mean, accuracy=accuracy, images=images_seen,
                     lr=self._rate(epoch) * recipe.lr, seconds=seconds)  # fmt: skip
        speed = images_seen / seconds
        self.progress.epoch(f"{place}  loss {loss_mean:.4f}  accuracy {accuracy:6.1%}  {speed:.0f} images/s")

    def _rate(self, epoch: int, share: float = 0.0) -> float:
        """The factor of the learning rates when this share of an epoch is done."""
        recipe, phase = self.recipe, self.method.current
        if phase.epochs:
            recipe = replace(recipe, passes=phase.epochs * recipe.passes_per_epoch)
            epoch -= phase.first
        done = (epoch + (share if recipe.schedule == "cosine" else 0)) * recipe.passes_per_epoch
        return recipe.lr_factor(done) * phase.rate

    def _new_optimizer(self) -> None:
        self.names, groups = [], []
        rates = {"backbone": self.recipe.lr, "classifier": self.recipe.head_lr}
        rates |= {role: factor * self.recipe.lr for role, factor in self.method.rate_factors().items()}
        for role, named in self.method.named_parameters().items():
            if named:
                self.names += [name for name, _ in named]
                rate = rates[role]
                groups.append({"params": [p for _, p in named], "lr": rate, "base_lr": rate})
        on_gpu = self.fast and self.device.type == "cuda"
        self.optimizer = self.method.wrap(make_optimizer(self.recipe, groups, self.device if on_gpu else None))

    def _new_step(self) -> None:
        assert self.optimizer is not None
        graphs = self.fast and self.method.recordable
        self.step = TrainingStep(
            self.method, self.optimizer, self.device, self.bf16, graphs, self.recorder, self.recipe.clip,
            self.recipe.accumulate,
        )  # fmt: skip

    # The end of a task

    def _consolidate(self, task: int) -> None:
        """What the method and its classifier take from a task whose steps are done."""
        recipe = self.recipe
        if consolidates(self.method):
            self._phase("covariance", "consolidating", task, self.batches.count(task))
        parts = processes.count() if self.method.adds_up else 1
        done = self.method.finish_task(self.progress.over(self.batches.to_finish(task), parts))
        if self.method.stores_images:
            self.method.keep_images(partial(self.stream.train_image, task))
        for phase, seconds in done.items():
            self.watch.add(phase, seconds)
        if self.method.classifier.updates:
            self._phase("classifier", "learning features", task, self.stream.train_count(task))
            batches = self.batches.to_learn(task)
            with self.watch.phase("classifier"), autocast(self.device, self.bf16):
                if self.method.start:
                    self.progress.text("following the drift")
                    self.method.follow_drift(lambda: self.stream.plain_batches(task, recipe.eval_batch_size))
                    self.progress.text("learning features")
                self.method.fit_classifier(self.progress.over(batches, processes.count()))
                self.method.calibrate()

    def _end_task(self, task: int) -> None:
        recipe, position, tasks = self.recipe, self.position, len(self.stream.tasks)
        place = f"task {task + 1}/{tasks}"
        self._consolidate(task)
        if self.audit_images:
            with self.watch.phase("audit"):
                images = self.stream.some_images(task, self.audit_images).to(self.device)
                auditing.keep(self.folder, task, self.method.model, images)
        with self.watch.phase("evaluate"):
            row = self.evaluate(task)
            classes = [c for own in self.stream.tasks for c in own]  # by label
            if processes.is_first():
                self.folder.write_confusion(task, count_confusion(self.answers, classes))
        position.correct.append(row)
        tensors, text = self.method.task_state_dict(), self.method.task_text()
        state = TaskState(task_file(task), tensors, text) if tensors else None
        position.task_file = None if state is None else state.name
        position.state_bytes = checkpoints.nbytes({**self.method.state_dict(), **tensors})
        position.task, position.epoch = task + 1, 0
        total = self.stream.test_counts()
        self._record("task", task=task, correct=row, total=total[: task + 1])
        self._save(state)
        over = accuracy_over_tasks if recipe.headline == "tasks" else accuracy_over_images
        average = over(position.correct, total)[-1]
        each = " ".join(f"{right / total[j]:.1%}" for j, right in enumerate(row[:12])) + (" ..." if task > 11 else "")
        self.progress.state.test_accuracy = average
        self.progress.line(f"after {place}: accuracy {average:.1%}  (by task: {each})")
        self._warn_if_hardly_chosen(task, row[task], total[task])

    def _warn_if_hardly_chosen(self, task: int, found: int, images: int) -> None:
        """The scores of heads that train apart do not compare: those of earlier heads can be larger for every image."""
        classes = self.stream.first_label(task + 1)
        if (
            task == 0
            or self.scenario not in AMONG_ALL
            or not self.method.classifier.trains
            or found * classes >= images
        ):
            return
        earlier = "the checkpoint's classifier has" if task == self.method.known_tasks else "earlier ones have"
        logger.warning(
            "%d of %d test images of task %d are recognised, fewer than by guessing among all %d classes: the heads of "
            "the tasks were trained apart, and %s larger scores. Use a classifier computed from the features of all "
            "tasks (--classifier lda), or see `mambacl evaluate RUN --scenario task`.",
            found, images, task + 1, classes, earlier,
        )  # fmt: skip

    def evaluate(self, task: int) -> list[int]:
        """The number of correct test images of each task up to this one."""
        self.answers = self._answer(task)
        return [int((found == labels).sum()) for labels, found in self.answers]

    @torch.no_grad()
    def _answer(self, task: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Labels and answers for the test images of each task up to this one."""

        def plain(images: Tensor) -> Tensor:
            with autocast(self.device, self.bf16):
                return self.method.answer(images)

        predict: Callable[[Tensor], Tensor] = plain

        on_gpu = self.fast and self.device.type == "cuda" and not self.batches.sharded
        if on_gpu and self.method.recordable:  # nothing moves during an evaluation
            predict = Recorded(plain, tuple, record=CUDAGraphs(self.recorder))
        sizes, total = [len(classes) for classes in self.stream.tasks], self.stream.test_counts()
        computed = sum(total[j] for j in range(task + 1) if j not in self.kept)
        self._phase("evaluate", "evaluating", task, computed)
        found = []
        for j in range(task + 1):
            parts = [(labels, chosen(logits, self.scenario, sizes, j)) for logits, labels in self._scores(j, predict)]
            empty = torch.zeros(2, 0, dtype=torch.int64)
            both = torch.cat([torch.stack(part) for part in parts], dim=1) if parts else empty.to(self.device)
            both = processes.rows(both.T).T.cpu()  # in another order with several processes
            found.append((both[0].numpy(), both[1].numpy()))
        return found

    def _scores(self, task: int, predict: Callable[[Tensor], Tensor]) -> Batches:
        """Scores and labels of a task's test images, in batches. If nothing trains after the first task, the features
        of the images stay the same, and are computed once if they fit into KEPT bytes."""
        method, device = self.method, self.device
        if task in self.kept:
            for inputs, labels in self.kept[task]:
                yield method.scores(inputs), labels
            return
        kept: list[tuple[list[Tensor], Tensor]] | None = [] if method.features_stay else None
        for images, labels in self.batches.to_test(task):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            self.progress.step(len(labels) * processes.count())
            if kept is None:
                yield predict(images)[: len(labels)], labels
                continue
            with autocast(device, self.bf16):
                inputs = [method.classifier_input(view)[: len(labels)] for view in method.views(images)]
            kept.append((inputs, labels))
            yield method.scores(inputs), labels
        if kept is None:
            return
        # the processes decide alike: without kept features they have to meet in the backbone if it is cut
        size = max(processes.together(sum(x.nbytes for inputs, _ in kept for x in inputs)))
        if size <= self.room:
            self.kept[task], self.room = kept, self.room - size

    # Checkpoints and results

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.position = checkpoint.position
        self.seconds_before = dict(self.position.seconds)
        self.method.load_state_dict(checkpoint.method_state)
        if checkpoint.task_state:
            self.method.load_task_state_dict(checkpoint.task_state)
        if self.position.epoch > 0:
            self._new_optimizer()
            assert self.optimizer is not None
            checkpoints.load_optimizer(self.optimizer, self.names, checkpoint.optimizer_state)
        checkpoints.restore_random_state(checkpoint.random_tensors, checkpoint.random_text)
        if processes.is_first():
            self.folder.truncate_events(self.position.metrics_length)
            self.write_results("running")
            checkpoints.settle(self.folder, self.position)  # a killed process may not have come to it

    def _save(self, task_state: TaskState | None = None) -> None:
        """Writes a checkpoint, with the method's state at the end of a task. In the background, a checkpoint within a
        task is skipped if the one before is recent or still being written: on a GPU, an epoch can take less time than
        flushing to disk."""
        with self.watch.phase("checkpoints"):
            self._write_checkpoint(task_state)

    def _can_wait(self) -> bool:
        """Whether a checkpoint that is written in the background need not be written now."""
        since, unfinished = time.perf_counter() - self.saved_at, self.position.task < len(self.stream.tasks)
        if self.position.epoch > 0 and (self.background.busy or since < CHECKPOINT_EVERY):
            return True
        return unfinished and not self.method.trains and since < STATE_EVERY

    def _write_checkpoint(self, state: TaskState | None) -> None:
        if self.background.on and processes.from_first(self._can_wait()):
            return
        self.saved_at = time.perf_counter()
        mid_task = self.optimizer is not None and self.position.epoch > 0
        optimizer_state = checkpoints.optimizer_tensors(self.optimizer, self.names) if mid_task else {}  # type: ignore[arg-type]
        # of all processes: each can have a part of them
        tensors, text = checkpoints.write_parts(self.folder, self.method.state_dict(), optimizer_state)
        state = None if state is None else state.with_parts(self.folder)
        if not processes.is_first():
            return
        self.position.metrics_length = self.folder.events_length()
        self._count_seconds()
        if state is not None and self.background.on and state.nbytes() <= LARGE:
            state = state.on_cpu()
        elif state is not None:
            state.write(self.folder)
            state = None
        kept = checkpoints.contents(self.position, tensors, text, self.background.on)
        results = copy.deepcopy(self.results("running"))

        def write() -> None:
            self.folder.sync_events()
            if state is not None:
                state.write(self.folder)
            checkpoints.write(self.folder, *kept)
            self.folder.write_results(results)
            checkpoints.settle(self.folder, kept[0])

        self.background.do(write)

    def _record(self, event: str, **values: Any) -> None:
        if not processes.is_first():
            return
        self.folder.append_event({"event": event, **values})
        self.trackers.event({"event": event, **values})

    def _count_seconds(self) -> None:
        """Adds up the seconds of this process and of earlier ones, by phase."""
        seconds = dict(self.seconds_before)
        for phase, value in self.watch.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + value
        self.position.seconds = with_other(seconds, sum(self.seconds_before.values()) + self.watch.total())

    def write_results(self, status: str) -> dict[str, Any]:
        self.background.wait()
        results = self.results(status)
        if processes.is_first():
            self.folder.write_results(results)
        return results

    def note_end(self, status: str) -> None:
        """Writes why the run ends early. The results stay those of the last checkpoint."""
        if processes.is_first():
            self.folder.write_results({**(self.folder.results() or self.results(status)), "status": status})

    def results(self, status: str) -> dict[str, Any]:
        self._count_seconds()
        position, total = self.position, self.stream.test_counts()
        position.peak_memory = max(position.peak_memory, peak_memory(self.device))
        seconds = {**dict.fromkeys(PHASES, 0.0), **position.seconds}  # a method can add phases
        return {
            "schema": SCHEMA,
            "status": status,
            **self.header,
            "correct": position.correct,
            "total": total,
            "metrics": all_metrics(position.correct, total),
            **({"protected": protected} if (protected := self.method.protected()) else {}),
            **({"stored_images": self._stored_count()} if self.method.stores_images else {}),
            "seconds": seconds,
            "images_per_second": position.images / seconds["train"] if seconds["train"] else 0.0,
            "peak_memory_bytes": position.peak_memory,
            **({"processes": processes.count()} if processes.count() > 1 else {}),
            "state_bytes": position.state_bytes,
            **self._classifier_size(),
            "versions": versions(),
        }

    def _stored_count(self) -> int:
        stored = self.method.stored()
        return 0 if stored is None else len(stored)

    def _classifier_size(self) -> dict[str, int]:
        """The size of a classifier that is computed from features, once it has any, and of the features kept."""
        classifier, kept = self.method.classifier, self.method.kept
        if not classifier.updates or not self.position.correct:
            return {}
        return {"classifier_bytes": classifier.nbytes, **({"kept_bytes": kept.nbytes} if kept.room else {})}


def consolidates(method: Method) -> bool:
    """Whether the method reads a task's images when the task ends."""
    return type(method).finish_task is not Method.finish_task


def task_seed(seed: int, task: int) -> int:
    """For the random numbers of a task."""
    return int(np.random.SeedSequence([seed, task]).generate_state(1)[0])


PHASES = ("train", "covariance", "decomposition", "evaluate")


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of the GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
