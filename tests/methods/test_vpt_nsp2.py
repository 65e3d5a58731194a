"""VPT-NSP2 gives the numbers that were recorded from its public code."""

import re

import pytest
import torch
from prompt_recordings import FIRST, LATER, Place, Recording, replay
from small_run import VIT

from mambacl.backbones import create_model
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.methods.vpt_nsp2 import moved
from mambacl.nullspace import null_rank


def adam(decay):
    def make(method, lr):
        trained = [p for named in method.named_parameters().values() for _, p in named]
        return method.wrap(torch.optim.Adam(trained, lr=lr, weight_decay=decay))

    return make


def test_three_tasks_as_recorded():
    recording = Recording("vpt_nsp2")
    c = recording.config
    options = {"variant": "public-code", "length": c["prompt_len"], "temperature": c["temperature"]}
    options |= {"eta_rows": c["eta1"], "eta_attention": c["eta2"]}
    method = METHODS.get("vpt-nsp2")(recording.model(), Setup(options=options, warm_second_head=True))
    values = method.prompts.values
    with torch.no_grad():
        values.copy_(torch.cat([recording[f"init.block{block}.prompt"] for block in range(3)]))
    for name in list(recording.tensors):  # it has local labels and each task's head; `replay` wants all of both
        task = int(name[4]) if name.startswith("task") else 0
        if name.endswith("labels"):
            recording.tensors[name] = recording[name] + 3 * task
        if re.search(r"(?<!init\.)head\.(weight|bias)$", name):
            own = recording[name]
            recording.tensors[name] = torch.cat((own.new_zeros(3 * task, *own.shape[1:]), own))
    heads = {part: recording[f"init.head.{part}"] for part in ("weight", "bias")}
    for part, first in heads.items():
        second, third = recording[f"task0.step3.head.{part}"], recording[f"task2.init.head.{part}"]
        recording.tensors[f"init.head.{part}"] = torch.cat((first, second, third))
    places = {f"block{b}.prompt": Place(lambda: values, lambda v, b=b: v[b : b + 1]) for b in range(3)}
    before, at = {}, {"step": 0}

    def check_update(optimizer, *_):
        """Called after all hooks of the method: what Adam wanted, and what was applied."""
        name = f"task{method.task}.step{at['step']}"
        state, (group, *_) = optimizer.state[values], optimizer.param_groups
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"] / (1 - beta1 ** float(state["step"]))
        size = (state["exp_avg_sq"] / (1 - beta2 ** float(state["step"]))).sqrt()
        wanted = -group["lr"] * mean / (size + group["eps"])
        recording.near(f"{name}.lr", torch.tensor(group["lr"], dtype=torch.float64), FIRST)
        for block in range(3):
            recording.near(f"{name}.adam_update.block{block}.prompt", wanted[block], LATER)
            applied = (values - before["values"])[block]
            recording.near(f"{name}.applied_update.block{block}.prompt", applied, LATER)

    def optimizer(method, lr):
        made = adam(c["weight_decay"])(method, lr)
        made.register_step_pre_hook(lambda *_: before.update(values=values.detach().clone()))
        made.register_step_post_hook(check_update)
        return made

    loss = method.loss

    def counted(images, labels):
        at["step"] += 1
        return loss(images, labels)

    def started(task):
        at["step"] = 0
        if task == 1:  # `replay` has set it to the same
            recording.near("task1.init.head.weight", method.heads.heads[0].weight, LATER)
        images, _ = recording.batch(task, 1)
        features = method.features(images)
        tolerance = FIRST if task == 0 else LATER
        recording.near(f"task{task}.step1.feature", features, tolerance)
        recording.near(f"task{task}.step1.logits", method.heads.task_logits(features), tolerance)
        drift = moved(values, method.before) if task else torch.zeros(())
        recording.near(f"task{task}.step1.loss.drift", drift, tolerance)

    predict = method.predict

    def finish(images):
        """The task's statistics, as `replay` asks for test scores; they do not depend on them."""
        task = method.task
        drawn = torch.cat([recording.batch(task, step)[0] for step in (1, 2)])
        method.finish_task([(part, torch.zeros(len(part))) for part in drawn.split(c["stat_batch"])])
        for condition, name in ((1, "rows"), (2, "attention")) if task < 2 else ():
            for block in range(3):
                at_end = f"task{task}.end.block{block}.condition{condition}."
                found = method.space.spaces[name][block]
                recording.near(at_end + "statistic", method.space.statistics[name][block], LATER)
                recording.near(at_end + "singular_values", found.spectrum, LATER)
                assert found.rank == int(recording[at_end + "null_rank"])
                dense = found.projector(c[f"eta{condition}"], "frobenius").dense()
                recording.near(at_end + "projection", dense, LATER)
        return predict(images)

    method.loss, method.predict = counted, finish

    def steps(epoch, epochs):
        return 0.1 ** sum(milestone <= epoch + 1 for milestone in c["milestones"])

    replay(recording, method, places, schedule=steps, optimizer=optimizer, started=started)
    left = [n for n in recording.tensors if ".step" in n and "prompt" in n and n not in recording.compared]
    assert not left
    spectrum = recording["corner_rule_long.singular_values"]
    assert null_rank(spectrum, "smoothed-corner") == int(recording["corner_rule_long.null_count"])


