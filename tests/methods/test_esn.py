"""ESN: class attention, energies, votes; and that it learns."""

import math

import pytest
import torch
from tiny_stream_help import accuracy, images_of, learn, task_labels, tiny_vit
from torch import nn

from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.methods.esn import TEMPERATURES, nominated
from mambacl.tuning.class_attention import ClassAttention


def some(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def new(tasks=2, model=None, **options):
    method = METHODS.get("esn")(model or tiny_vit(double=True), Setup(options={"length": 3, **options}))
    for task in range(tasks):
        method.start_task(Task(task, 2, 2 * task, seed=task))
        method.heads.double()
    return method


def test_class_attention_by_hand():
    block, tokens = ClassAttention(8, 2, 0.5).double(), some(3, 5, 8)
    block.reset(torch.Generator().manual_seed(0), some(8, seed=2))
    assert block.fc1.out_features == 4 and not block.kv.bias.any() and block.q.weight.std() < 0.03
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.5 * some(*parameter.shape, seed=3)
        found = block(tokens)
        for image in range(3):
            rows = block.norm1(torch.cat((block.token[None], tokens[image])))
            q, (k, v) = block.q(rows[:1]), block.kv(rows).split(8, dim=1)
            heads = []
            for part in (slice(0, 4), slice(4, 8)):
                weights = (q[:, part] @ k[:, part].T / math.sqrt(4)).softmax(1)
                heads.append(weights @ v[:, part])
            x = block.token + block.proj(torch.cat(heads, dim=1))[0]
            x = x + block.fc2(nn.functional.gelu(block.fc1(block.norm2(x))))
            torch.testing.assert_close(found[image], x, rtol=1e-9, atol=1e-9)


def test_every_block_reads_the_prompted_tokens_before_the_last_norm():
    method, images = new(), images_of(0, 3)[0].double()
    assert torch.equal(method.blocks[1].token, method.model.cls_token.flatten())
    x = method.model.embed(images)
    prompt = method.prompt.values[0].expand(3, -1, -1)
    x = method.model.blocks(torch.cat((x[:, :1], prompt, x[:, 1:]), dim=1))
    with torch.no_grad():
        expected = [head(block(x)) for head, block in zip(method.heads.heads, method.blocks.tasks, strict=True)]
        torch.testing.assert_close(torch.cat(method.logits(images), dim=1), torch.cat(expected, dim=1))


@pytest.mark.parametrize("variant", ["paper", "public-code"])
def test_the_loss_by_hand(variant):
    method, (images, labels) = new(variant=variant, anchor=-3.0, energy=0.5), images_of(1, 4)
    images = images.double()
    loss, correct = method.loss(images, labels)
    logits = method.logits(images)[1].detach()
    expected = nn.functional.cross_entropy(logits, labels - 2).item()
    sign = 1 if variant == "paper" else -1
    energies = [-math.log(sum(math.exp(sign * f) for f in row)) for row in logits.tolist()]
    expected += 0.5 * sum((energy + 3.0) ** 2 for energy in energies) / 4
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert int(correct) == (logits.argmax(1) == labels - 2).sum()


@pytest.mark.parametrize("variant", ["paper", "public-code"])
def test_whether_the_prompt_keeps_training(variant):
    method = new(tasks=1, variant=variant)
    assert "prompts.prompt.values" in dict(method.named_parameters()["backbone"])
    method.start_task(Task(1, 2, 2, seed=1))
    names = {name for name, _ in method.named_parameters()["backbone"]}
    assert ("prompts.prompt.values" in names) == (variant == "public-code")
    assert not any("tasks.0" in name for name in names) and any("tasks.1" in name for name in names)


def test_votes_by_hand():
    """The task that most of the chosen temperatures name; of equal ones the earliest; its best class wins."""
    method = new(tasks=3)
    logits = [10 * some(40, 2, seed=seed) for seed in range(3)]
    logits[1] -= 4
    logits[1][:, 1] = logits[1][:, 0]  # two equal logits win at high temperatures only
    method.logits = lambda images: logits
    chosen = [0, 5, 11]
    method.voters.chosen.zero_()
    method.voters.chosen[chosen] = 1
    names = nominated(logits)
    assert names.shape == (40, len(TEMPERATURES))
    found = method.predict(torch.zeros(40, 3, 16, 16))
    disputed = 0
    for image in range(40):
        votes = []
        for index in chosen:
            t = TEMPERATURES[index]
            energies = [torch.logsumexp(own[image] / t, 0).item() for own in logits]
            votes.append(energies.index(max(energies)))
            assert names[image, index] == votes[-1]
        disputed += len(set(votes)) > 1
        elected = min(set(votes), key=lambda task: (-votes.count(task), task))
        expected = 2 * elected + int(logits[elected][image].argmax())
        assert int(found[image].argmax()) == expected
    assert disputed


def test_the_temperature_that_joins():
    """The lowest of those that find most of the task's images; the first task adds none."""
    method = new(tasks=1)
    method.finish_task([])
    assert method.voters.chosen.tolist() == [1] + 11 * [0]
    method.start_task(Task(1, 2, 2, seed=1))
    first = torch.tensor([[1.0, -9.0]]).expand(5, 2)  # its largest logit is larger, but it has only one
    second = torch.tensor([[0.8, 0.8]]).expand(5, 2)
    method.logits = lambda images: [first, second]
    method.finish_task([(torch.zeros(5, 3, 16, 16), torch.full((5,), 2))])
    wins = [0.8 + t * math.log(2) > 1.0 for t in TEMPERATURES]
    assert method.voters.chosen.tolist() == [1.0 if i in (0, wins.index(True)) else 0.0 for i in range(12)]
    other = METHODS.get("esn")(tiny_vit(double=True), Setup(options={"length": 3}))
    other.load_state_dict(method.state_dict())
    assert torch.equal(other.voters.chosen, method.voters.chosen) and len(other.blocks) == 2


def test_it_learns():
    method, losses = learn("esn", {"length": 3}, epochs=60)
    for task in range(2):
        assert losses[task][-1][1] < losses[task][0][1] / 2
        assert accuracy(method, task, task_labels(task)) >= 0.9


def test_on_a_mamba_backbone(tiny_model):
    method = METHODS.get("esn")(tiny_model(), Setup(options={"length": 3}))
    method.start_task(Task(0, 2, 0, seed=0))
    loss, _ = method.loss(*images_of(0, 4))
    loss.backward()
    assert method.prompt.values.grad.any() and method.blocks[0].q.weight.grad.any()


def test_mistakes():
    with pytest.raises(
        UserError, match=r"esn: options\.length: 100 prompt tokens are too many for a model of 17 tokens"
    ):
        METHODS.get("esn")(tiny_vit(), Setup())
    with pytest.raises(UserError, match="esn has features of its own for each task: set known_classes to false"):
        METHODS.get("esn")(tiny_vit(), Setup(options={"length": 3}, known_classifier=nn.Linear(16, 2)))
    with pytest.raises(UserError, match=r"'esn' answers with the heads that it trains.*leave classifier at auto"):
        METHODS.get("esn")(tiny_vit(), Setup(options={"length": 3}, classifier="lda"))
