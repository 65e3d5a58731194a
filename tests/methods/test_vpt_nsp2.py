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
