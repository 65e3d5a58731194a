"""Heads aligned on samples of class Gaussians: SLCA's recorded numbers, what an alignment does, and its state."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tolerance import assert_near
from torch import Tensor

from mambacl.classifiers import AlignedHeads, ClassStatistics
from mambacl.classifiers.aligned import SLCA, AlignedOptions, age_factors, align, scaled_logits
from mambacl.errors import UserError

D, WIDTHS = 6, [2, 3]


# The recording: github.com/GengDavid/SLCA at 169d4e6, a tanh layer as the backbone, float64


@pytest.fixture(scope="module")
def recorded(goldens: Path) -> dict[str, Tensor]:
    return load_file(goldens / "slca.safetensors")


def encoded(recorded: dict[str, Tensor], task: int, inputs: Tensor) -> Tensor:
    weight, bias = (recorded[f"task{task}.trained.encoder.{name}"] for name in ("weight", "bias"))
    return torch.tanh(F.linear(inputs.double(), weight, bias))


def test_slca_statistics_as_recorded(recorded: dict[str, Tensor]) -> None:
    statistics = ClassStatistics(12)
    for task in range(3):
        statistics.update(encoded(recorded, task, recorded[f"task{task}.inputs"]), recorded[f"task{task}.labels"])
        covariances = statistics.covariances() + SLCA.ridge * torch.eye(12, dtype=torch.float64)
        torch.testing.assert_close(statistics.means(), recorded[f"task{task}.class_means"])
        torch.testing.assert_close(covariances, recorded[f"task{task}.class_covariances"])
        roots = statistics.roots(SLCA.own, SLCA.pooled, SLCA.ridge)
        torch.testing.assert_close(roots @ roots.mT, covariances)
        if task:
            means = statistics.means() * age_factors([3] * (task + 1), SLCA.age)[:, None]
            torch.testing.assert_close(means, recorded[f"task{task}.align.sampling_means"])


@pytest.mark.parametrize("task", [1, 2])
def test_slca_alignment_as_recorded(task: int, recorded: dict[str, Tensor]) -> None:
    """From the recorded samples: two epochs of as many batches as classes, at a learning rate of 0.05."""
    widths, options = [3] * (task + 1), dataclasses.replace(SLCA, epochs=2, samples=6, lr=0.05)
    weight, bias = (recorded[f"task{task}.trained.head.{name}"] for name in ("weight", "bias"))
    steps = [
        (recorded[f"task{task}.align.iter{i}.features"], recorded[f"task{task}.align.iter{i}.labels"])
        for i in range(2 * sum(widths))
    ]
    features, labels = steps[0]
    logits = scaled_logits(F.linear(features, weight, bias), widths, options.logit_norm)
    torch.testing.assert_close(logits, recorded[f"task{task}.align.iter0.scaled_logits"])
    torch.testing.assert_close(F.cross_entropy(logits, labels), recorded[f"task{task}.align.iter0.loss"])
    epochs = [steps[: sum(widths)], steps[sum(widths) :]]
    weight, bias = align(weight, bias, epochs, widths, options)
    torch.testing.assert_close(weight, recorded[f"task{task}.aligned.head.weight"], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(bias, recorded[f"task{task}.aligned.head.bias"], rtol=1e-9, atol=1e-11)
    answers = F.linear(encoded(recorded, task, recorded["test.inputs"]), weight, bias)
    torch.testing.assert_close(answers, recorded[f"task{task}.test_logits"], rtol=1e-9, atol=1e-11)


# The classifier


def some(task: int, count: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features of a task's classes, each around its own corner."""
    generator = torch.Generator().manual_seed(10 * seed + task)
    labels = torch.arange(count) % WIDTHS[task] + sum(WIDTHS[:task])
    return 3 * torch.eye(D)[labels] + 0.3 * torch.randn(count, D, generator=generator), labels


def train(heads: AlignedHeads, task: int, scale: float = 1.0) -> None:
    """A good head for its own task; `scale` makes its logits large beside those of other heads."""
    head = heads.heads[-1]
    first = sum(WIDTHS[:task])
    with torch.no_grad():
        head.weight.copy_(scale * torch.eye(D)[first : first + WIDTHS[task]])
        head.bias.fill_(scale)


def two_tasks(**options: object) -> AlignedHeads:
    heads = AlignedHeads(D, **options)
    for task, width in enumerate(WIDTHS):
        heads.add_task(width, seed=task)
        train(heads, task, scale=(0.1, 5.0)[task])
        heads.update(*some(task))
        heads.finish_task()
    return heads


def test_alignment_makes_heads_comparable() -> None:
    heads = two_tasks()
    features, labels = some(0, seed=1)
    separate = torch.cat([head(features) for head in heads.heads], dim=1)
    assert (separate.argmax(1) == labels).float().mean() < 0.2  # the second head shouts the first one down
    assert (heads.scores(features).argmax(1) == labels).float().mean() > 0.95
    assert torch.equal(heads.heads[0].weight, 0.1 * torch.eye(D)[:2])  # the heads themselves stay
    assert heads.nbytes == 5 * 8 * (D**2 + 2 * D + 2)  # as docs/methods.md says
    assert not heads.weight.requires_grad and not heads.scores(features).requires_grad


def test_the_first_task_needs_no_alignment() -> None:
    heads = AlignedHeads(D)
    heads.finish_task()  # of no task at all
    heads.add_task(2)
    features, labels = some(0)
    heads.update(features, labels)
    before = heads.heads[0](features)
    heads.finish_task()
    assert torch.equal(heads.scores(features), before)


