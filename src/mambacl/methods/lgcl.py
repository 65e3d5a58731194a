"""LGCL, Language Guidance in prompt-based Continual Learning (Khan et al., ICCV 2023), on top of DualPrompt.

Two terms of the loss pull the task's key to a text embedding of the task, and features to that of their class, away
from those of earlier tasks. Text plays no part at test. The embeddings come from a file; the paper's are those of CLIP
ViT-L/14 for "A photo of {class}." and "A photo of {class} or {class}.".
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.errors import UserError
from mambacl.methods.dualprompt import DualPrompt, DualPromptOptions
from mambacl.methods.registry import METHODS
from mambacl.options import finite_from
from mambacl.tuning import Tuning
from mambacl.tuning.text_features import StoredTexts, random_direction


@dataclass(frozen=True)
class LGCLOptions(DualPromptOptions):
    """Options of LGCL, on top of DualPrompt's."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: DualPrompt as its authors' code has it, and features are pulled to their class in every task; public-code:
    DualPrompt's PyTorch port with its mistakes, and no pull of features in the first task"""
    text: Path | None = None
    """safetensors file with one embedding per class, named by the class, as wide as the backbone's feature; it can also
    have one per task, named by its sentence"""
    stand_in: Literal["none", "random"] = "none"
    """random: a fixed random direction per class in place of text; not LGCL as published"""
    task_weight: Annotated[float, finite_from(0)] = 0.3
    """weight of the task's term: 0.3 for ImageNet-R, 0.323 for CIFAR-100"""
    class_weight: Annotated[float, finite_from(0)] = 0.7
    """weight of the classes' term: 0.7 for ImageNet-R, 0.137 for CIFAR-100"""


class LGCL(DualPrompt):
    name = "lgcl"
    summary = "DualPrompt whose keys and features follow text embeddings (LGCL)"
    options_class: ClassVar[type] = LGCLOptions
    splits = False  # each image draws an earlier class

    def make_tuning(self) -> Tuning:
        options: LGCLOptions = self.options
        if (options.text is None) == (options.stand_in == "none"):
            raise UserError(
                "lgcl needs text embeddings of the class names: set options.text to a file of them, or "
                "options.stand_in to random for directions without text, and not both."
            )
        self.texts: tuple[Tensor, Tensor] | None = None
        """embeddings of the classes and of the tasks so far"""
        if options.text is not None and self.setup.class_names:  # a mistake in the file shows before any work is done
            stored = StoredTexts(options.text, self.num_features)
            for name in self.setup.class_names:
                stored.of_class(name)
        return super().make_tuning()

    def overview(self) -> str:
        if self.options.stand_in == "random":
            return "Random directions stand in for text embeddings (options.stand_in): not LGCL as published."
        return f"Text embeddings of the class names come from {self.options.text}."

    def embeddings(self) -> tuple[Tensor, Tensor]:
        """Of the classes (classes, c) and of the tasks (tasks, c) so far."""
        widths = self.heads.widths
        if self.texts is None or len(self.texts[1]) != len(widths):
            cuts = list(torch.arange(sum(widths)).split(widths))
            if self.options.stand_in == "random":
                drawn = [random_direction(label, self.num_features, self.setup.seed) for label in range(sum(widths))]
                classes = torch.stack(drawn)
                tasks = torch.stack([classes[cut].mean(0) for cut in cuts])
            else:
                names, stored = self.setup.class_names, StoredTexts(self.options.text, self.num_features)
                if len(names) < sum(widths):
                    raise UserError("lgcl: the names of the new classes are not known here: train them in a new run.")
                classes = torch.stack([stored.of_class(name) for name in names[: sum(widths)]])
                tasks = torch.stack([stored.of_task([names[label] for label in cut]) for cut in cuts])
            like = self.pools[0].keys
            self.texts = classes.to(like), tasks.to(like)  # type: ignore[arg-type]
        return self.texts

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        feature, pull = self.prompted(images, self.task)
        loss, correct = self.task_loss(feature, labels)
        classes, tasks = self.embeddings()
        task, first, options = self.task, sum(self.heads.widths[:-1]), self.options
        other_task = other_class = None
        if task:  # for each image an earlier task, and a class of earlier tasks
            other_task = tasks[torch.randint(task, labels.shape, device=labels.device)]
            other_class = classes[torch.randint(first, labels.shape, device=labels.device)]
        key: Tensor = self.pools[0].keys[None, task]  # type: ignore[index]
        loss = loss - options.pull * pull + options.task_weight * guidance(key, tasks[None, task], other_task)
        if task or options.variant == "paper":
            loss = loss + options.class_weight * guidance(feature, classes[labels], other_class)
        return loss, correct


def guidance(found: Tensor, own: Tensor, other: Tensor | None) -> Tensor:
    """The mean of 1 - cos(found, own) + cos(found, other); without the last term if there is nothing earlier."""
    near = 1 - F.cosine_similarity(found, own, dim=1).mean()
    return near if other is None else near + F.cosine_similarity(found, other, dim=1).mean()


METHODS.add(LGCL.name, LGCL)
