"""Plugins for Avalanche: `NullSpacePlugin` protects what a model has learned, `ClassifierPlugin` predicts with a
classifier computed from features. Both work with every supervised strategy.

    space = mambacl.NullSpace(model, "exact", rank="energy:0.99", layers="all", leave=["classifier"])
    strategy = Naive(model=model, optimizer=optimizer, criterion=loss, plugins=[NullSpacePlugin(space)])
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

try:
    from avalanche.core import SupervisedPlugin
except ImportError as error:
    raise ImportError("mambacl.avalanche needs Avalanche: pip install 'mambacl[avalanche]'.") from error

from mambacl.classifiers import StatisticsClassifier
from mambacl.nullspace import NullSpace
from mambacl.nullspace.statistics import evaluating


def images_of(strategy: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The training images of the current experience, transformed as in evaluation, without replayed ones."""
    dataset = strategy.experience.dataset.eval()
    for images, labels, *_ in DataLoader(dataset, batch_size=strategy.eval_mb_size):
        yield images, labels


class NullSpacePlugin(SupervisedPlugin):
    """Projects the strategy's steps and consolidates after each experience. In each experience the optimizer starts
    without moments, which would come from before the consolidation.

    `forward` runs a batch of images through the model; by default the space's model does.
    """

    def __init__(self, space: NullSpace, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.space, self.forward = space, forward

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        self.space.wrap(strategy.optimizer)
        if self.space.tasks:
            strategy.optimizer.state.clear()

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        self.space.consolidate(images_of(strategy), self.forward)


class ClassifierPlugin(SupervisedPlugin):
    """Updates a classifier, such as `Ridge`, with the features of each experience, and replaces the model's output in
    evaluation by its scores. `features` maps images to (b, d). Classes may come in any order."""

    def __init__(self, classifier: StatisticsClassifier, features: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.classifier, self.features = classifier, features
        self.order: list[int] = []
        """Avalanche's class of each label of the classifier"""

    @torch.no_grad()
    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        self.classifier.to(strategy.device)
        with evaluating(strategy.model):
            for images, classes in images_of(strategy):
                self.order += [known for known in dict.fromkeys(classes.tolist()) if known not in self.order]
                labels = torch.tensor([self.order.index(known) for known in classes.tolist()])
                self.classifier.update(self.features(images.to(strategy.device)).float(), labels)
        self.classifier.finish_task()

    @torch.no_grad()
    def after_eval_forward(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        if not self.order:  # evaluated before the first experience
            return
        scores = self.classifier.scores(self.features(strategy.mb_x))
        width = 1 + max(*self.order, int(strategy.mb_y.max()), strategy.mb_output.shape[1] - 1)
        output = scores.new_full((len(scores), width), -1e9)  # finite, so that the loss of a class to come is, too
        output[:, self.order] = scores
        strategy.mb_output = output
