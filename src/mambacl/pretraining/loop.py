"""The loop of pre-training: epochs, steps, evaluations, checkpoints."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.data import Stream
from mambacl.data.image_cache import on_device
from mambacl.data.stream import mix_seeds
from mambacl.errors import UserError
from mambacl.files import read_tensors, write_tensors
from mambacl.log import logger
from mambacl.pretraining.average import WeightAverage, averaging_rate
from mambacl.pretraining.distorting import erase, jitter_colours, sample_boxes, sample_jitter
from mambacl.pretraining.mixing import mix_images, sample_mix, soft_targets
from mambacl.pretraining.options import PretrainConfig
from mambacl.pretraining.schedule import ByClock, ByEpochs, Schedule, lr_factor
from mambacl.training import checkpoints
from mambacl.training.checkpoints import Background
from mambacl.training.folder import RunFolder
from mambacl.training.loop import TrainingError, peak_memory
from mambacl.training.optimizers import without_compiler
from mambacl.training.progress import Progress
from mambacl.training.step import WARM_UP, TrainingStep, autocast

CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_EVERY = 10.0  # seconds between checkpoints on a GPU, where an epoch of small images takes a second or two
CLOCK_EVERY = 20  # steps between readings of the clock on a GPU, which must have caught up
AT_THE_END = 3  # evaluations: of the weights, of their average, and of the exported file
MIXING = 1  # marks the seeds of the mixing
SETTLED = WARM_UP + 2  # steps after which kernels are compiled and the step is recorded
UNDECAYED = ("A_log", "A_b_log", "A_logs", "dt_projs_bias", "cls_token", "pos_embed")
"""parameters of the backbones that are matrices, or more, but no weights of a linear map"""


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and convolutions; not to norms, biases, A, D and embeddings."""
    return parameter.dim() > 1 and name.rpartition(".")[2] not in UNDECAYED