def test_a_task_that_has_not_ended_answers_with_its_head() -> None:
    heads = two_tasks()
    features, _ = some(0)
    finished = heads.scores(features)
    heads.add_task(1, seed=7)
    scores = heads.scores(features)
    assert torch.equal(scores[:, :5], finished) and torch.equal(scores[:, 5:], heads.task_logits(features))
    assert [name for name, _ in heads.trained()] == ["heads.2.weight", "heads.2.bias"]


@pytest.mark.parametrize("accumulate", [False, True])
def test_where_an_alignment_starts(accumulate: bool) -> None:
    """Without epochs it stays there: at the heads, or at the previous alignment."""
    heads = two_tasks(accumulate=accumulate)
    aligned = heads.weight.clone()
    heads.options = AlignedOptions(epochs=0, accumulate=accumulate)
    heads.finish_task()
    trained = torch.cat([head.weight for head in heads.heads])
    assert not torch.equal(aligned, trained)
    assert torch.equal(heads.weight, aligned if accumulate else trained)


def test_samples_are_the_same_whenever_it_resumes() -> None:
    whole, features = two_tasks(), some(1, seed=1)[0]
    broken = AlignedHeads(D)
    broken.add_task(WIDTHS[0], seed=0)
    train(broken, 0, 0.1)
    broken.update(*some(0))
    broken.finish_task()
    resumed = AlignedHeads(D)
    resumed.load_state_dict({name: tensor.clone() for name, tensor in broken.state_dict().items()})
    resumed.add_task(WIDTHS[1], seed=1)
    train(resumed, 1, 5.0)
    for part in reversed(list(zip(*(tensor.split(7) for tensor in some(1)), strict=True))):
        resumed.update(*part)
    torch.manual_seed(99)  # plays no part
    resumed.finish_task()
    # The sums were added in another order, so roots differ by float64 rounding; each of the 25 steps is in float32.
    assert_near(resumed.scores(features), whole.scores(features), 25 * 256 * D, size=10.0)


def test_classes_without_images() -> None:
    heads = AlignedHeads(D)
    for task, width in enumerate(WIDTHS):
        heads.add_task(width, seed=task)
        features, labels = some(task)
        heads.update(features[labels != 3], labels[labels != 3])
        heads.finish_task()
    scores = heads.scores(some(0)[0])
    assert (scores[:, 3] == -torch.inf).all() and torch.isfinite(scores[:, [0, 1, 2, 4]]).all()
    heads.update(*some(1))  # it gets some later, as does an old class
    heads.update(some(0)[0][:1], torch.tensor([0]))
    heads.finish_task()
    assert torch.isfinite(heads.scores(some(0)[0])).all()


@pytest.mark.parametrize("own", [1.0, "auto"])
def test_single_images_and_constant_features(own: float | str) -> None:
    heads = AlignedHeads(D, own=own, pooled=0.0 if own == 1.0 else "auto", ridge=0.0)
    for task, width in enumerate(WIDTHS):
        heads.add_task(width, seed=task)
        first = sum(WIDTHS[:task])
        heads.update(torch.eye(D)[first : first + width], torch.arange(first, first + width))
        heads.finish_task()
    assert torch.isfinite(heads.scores(torch.eye(D))).all()


def test_logits_are_divided_by_the_norm_of_each_task() -> None:
    logits = torch.tensor([[3.0, 4.0, 1.0]])
    torch.testing.assert_close(scaled_logits(logits, [2, 1], 0.5), logits / 3.0 / 0.5)  # norms 5 and 1
    assert torch.equal(scaled_logits(logits, [2, 1], None), logits)


def test_mistakes_are_named() -> None:
    heads = AlignedHeads(D)
    heads.add_task(2)
    with pytest.raises(UserError, match="Label 2 has no head: add_task comes before update"):
        heads.update(torch.zeros(1, D), torch.tensor([2]))
    with pytest.raises(UserError, match="NaN or infinite"):
        heads.update(torch.full((1, D), float("nan")), torch.tensor([0]))
    with pytest.raises(UserError, match=r"update needs features \(b, 6\)"):
        heads.update(torch.zeros(1, D + 1), torch.tensor([0]))
    with pytest.raises(UserError, match="whole numbers from 0"):
        heads.update(torch.zeros(1, D), torch.tensor([-1]))
    with pytest.raises(UserError, match="'aligned' is trained step by step"):
        heads.merge(AlignedHeads(D))
    with pytest.raises(UserError, match="alignment of the heads diverged: set the classifier's lr below 1e\\+30"):
        two_tasks(lr=1e30)
    for options, message in (({"age": 1.0}, "below 1"), ({"logit_norm": 0.0}, "positive"), ({"samples": 0}, "1")):
        with pytest.raises(UserError, match=message):
            AlignedHeads(D, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_gpu_aligns_on_the_same_samples() -> None:
    whole, features = two_tasks(), some(1, seed=1)[0]
    heads = AlignedHeads(D).to("cuda")
    for task, width in enumerate(WIDTHS):
        heads.add_task(width, seed=task)
        train(heads, task, scale=(0.1, 5.0)[task])
        heads.update(*(tensor.cuda() for tensor in some(task)))
        heads.finish_task()
    assert_near(heads.scores(features.cuda()).cpu(), whole.scores(features), 25 * 256 * D, size=10.0)
