"""Gradient checkpointing of any model: the same gradients, fewer bytes, names and hooks as before."""

import copy

import pytest
import torch
from block_models import build
from docs_help import code
from torch import nn

from mambacl.errors import UserError
from mambacl.tuning import recompute
from mambacl.tuning.recomputing import blocks_of


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.drop(self.down(torch.relu(self.up(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Layer(8) for _ in range(2)) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for layer in stage:  # type: ignore[attr-defined]
                x = layer(x, scale=0.5)
        return self.head(x)


def stack(seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    return Stack()


def gradients(model: nn.Module, inputs: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Gradients, and the bytes that the forward pass keeps for the backward pass."""
    model.zero_grad()
    kept = []
    torch.manual_seed(1)  # of the dropout
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = model(inputs).square().sum()
    own = {p.data_ptr() for p in model.parameters()}
    loss.backward()
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return [p.grad.clone() for p in model.parameters()], sum(n for at, n in sizes.items() if at not in own)


def test_blocks_are_the_innermost_members_of_lists() -> None:
    assert all(isinstance(block, Layer) for block in blocks_of(stack())) and len(blocks_of(stack())) == 6
    assert len(blocks_of(nn.Sequential(Layer(8), Layer(8)))) == 2
    assert blocks_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) == []


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_the_same_and_less_is_kept(training: bool) -> None:
    """Of a block of width 8 without checkpointing: its input, the 32 hidden values and the mask."""
    model, inputs = stack().train(training), torch.randn(16, 8)
    names = [*model.state_dict()]
    expected, before = gradients(model, inputs)
    recompute(model)
    recompute(model)  # again: no effect
    found, after = gradients(model, inputs)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert names == [*model.state_dict()] and after < 0.4 * before
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.stages[0][0].up.weight.zero_()  # type: ignore[index, union-attr]
    assert all(torch.equal(one, other) for one, other in zip(gradients(twin, inputs)[0], expected, strict=True))
    recompute(twin, False)
    assert gradients(twin, inputs)[1] == before


def test_hooks_of_a_block_run_once() -> None:
    model, runs = stack().eval(), []
    recompute(model)
    model.stages[0][0].register_forward_hook(lambda *_: runs.append(1))  # type: ignore[index, union-attr]
    gradients(model, torch.randn(2, 8))
    assert runs == [1]


def test_a_language_model_of_another_library() -> None:
    pytest.importorskip("transformers")
    model, inputs, _ = build("MambaForCausalLM")
    expected = [p.grad.clone() for p in _backward(model, inputs(0, 2))]
    recompute(model)
    assert all(torch.equal(p.grad, one) for p, one in zip(_backward(model, inputs(0, 2)), expected, strict=True))


def _backward(model: nn.Module, inputs: torch.Tensor) -> list[nn.Parameter]:
    model.zero_grad()
    model(inputs).logits.square().sum().backward()
    return [p for p in model.parameters() if p.grad is not None]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="no repeated blocks"):
        recompute(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_the_code_of_the_page_runs() -> None:
    model = stack()
    before = gradients(model, torch.ones(4, 8))
    for block in code("scale.md"):
        exec(block, {"model": model})
    after = gradients(model, torch.ones(4, 8))
    assert after[1] < before[1] and all(torch.equal(one, other) for one, other in zip(before[0], after[0], strict=True))