class Softmax:
    """The loss of a model with a linear classifier."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    def logits(self, images: Tensor) -> Tensor:
        """Through the classifier itself: De-focus Mamba's output can have further rows, of an auxiliary head."""
        model = self.model
        return model.get_classifier()(model.forward_head(model.forward_features(images), pre_logits=True))

    def loss(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(images)
        return F.cross_entropy(logits, targets), (logits.argmax(1) == targets.argmax(1)).sum()


@dataclass
class Position:
    """How far the training has come."""

    epoch: int = 0
    steps: int = 0
    spent: float = 0.0
    progress: float = 0.0
    metrics_length: int = 0


class Pretraining:
    """Trains all parameters of `model`, which is on `device`; `average` holds the mean of its weights."""

    def __init__(
        self,
        config: PretrainConfig,
        model: nn.Module,
        stream: Stream,
        folder: RunFolder,
        device: torch.device,
        bf16: bool,
        fingerprint: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fingerprint`: of the data, which must be the same after an interruption."""
        self.config, self.model, self.stream, self.folder, self.device = config, model, stream, folder, device
        self.bf16, self.fingerprint, self.clock = bf16, fingerprint, clock
        self.classes, self.size = len(stream.class_order), stream.transforms.size
        self.mean, self.std = (on_device(values, device) for values in (stream.transforms.mean, stream.transforms.std))
        self.average = WeightAverage(model)
        self.names, self.optimizer = self._optimizer()
        recorded = config.fast and device.type == "cuda"
        self.step = TrainingStep(Softmax(model), self.optimizer, device, bf16, recorded)
        self.background = Background(recorded)
        self.position = Position()
        self.steps_per_epoch = max(1, stream.train_count(0) // config.batch_size)
        self._saved_at, self._saved_epoch = clock(), 0
        self.progress = Progress(config.backbone)
        self.progress.figures, self.progress.memory = self.step.means, lambda: peak_memory(device)

    def _optimizer(self) -> tuple[list[str], torch.optim.Optimizer]:
        """AdamW, which clips the gradients before its step and updates the average after it."""
        config, named = self.config, list(self.model.named_parameters())
        groups: list[dict[str, Any]] = []
        names: list[str] = []
        on_gpu = config.fast and self.device.type == "cuda"
        for decay in (True, False):
            chosen = [(name, parameter) for name, parameter in named if decays(name, parameter) == decay]
            if chosen:
                names += [name for name, _ in chosen]
                rate: Any = torch.tensor(config.lr, device=self.device) if on_gpu else config.lr
                groups.append({"params": [parameter for _, parameter in chosen], "lr": rate, "base_lr": config.lr,
                               "weight_decay": config.weight_decay if decay else 0.0})  # fmt: skip
        optimizer = without_compiler(torch.optim.AdamW)(groups, fused=on_gpu, capturable=on_gpu)
        parameters = [parameter for _, parameter in named]

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(parameters, config.clip)

        if config.clip:
            optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(lambda *_: self.average.update())
        return names, optimizer

    # Training

    def run(self) -> None:
        """Trains to the end, from where `position` is."""
        schedule = self._schedule()
        begun = self.position.steps
        self.progress.left, self.progress.deadline = self._work(), schedule.deadline
        self.model.train()
        for epoch in count(self.position.epoch):
            if schedule.progress(epoch) >= 1:
                break
            self._train_epoch(epoch, schedule, begun)
            self.position.epoch = epoch + 1
            self.position.spent, self.position.progress = schedule.spent(), schedule.progress(epoch + 1)
            if (epoch + 1) % self.config.evaluate_every == 0 and self.position.progress < 1:
                self.evaluate(epoch + 1)
            self._save()
        if self._saved_epoch < self.position.epoch:
            self._save(last=True)
        self.background.wait()

    def _work(self) -> dict[str, float]:
        """The images left, by phase, if the number of epochs is given."""
        config, done = self.config, self.position.epoch
        every, tested = config.evaluate_every, self.stream.test_counts()[0]
        between = (config.epochs - 1) // every - done // every
        images = self.steps_per_epoch * config.batch_size * (config.epochs - done)
        return {"train": images, "evaluate": tested * (2 * between + AT_THE_END)}

    def _schedule(self) -> Schedule:
        config, position = self.config, self.position
        if config.minutes is None:
            return ByEpochs(config.epochs, self.clock, position.spent)
        waits = self.device.type == "cuda"
        return ByClock(
            60 * config.minutes,
            self.clock,
            position.spent,
            position.progress,
            CLOCK_EVERY if waits else 1,
            (lambda: torch.cuda.synchronize(self.device)) if waits else (lambda: None),
        )

    def _train_epoch(self, epoch: int, schedule: Schedule, begun: int) -> None:
        config, steps = self.config, self.steps_per_epoch
        rng = np.random.Generator(np.random.PCG64(mix_seeds(config.seed, epoch, MIXING)))
        started, progress, factor = self.clock(), 0.0, 0.0
        place = {"epoch": epoch + 1, "epochs": 0 if config.minutes else config.epochs}
        self.progress.phase("", "reading images", **place)
        batches: Iterable[tuple[Tensor, Tensor]] = self.stream.train_batches(0, epoch, config.batch_size)
        self.progress.phase("train", "training", steps * config.batch_size, **place)
        for step, (images, labels) in zip(range(steps), batches, strict=False):  # without the last, smaller batch
            progress = schedule.progress(epoch + step / steps)
            if progress >= 1:
                break
            mix = sample_mix(rng, config.mixup, config.cutmix, config.mix_share, self.size)
            images, labels = images.to(self.device), labels.to(self.device)
            targets = soft_targets(labels, self.classes, mix, config.label_smoothing)
            factor = lr_factor(progress, config.warmup, config.final_lr)
            self.average.rate.fill_(averaging_rate(config.ema, self.position.steps))
            self.step(mix_images(self._distorted(images, rng), mix), targets, factor)
            self.position.steps += 1
            self.progress.step(len(labels))
            if self.position.steps == begun + SETTLED:
                schedule.settled()
        loss_sum, right, seen = self.step.take_sums()
        if not seen:
            return
        if not np.isfinite(loss_sum):
            raise TrainingError(f"The loss of epoch {epoch + 1} is not finite: lower lr, or use precision float32.")
        seconds = max(self.clock() - started, 1e-9)
        loss, accuracy, lr = loss_sum / seen, right / seen, factor * config.lr
        self.folder.append_event({"event": "epoch", "epoch": epoch + 1, "progress": progress, "loss": loss,
                                  "accuracy": accuracy, "lr": lr, "images": seen, "seconds": seconds})  # fmt: skip
        self.progress.epoch(
            f"epoch {epoch + 1} ({progress:.0%})  loss {loss:.4f}  lr {lr:.2g}  {seen / seconds:.0f} images/s"
        )

    def _distorted(self, images: Tensor, rng: np.random.Generator) -> Tensor:
        config = self.config
        if config.jitter:
            factors = on_device(sample_jitter(rng, len(images), config.jitter), self.device)
            images = jitter_colours(images, factors, self.mean, self.std)
        if config.erase:
            images = erase(images, on_device(sample_boxes(rng, len(images), config.erase, self.size), self.device))
        return images

    # Evaluation

    def evaluate(self, epoch: int) -> dict[str, float]:
        """The share of test images that the weights, and their average, classify correctly."""
        self.model.eval()
        found = {"raw": self.accuracy(self.model), "ema": self.accuracy(self.average.model)}
        self.model.train()
        self.folder.append_event({"event": "evaluation", "epoch": epoch, **found})
        self.progress.line(f"epoch {epoch}  top-1 {found['raw']:.2%}, of the average {found['ema']:.2%}")
        return found

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        self.progress.phase("evaluate", "evaluating", self.stream.test_counts()[0])
        right, softmax = torch.zeros((), dtype=torch.int64, device=self.device), Softmax(model)
        for images, labels in self.stream.test_batches(0, self.config.eval_batch_size):
            with autocast(self.device, self.bf16):
                logits = softmax.logits(images.to(self.device))
            right += (logits.argmax(1) == labels.to(self.device)).sum()
            self.progress.step(len(labels))
        return int(right) / self.stream.test_counts()[0]

    # Checkpoints

    def _save(self, last: bool = False) -> None:
        """After each epoch. On a GPU it is written in the background, and not more often than CHECKPOINT_EVERY, except
        for the last."""
        now = self.clock()
        recent = self.background.busy or now - self._saved_at < CHECKPOINT_EVERY
        if self.background.on and recent and not last:
            return
        self._saved_at, self._saved_epoch = now, self.position.epoch
        self.position.metrics_length = self.folder.events_length()
        parts = {"model": self.model.state_dict(), "average": self.average.model.state_dict(),
                 "optimizer": checkpoints.optimizer_tensors(self.optimizer, self.names)}  # fmt: skip
        tensors = {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
        if self.background.on:
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        random_tensors, random_text = checkpoints.random_state()
        tensors |= {f"random.{name}": tensor for name, tensor in random_tensors.items()}
        text = {
            "position": json.dumps(dataclasses.asdict(self.position)),
            "random": random_text,
            "data": self.fingerprint,
        }

        def write() -> None:
            self.folder.sync_events()
            write_tensors(self.folder.path / CHECKPOINT, tensors, text)

        self.background.do(write)

    def restore(self) -> None:
        """Continues from the checkpoint, if there is one."""
        path = self.folder.path / CHECKPOINT
        if not path.exists():
            self.folder.truncate_events(0)
            return
        try:
            tensors, text = read_tensors(path)
            parts: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "optimizer": {}, "random": {}}
            for full, tensor in tensors.items():
                part, _, name = full.partition(".")
                parts[part][name] = tensor
            if text["data"] != self.fingerprint:
                raise UserError("the data have changed")
            position = Position(**json.loads(text["position"]))
            self.model.load_state_dict(parts["model"])
            self.average.model.load_state_dict(parts["average"])
        except (UserError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{path} cannot be continued ({error}): start again with --overwrite.") from None
        checkpoints.load_optimizer(self.optimizer, self.names, parts["optimizer"])
        checkpoints.restore_random_state(parts["random"], text["random"])
        self.position, self._saved_epoch = position, position.epoch
        self.folder.truncate_events(position.metrics_length)
        logger.info("Continuing %s after epoch %d.", self.folder.path, position.epoch)
