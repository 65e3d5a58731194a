"""Models that people bring: shared weights, blocks of other shapes, moved to another precision, several processes."""

import copy

import pytest
import torch
import torch.multiprocessing as multiprocessing
from block_models import PlainMamba
from nullspace_help import images, snapshot
from torch import nn

from mambacl.errors import UserError
from mambacl.nullspace import BLOCK_READERS, Block, NullSpace, Part


class Tied(nn.Module):
    """A language model in small: the classifier is the embedding's own weight, whichever comes first."""

    def __init__(self, head_first):
        super().__init__()
        for name in ("head", "emb") if head_first else ("emb", "head"):
            setattr(self, name, nn.Embedding(12, 8) if name == "emb" else nn.Linear(8, 12, bias=False))
        self.middle = nn.Linear(8, 8)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.middle(self.emb(tokens))))


def train(model, space, inputs, steps=20):
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=1e-2))
    for _ in range(steps):
        optimizer.zero_grad()
        (model(inputs) - 1).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("head_first", [False, True])
def test_weights_with_several_users_are_fixed_after_the_first_task(head_first):
    torch.manual_seed(0)
    model = Tied(head_first).double()
    space = NullSpace(model, "exact", layers="all")
    old = torch.tensor([[0, 1, 2]])
    space.consolidate([old])
    before, start = model(old).detach(), snapshot(model)
    train(model, space, torch.tensor([[3, 4, 5, 6, 7]]))
    torch.testing.assert_close(model(old), before)
    assert torch.equal(model.emb.weight, start[next(iter(n for n in start if "emb" in n or "head" in n))])
    assert not torch.equal(model.middle.weight, start["middle.weight"])


def test_two_layers_of_one_weight_are_fixed_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    model[4].weight = model[0].weight
    space = NullSpace(model, "exact", layers="all")
    old = torch.randn(3, 8).double()
    space.consolidate([old])
    before = model(old).detach()
    train(model, space, torch.randn(6, 8).double())
    torch.testing.assert_close(model(old), before)


def test_ssms_that_share_a_parameter_are_refused():
    model = nn.Sequential(PlainMamba(), PlainMamba())
    model[1].x_proj.weight = model[0].x_proj.weight
    with pytest.raises(UserError, match=r"0\.x_proj\.weight of a selective SSM is shared with 1\.x_proj\.weight"):
        NullSpace(model)


class Bare(nn.Module):
    """A selective SSM without a convolution and without in_proj: the four names are enough."""

    def __init__(self):
        super().__init__()
        inner = PlainMamba()
        self.x_proj, self.dt_proj, self.out_proj = inner.x_proj, inner.dt_proj, inner.out_proj
        self.A_log = inner.A_log

    def forward(self, x):
        dt, B, C = self.x_proj(x).split([2, 8, 8], dim=-1)
        delta = nn.functional.softplus(self.dt_proj(dt))
        h, ys = 0, []
        for t in range(x.shape[1]):
            step = delta[:, t, :, None]
            h = torch.exp(-step * self.A_log.exp()) * h + step * x[:, t, :, None] * B[:, t, None]
            ys.append((h * C[:, t, None]).sum(-1))
        return self.out_proj(torch.stack(ys, 1))


@pytest.mark.parametrize("layers", ["ssm", "all"])
def test_a_block_with_the_four_names_needs_no_adapter(layers):
    torch.manual_seed(0)
    model = nn.Sequential(Bare(), nn.Linear(16, 4)).double()
    space = NullSpace(model, "exact", layers=layers)
    old = torch.randn(1, 5, 32).double()
    space.consolidate([old])
    before = model(old).detach()
    train(model, space, torch.randn(2, 5, 32).double())
    torch.testing.assert_close(model(old), before, rtol=1e-6, atol=1e-8)


