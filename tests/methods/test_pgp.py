"""PGP on L2P and DualPrompt: what an SGD step changes is orthogonal to what earlier tasks' images gave."""

import pytest
import torch
from small_run import VIT

from mambacl.backbones import create_model
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.training.optimizers import make_optimizer
from mambacl.training.recipe import Recipe
from mambacl.tuning.query import frozen_query

NAMES = ["l2p-pgp", "dualprompt-pgp"]


def tiny(name, **options):
    torch.manual_seed(0)
    model = create_model("vit", num_classes=0, pretrained=False, **VIT["backbone_options"]).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    sizes = {"length": 2, "top_k": 2} if name.startswith("l2p") else {"task_length": 2, "shared_length": 2}
    method = METHODS.get(name)(model, Setup(options={**sizes, **options}))
    method.start_task(Task(0, 2, 0, seed=0))
    method.heads.double()
    return method


def taught(method, images, labels):
    """One step of a task, by the optimizer of the training loop; its first step is that of plain SGD."""
    parameters = [p for named in method.named_parameters().values() for _, p in named]
    recipe = Recipe(optimizer="sgd", weight_decay=0.0)
    optimizer = method.wrap(make_optimizer(recipe, [{"params": parameters, "lr": 0.1}]))
    loss, _ = method.loss(images, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_dualprompt_keeps_the_scores_of_old_queries():
    """From the formula: W_q x of an old image, times the change of a prompt for keys, over all heads."""
    images = torch.randn(1, 3, 16, 16, dtype=torch.float64)  # few rows, so that some directions are free
    method = tiny("dualprompt-pgp", share=0.9)
    taught(method, images, torch.tensor([0]))
    method.finish_task([(images, torch.tensor([0]))])
    seen = {}
    handle = method.model.blocks[1].attn.qkv.register_forward_hook(lambda m, i, o: seen.update(q=o[0, :, :16]))
    method.prompted(images, 0)
    handle.remove()
    basis = method.bases.bases["block1"]
    assert 0 < basis.shape[1] < 16
    share = (seen["q"] @ basis).square().sum() / seen["q"].square().sum()
    fewer = torch.linalg.svdvals(seen["q"].detach()).square()[: basis.shape[1] - 1].sum() / seen["q"].square().sum()
    assert fewer < 0.9 <= share
    method.start_task(Task(1, 2, 2, seed=1))
    method.heads.double()
    before = {name: p.detach().clone() for name, p in method.tuning.trained()}
    taught(method, torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.tensor([2, 3, 2, 3]))
    change = method.shared.values.detach() - before["prompts.shared.values"]  # (blocks, 2, n, heads, d)
    for place, block in ((0, 0), (1, 1)):
        keys, values = change[place].flatten(-2)
        own = method.bases.bases[f"block{block}"]
        assert float((keys @ own).abs().max()) < 1e-12 * float(values.abs().max()) + 1e-14
        assert float((values @ own).abs().max()) > 1e-6 * float(values.abs().max())
    pool = method.pools[0].values.detach() - before["prompts.pools.0.values"]
    keys = pool[1, 0, 0].flatten(-2)  # the second task's prompts in block 2
    assert float(keys.abs().max()) > 0
    assert float((keys @ method.bases.bases["block2"]).abs().max()) < 1e-9 * float(keys.abs().max())


def test_l2p_keeps_old_tokens_and_queries():
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    method = tiny("l2p-pgp", prompt_share=0.8, key_share=0.97, pool=3)
    taught(method, images, torch.tensor([0, 1]))
    query = frozen_query(method.model, images)
    prompts, _, _ = method.prompts_for(query)
    rows = torch.cat((method.model.embed(images), prompts), 1).flatten(0, 1).detach()
    method.finish_task([(images, torch.tensor([0, 1]))])
    basis = method.bases.bases["prompts"]
    share = (rows @ basis).square().sum() / rows.square().sum()
    assert share >= 0.8 and torch.linalg.svdvals(rows)[: basis.shape[1] - 1].square().sum() < 0.8 * rows.square().sum()
    assert method.bases.bases["keys"].shape[1] <= 2
    method.start_task(Task(1, 2, 2, seed=1))
    method.heads.double()
    before = method.pool.values.detach().clone(), method.pool.keys.detach().clone()
    taught(method, torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.tensor([2, 3, 2, 3]))
    for old, new, name in zip(before, (method.pool.values, method.pool.keys), ("prompts", "keys"), strict=True):
        change = new.detach() - old
        assert float(change.abs().max()) > 0
        assert float((change @ method.bases.bases[name]).abs().max()) < 1e-9 * float(change.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_the_first_task_trains_as_without_pgp(name):
    images, labels = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    plain, projected = tiny(name.removesuffix("-pgp")), tiny(name)
    for method in (plain, projected):
        taught(method, images, labels)
    assert all(torch.equal(t, projected.state_dict()[key]) for key, t in plain.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_two_tasks(name):
    """With Adam, two kinds of images per task: the loss of each task falls, and all images are right."""
    method = tiny(name)
    for task in range(2):
        if task:
            method.start_task(Task(1, 2, 2, seed=1))
            method.heads.double()
        generator = torch.Generator().manual_seed(task)
        kinds = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
        labels = torch.arange(6) % 2 + 2 * task
        noise = torch.randn(6, 3, 16, 16, generator=generator, dtype=torch.float64)
        images = kinds[labels - 2 * task] + 0.3 * noise
        parameters = [p for named in method.named_parameters().values() for _, p in named]
        optimizer, losses = method.wrap(torch.optim.Adam(parameters, lr=0.02)), []
        for _ in range(40):
            loss, right = method.loss(images, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0] - 0.3 and int(right) == 6
        method.finish_task([(images, labels)])


@pytest.mark.parametrize("name", NAMES)
def test_the_bases_are_in_the_task_state_and_not_in_a_model(name):
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    method, other = tiny(name), tiny(name)
    assert not method.task_state_dict()
    method.finish_task([(images, torch.tensor([0, 1]))])
    state = method.task_state_dict()
    other.load_task_state_dict(state)
    assert other.bases.bases.keys() == method.bases.bases.keys() != set()
    assert all(torch.equal(t, other.bases.bases[n]) for n, t in method.bases.bases.items())
    assert method.for_answers(method.state_dict(), state)[1] == {}


def test_mistakes():
    with pytest.raises(UserError, match="l2p-pgp is not defined for prefix prompts: choose another"):
        tiny("l2p-pgp", variant="coda")
    with pytest.raises(UserError, match="share must be at least 0 and at most 1, got 2"):
        tiny("dualprompt-pgp", share=2)
    with pytest.raises(UserError, match=r"dualprompt-pgp: a pool of 1 is too small"):
        METHODS.get("dualprompt-pgp")(tiny("dualprompt").model, Setup(options={"pool": 1}, tasks=2))
