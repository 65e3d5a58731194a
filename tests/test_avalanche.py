"""The plugins for Avalanche, with the real library."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mambacl.classifiers import LDA
from mambacl.nullspace import NullSpace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own dependencies
    pytest.importorskip("avalanche")
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import AvalancheDataset, DataAttribute
    from avalanche.training.supervised import Naive
pytestmark = pytest.mark.extras

from mambacl.avalanche import ClassifierPlugin, NullSpacePlugin  # noqa: E402

WIDTH = 12
PARTS = ([3, 1], [0, 2])  # classes of each experience


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 8, bias=False).double()
        self.register_buffer("readout", torch.randn(8, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.readout


def experiences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs of the first experience lie in four dimensions, so that a null space exists."""
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(24, 4, generator=generator, dtype=torch.float64)
    old = old @ torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
    new = torch.randn(24, WIDTH, generator=generator, dtype=torch.float64)
    return [(x, torch.tensor(part)[torch.arange(24) % 2]) for x, part in zip((old, new), PARTS, strict=True)]


def benchmark() -> Any:
    made = []
    for x, y in experiences():
        attributes = [DataAttribute(y.tolist(), "targets"), DataAttribute([0] * 24, "targets_task_labels")]
        made.append(AvalancheDataset(TensorDataset(x, y), data_attributes=[*attributes]))
    return benchmark_from_datasets(train=made, test=made)


def strategy(model: Model, *plugins: Any) -> Any:
    return Naive(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), criterion=F.cross_entropy,
        train_mb_size=24, train_epochs=3, eval_mb_size=8, plugins=list(plugins), evaluator=None,
    )  # fmt: skip


def space_of(model: Model) -> NullSpace:
    return NullSpace(model, "exact", layers="all")


def test_old_outputs_stay_and_the_result_is_that_of_a_plain_loop() -> None:
    (old, _), _ = experiences()
    model, plain = Model(), Model()
    plugin = NullSpacePlugin(space_of(model))
    naive = strategy(model, plugin)
    first, second = benchmark().train_stream
    naive.train(first)
    before, start = model(old).detach(), model.layer.weight.detach().clone()
    naive.train(second)
    moved = (model.layer.weight - start).norm()
    assert moved > 1e-2, "nothing was learned, so nothing is shown"
    assert (model(old) - before).norm() / before.norm() < 1e-10
    space = space_of(plain)
    for x, y in experiences():
        optimizer = space.wrap(torch.optim.Adam(plain.parameters(), lr=1e-2))
        for _ in range(3):  # one batch per epoch, so that its order matters only by rounding
            optimizer.zero_grad()
            F.cross_entropy(plain(x), y).backward()
            optimizer.step()
        space.consolidate(DataLoader(TensorDataset(x), batch_size=8))
    assert plugin.space.tasks == 2
    torch.testing.assert_close(model.layer.weight, plain.layer.weight, rtol=1e-9, atol=1e-9)


def test_a_classifier_answers_in_evaluation_whatever_the_order_of_classes() -> None:
    model, classifier = Model(), LDA(8)
    plugin = ClassifierPlugin(classifier, model.layer)
    outputs: list[torch.Tensor] = []

    class Keeps(NullSpacePlugin):
        def __init__(self) -> None:
            super().__init__(space_of(model))

        def after_eval_iteration(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
            outputs.append(strategy.mb_output)

    naive = strategy(model, plugin, Keeps())
    stream = benchmark()
    for experience in stream.train_stream:
        naive.train(experience)
    assert plugin.order == [3, 1, 0, 2]
    naive.eval(stream.test_stream[1])
    (_, _), (new, _) = experiences()
    scores = classifier.scores(model.layer(new).detach())
    torch.testing.assert_close(torch.cat(outputs)[:, plugin.order], scores)


def test_the_code_of_the_documentation() -> None:
    page = Path(__file__).parents[1] / "docs" / "integrations.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)[1]
    model = Model()
    model.classifier = nn.Linear(2, 2)
    names = {"model": model, "loss": F.cross_entropy, "benchmark": benchmark()}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=1e-2)
    exec(code, names)
    assert names["space"].tasks == 2