@pytest.fixture
def foreign():
    """A block reader of another package for blocks that a built-in one knows, too, and for one around them."""

    def outer(module, name):
        if type(module).__name__ != "Outer":
            return None

        def hooks(record):
            return [module.inner.out_proj.register_forward_pre_hook(lambda _, args: record({"out": args[0]}))]

        return Block(name, module, (Part("out", f"{name}.inner.out_proj.weight"),), hooks)

    BLOCK_READERS.add("outer", outer)
    yield
    del BLOCK_READERS._entries["outer"]


def test_other_packages_are_asked_first_and_what_they_claim_is_theirs(foreign):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = PlainMamba()

        def forward(self, x):
            return self.inner(x)

    space = NullSpace(nn.Sequential(Outer(), PlainMamba()))
    assert [block.name for block in space.selection.blocks] == ["0", "1"]
    assert [p.name for p in space.selection.protections].count("0.inner.out_proj.weight") == 1


def test_a_model_taken_to_double_precision_keeps_it(tiny_model):
    model = tiny_model()
    space = NullSpace(model, eta=1.0, rank="fraction:0.5")
    space.consolidate([images()])
    model.double()
    with torch.no_grad():
        model.blocks[0].mixer.out_proj.weight.add_(1e-12)
    start = snapshot(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    space.wrap(torch.optim.SGD(space.parameters(), lr=0.1)).step()
    assert all(torch.equal(parameter, start[name]) for name, parameter in model.named_parameters())


def test_parameters_that_nothing_protects_are_named(tiny_model, caplog):
    caplog.set_level("WARNING", logger="mambacl")
    model = tiny_model(num_classes=3)
    space = NullSpace(model, leave=["head"])
    space.wrap(torch.optim.Adam(space.parameters()))
    space.wrap(torch.optim.Adam([*space.parameters(), *model.head.parameters()]))
    assert "unprotected" not in caplog.text
    space.wrap(torch.optim.Adam(model.parameters()))
    assert "unprotected parameters of the model (cls_token, " in caplog.text


def test_batches_of_mappings_with_labels_and_empty_ones(tiny_model):
    model = tiny_model()
    spaces = [NullSpace(model) for _ in range(2)]
    spaces[0].consolidate([images(3)])
    loader = [({"images": images(3)}, torch.zeros(3)), images(0), (images(0), torch.zeros(0))]
    assert spaces[1].consolidate(loader).images == 3
    for name, covariance in spaces[0].covariances().items():
        assert torch.equal(covariance, spaces[1].covariances()[name])


def test_a_model_without_ssms_has_nothing_to_record():
    with pytest.raises(UserError, match="the audit needs selective SSMs"):
        NullSpace(nn.Sequential(nn.Linear(3, 3)), layers="all").record(torch.zeros(1, 3))


def _worker(rank, model, batches, port, results):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=rank)
    for number, setting in enumerate(({"setting": "paper"}, {"setting": "exact", "relax": 0.05})):
        space = NullSpace(model, rank="energy:0.9", **setting)
        space.consolidate(batches[rank::2])
        for name, tensor in space.state_dict().items():
            results[rank, number, name] = tensor.clone()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_as_one(tiny_model):
    """Each sees its own half of the images; both end with what one process would have that saw all of them."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model, batches = tiny_model(), images(8).split(2)
    manager = multiprocessing.get_context("spawn").Manager()
    results = manager.dict()
    multiprocessing.spawn(_worker, (copy.deepcopy(model), batches, port, results), nprocs=2)
    for number, setting in enumerate(({"setting": "paper"}, {"setting": "exact", "relax": 0.05})):
        alone = NullSpace(model, rank="energy:0.9", **setting)
        alone.consolidate(batches)
        for name, tensor in alone.state_dict().items():
            assert torch.equal(results[0, number, name], results[1, number, name]), name
            if "basis" not in name:
                torch.testing.assert_close(results[0, number, name], tensor, rtol=1e-9, atol=1e-9)