def tiny():
    torch.manual_seed(0)
    model = create_model("vit", num_classes=0, pretrained=False, **VIT["backbone_options"]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # well above the small values that training starts from
                parameter.normal_(std=0.3)
    return model


def test_statistics_by_hand():
    """The rows, written out, of a block of timm's with prompts behind the image tokens."""
    method, images = METHODS.get("vpt-nsp2")(tiny().double(), Setup()), torch.randn(3, 3, 16, 16).double()
    block, prompts = method.model.blocks[0], method.prompts.values[0].detach()
    method.finish_task([(images[:2], torch.zeros(2)), (images[2:], torch.zeros(1))])
    with torch.no_grad():
        tokens = torch.cat((method.model.embed(images), prompts.expand(3, -1, -1)), 1)
        q, k, _ = block.attn.qkv(block.norm1(tokens)).split(16, dim=2)
    weight, rows, attended = block.attn.qkv.weight.detach()[16:32], [], []
    for image in range(3):
        for head in (slice(0, 8), slice(8, 16)):
            logits = q[image, :17, head] @ k[image, :, head].T / 8**0.5
            attended.append(logits.softmax(1)[:, 17:])
            rows.append(q[image, :17, head] @ weight[head])
    rows, attended = torch.cat(rows), torch.cat(attended)
    torch.testing.assert_close(method.space.statistics["rows"][0], rows.T @ rows)
    torch.testing.assert_close(method.space.statistics["attention"][0], attended.T @ attended)


def test_a_full_projection_keeps_what_attention_does_with_the_prompts():
    """With eta = 1 an update lies in the null space on both sides."""
    options = {"eta_rows": 1.0, "eta_attention": 1.0}
    method = METHODS.get("vpt-nsp2")(tiny().double(), Setup(options=options))
    images = torch.randn(6, 3, 16, 16).double()
    method.start_task(Task(0, 2, 0, seed=0))
    method.finish_task([(images, torch.zeros(6))])
    method.start_task(Task(1, 2, 2, seed=1))
    method.heads.double()
    before = method.prompts.values.detach().clone()
    optimizer = adam(0.0)(method, 0.1)
    method.loss(images, torch.tensor([2, 3] * 3))[0].backward()
    optimizer.step()
    for block in range(6):
        change = (method.prompts.values[block] - before[block]).detach()
        assert change.abs().max() > 1e-4
        for name, kept in (("rows", change), ("attention", change.T)):
            space = method.space.spaces[name][block]
            _, vectors = torch.linalg.eigh(method.space.statistics[name][block])  # ascending
            assert space.protected and (kept @ vectors[:, space.rank :]).abs().max() < 1e-12


def test_a_tiny_stream_is_learned_and_resumes():
    """Two tasks of two patterns; a state taken up in the second task goes on in the same way."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(4, 3, 16, 16, generator=generator)
    method = METHODS.get("vpt-nsp2")(tiny(), Setup(options={"temperature": 2.0}))
    for task in range(2):
        method.start_task(Task(task, 2, 2 * task, seed=task))
        optimizer = adam(0.0)(method, 0.02)
        labels = torch.arange(8) % 2 + 2 * task
        images = patterns[labels] + 0.3 * torch.randn(8, 3, 16, 16, generator=generator)
        for _ in range(20):
            optimizer.zero_grad()
            method.loss(images, labels)[0].backward()
            optimizer.step()
        if task == 0:
            method.finish_task([(images, labels)])
    assert set(method.free()) == {f"{name}.{block}" for name in ("rows", "attention") for block in range(6)}
    labels = torch.arange(40) % 4
    with torch.no_grad():
        scores = method.predict(patterns[labels] + 0.3 * torch.randn(40, 3, 16, 16, generator=generator))
    within = scores.view(40, 2, 2)[torch.arange(40), labels // 2].argmax(1)
    assert (within == labels % 2).float().mean() > 0.9  # chance is 0.5
    other = METHODS.get("vpt-nsp2")(tiny(), Setup(options={"temperature": 2.0}))
    other.load_state_dict(method.state_dict())
    other.load_task_state_dict(method.task_state_dict())
    for one in (method, other):
        optimizer = adam(0.0)(one, 0.02)
        optimizer.zero_grad()
        one.loss(images, torch.arange(8) % 2 + 2)[0].backward()
        optimizer.step()
    assert torch.equal(method.prompts.values, other.prompts.values)
    state, task_state = method.for_answers(method.state_dict(), method.task_state_dict())
    assert not task_state and set(state) == set(method.state_dict())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"length": 69}, r"vpt-nsp2: options\.length: 69 prompt tokens are too many for a model of 17 tokens"),
        ({"eta_rows": 1.5}, "eta_rows must be from 0 to 1"),
        ({"temperature": 0.0}, "temperature must be positive"),
    ],
)
def test_a_mistake_gets_one_sentence(options, words):
    with pytest.raises(UserError, match=words):
        METHODS.get("vpt-nsp2")(tiny(), Setup(options=options))


def test_it_needs_attention():
    with pytest.raises(UserError, match=r"'vpt-nsp2' changes attention.*use a vit backbone"):
        METHODS.get("vpt-nsp2")(create_model("vim_nano", num_classes=0, pretrained=False, depth=2), Setup())
