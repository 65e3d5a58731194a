"""Recorded inference: when a call is replayed, when it runs as it is, and that both give the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mambacl
from mambacl.ops.precision import float32_products
from mambacl.training.recorded import Recorded, recorded

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


class Again:
    """What a CUDA graph does, on any device: the same work on the same memory."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, work: Callable[[], object], images: Tensor) -> "Again.Graph":
        self.recorded += 1
        return Again.Graph(self, work)

    class Graph:
        def __init__(self, owner: "Again", work: Callable[[], object]) -> None:
            self.owner, self.work = owner, work
            found = work.__closure__  # type: ignore[attr-defined]
            self.outputs = next(cell.cell_contents for cell in found if isinstance(cell.cell_contents, list))
            work()

        def replay(self) -> None:
            self.owner.replayed += 1
            first = self.outputs[0]
            self.work()
            first.copy_(self.outputs.pop())


def toy() -> tuple[nn.Module, Again, Recorded]:
    torch.manual_seed(0)
    model, again = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Tanh()).eval(), Again()
    return model, again, Recorded(model, model.parameters, lambda: not model.training, again, most=2)


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 2, 2, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_the_second_call_of_a_shape_is_recorded_and_the_next_replayed() -> None:
    model, again, fast = toy()
    kept = []
    for number in range(5):
        given = images(2, number)
        kept.append((fast(given), model(given)))
        assert again.recorded == (number > 0) and again.replayed == number
    assert all(torch.equal(one, other) for one, other in kept)  # a result stays as it is when the next one is there


@torch.no_grad()
def test_weights_changed_in_place_are_seen_and_others_are_recorded_again() -> None:
    model, again, fast = toy()
    for _ in range(3):
        fast(images(2))
    model[1].weight.mul_(2)
    assert torch.equal(fast(images(2)), model(images(2))) and again.recorded == 1
    model[1].weight = nn.Parameter(torch.ones(4, 12))
    for _ in range(3):
        assert torch.equal(fast(images(2)), model(images(2)))
    assert again.recorded == 2


@torch.no_grad()
def test_shapes_beyond_the_limit_run_as_they_are() -> None:
    model, again, fast = toy()
    for _ in range(3):
        for count in (1, 2, 3, 4):
            assert torch.equal(fast(images(count)), model(images(count)))
    assert again.recorded == fast.recordings() == 2


def test_with_gradients_and_in_training_a_call_runs_as_it_is() -> None:
    model, again, fast = toy()
    for _ in range(3):
        assert fast(images(2)).requires_grad
    with torch.no_grad():
        model.train()
        for _ in range(3):
            fast(images(2))
        assert again.recorded == 0
        model.eval()
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):  # one recording serves both
        with mode():
            for _ in range(2):
                assert torch.equal(fast(images(2)), model(images(2)))
    assert again.recorded == 1


@torch.no_grad()
def test_another_arithmetic_is_recorded_for_itself() -> None:
    _, again, fast = toy()
    fast.most = 9
    for _ in range(3):
        assert fast(images(2)).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert fast(images(2)).dtype == torch.bfloat16
    with float32_products(tf32=True):
        fast(images(2))
        fast(images(2))
    assert again.recorded == 3


@torch.no_grad()
def test_what_cannot_be_recorded_runs_as_it_is_and_is_tried_once() -> None:
    model, _, _ = toy()
    tries = []

    def refuse(work: Callable[[], object], images: Tensor) -> Again.Graph:
        tries.append(images.shape)
        raise RuntimeError("operation not permitted")

    fast = Recorded(model, model.parameters, record=refuse)
    for _ in range(4):
        assert torch.equal(fast(images(2)), model(images(2)))
    assert len(tries) == 1 and fast.recordings() == 0


@torch.no_grad()
def test_on_the_cpu_the_model_runs_as_it_is() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)).eval()
    fast = mambacl.recorded(model)
    for _ in range(3):
        assert torch.equal(fast(images(2)), model(images(2)))
    assert fast.recordings() == 0


class TestOnAGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("batch", [1, 8])
    @pytest.mark.parametrize("bf16", [False, True])
    @torch.inference_mode()
    def test_a_replay_is_the_same_to_the_last_bit(self, batch: int, bf16: bool, tiny_model) -> None:
        with torch.inference_mode(False):
            model = tiny_model().cuda().eval()
        fast = recorded(model)
        for number in range(4):
            given = torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(number)).cuda()
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                assert torch.equal(fast(given), model(given))
        assert fast.recordings() == 1

    @torch.no_grad()
    def test_weights_changed_in_place_are_seen(self, tiny_model) -> None:
        model = tiny_model().cuda().eval()
        fast, given = recorded(model), torch.randn(2, 3, 16, 16).cuda()
        for factor in (1.0, 1.5, 0.5, 2.0):
            for parameter in model.parameters():
                parameter.mul_(factor)
            with torch.autocast("cuda", torch.bfloat16):
                assert torch.equal(fast(given), model(given))
        assert fast.recordings() == 1

    @torch.no_grad()
    def test_recordings_of_several_shapes_keep_apart(self, tiny_model) -> None:
        model = tiny_model().cuda().eval()
        fast = recorded(model)
        batches = [torch.randn(count, 3, 16, 16).cuda() for count in (1, 4, 2)]
        for _ in range(3):
            found = [fast(given) for given in batches]
            assert all(torch.equal(one, model(given)) for one, given in zip(found, batches, strict=True))
        assert fast.recordings() == 3
