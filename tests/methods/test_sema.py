"""SEMA gives the numbers that were recorded from its public code, and trains what the images of a task decide."""

import json

import pytest
import torch
from adapter_methods_help import FAMILIES, new_method, small, task_data
from adapter_recordings import AdapterRecording
from prompt_recordings import FIRST, LATER
from safetensors.torch import load_file
from small_run import CONFIG
from training_help import assert_same_run, interrupted_after

import mambacl
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.training.optimizers import make_optimizer
from mambacl.training.recipe import Recipe
from mambacl.tuning.routed_adapters import STAYS, TRAINED, TRAINS

PARTS = {"down": "adapter.down", "up": "adapter.up", "encoder": "descriptor.encoder", "decoder": "descriptor.decoder"}


def place_branch(method, place, number):
    """The parameters of a branch by their recorded names."""
    named = dict(method.adapters.at(place).branches[number].named_parameters())
    theirs = [f"{part}.{kind}" for part in PARTS for kind in ("weight", "bias")]
    found = {name: named.get(f"{PARTS[name.split('.')[0]]}.{name.split('.')[1]}") for name in theirs}
    found |= {f"router_row.{kind}": named.get(f"row.{kind}") for kind in ("weight", "bias")}
    return {name: parameter for name, parameter in found.items() if parameter is not None}


class Replay:
    def __init__(self, recording):
        c = self.c = recording.config
        self.recording, self.adapting, self.length = (
            recording,
            c["func_epochs"],
            c["func_epochs"] + c["descriptor_epochs"],
        )
        self.epochs = self.length * len(c["expandable"])
        options = {"variant": "public-code", "bottleneck": c["bottleneck"], "grow": len(c["expandable"])}
        options |= {"hidden": c["descriptor_dim"], "record": c["buffer"], "threshold": c["threshold"]}
        options |= {"scan_batch": c["detect_batch"], "descriptors": c["descriptor_epochs"] / self.length}
        options["descriptor_rate"] = c["descriptor_lr"] / c["lr"]
        setup = Setup(options=options, epochs=self.epochs)
        self.method = METHODS.get("sema")(recording.model(), setup)
        self.recipe = Recipe(optimizer="sgd", weight_decay=c["weight_decay"], schedule="epoch-cosine", passes=1)
        self.head = {part: recording[f"initial.head.{part}"].clone() for part in ("weight", "bias")}

    def start(self, task):
        """The head for all classes is there from the beginning; rows of classes to come only decay."""
        method, classes = self.method, self.recording.classes
        method.start_task(Task(task, classes, task * classes, seed=task))
        method.heads.double()
        with torch.no_grad():
            for part, rows in self.head.items():
                getattr(method.heads.heads[-1], part).copy_(rows[task * classes : (task + 1) * classes])
            for place in range(self.c["depth"] if task == 0 else 0):
                self.set_branch(place, 0, self.recording.under(f"initial.block{place}.adapter0."))
                row = self.recording.under(f"initial.block{place}.router.")
                self.set_branch(place, 0, {f"router_row.{kind}": tensor for kind, tensor in row.items()})
        self.log, self.losses, self.rates, self.task = [], [], [], task
        method.adapters.novelties = self.novelties

    def set_branch(self, place, number, tensors):
        parameters = place_branch(self.method, place, number)
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)

    def novelties(self, place):
        found = type(self.method.adapters).novelties(self.method.adapters, place)
        self.log += [[place, number, value] for number, value in enumerate(found.tolist())]
        if self.method.adapters.status[place] == STAYS and found.min() > self.c["threshold"]:
            self.log.append([place, -1, 0.0])
        return found

    def run(self):
        """As the loop does it."""
        method, before = self.method, None
        for epoch in range(self.epochs):
            grown = method.adapters.grown
            method.start_epoch(epoch, lambda: self.recording.batches(self.task))
            if self.task and method.adapters.grown > grown:
                (place,) = method.adapters.newest()
                number = len(method.adapters.at(place).branches) - 1
                with torch.no_grad():
                    at = f"task{self.task}.added.block{place}.adapter{number}.initial."
                    self.set_branch(place, number, self.recording.under(at))
            phase = method.phase(epoch, self.epochs)
            if phase != before:
                method.enter(phase)
                roles = method.named_parameters()
                rates = {"descriptors": self.c["descriptor_lr"]}
                groups = [{"params": [p for _, p in named], "lr": rates.get(role, self.c["lr"])}
                          for role, named in roles.items() if named]  # fmt: skip
                optimizer, before = make_optimizer(self.recipe, groups), phase
                base = [group["lr"] for group in groups]
            if phase.roles == ():
                continue
            schedule = Recipe(schedule="epoch-cosine", passes=phase.epochs)
            for step in range(self.c["batches"]):
                for group, lr in zip(optimizer.param_groups, base, strict=True):
                    group["lr"] = lr * schedule.lr_factor(epoch - phase.first)
                loss, _ = method.loss(*self.recording.batch(self.task, step))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.rates.append(optimizer.param_groups[0]["lr"])
                if phase.name != "descriptors":
                    self.losses.append(loss.detach())

    def near(self, name, found, tolerance=LATER):
        self.recording.near(f"task{self.task}.{name}", found, tolerance)

    def compare(self):
        method, recording, task = self.method, self.recording, self.task
        first = recording["task0.functional_losses"][0]
        assert task or (self.losses[0] - first).abs() <= FIRST * first
        self.near("functional_losses", torch.stack(self.losses))
        self.near("learning_rates_of_all_steps", torch.tensor(self.rates, dtype=torch.float64), FIRST)
        if task:
            self.near("detection_log", torch.tensor(self.log, dtype=torch.float64))
        counts = [len(method.adapters.at(place).branches) for place in range(self.c["depth"])]
        self.near("adapters_per_block", torch.tensor(counts), 0)
        for place in range(self.c["depth"]):
            for name, parameter in place_branch(method, place, -1).items():
                at = f"task{task if place else 0}.final.block{place}.newest_adapter.{name}"  # block 0 stays
                if not name.startswith("router_row"):
                    recording.near(at, parameter, LATER)
            for number, branch in enumerate(
                method.adapters.at(place).branches if place in method.adapters.growing else ()
            ):
                at, record = f"final.block{place}.adapter{number}.", branch.descriptor.record
                self.near(f"{at}error_record", record)
                self.near(f"{at}error_mean", record.mean())
                self.near(f"{at}error_std", record.std())
            if place in method.adapters.growing:
                rows = [branch.row for branch in method.adapters.at(place).branches]
                for kind in ("weight", "bias"):
                    router = torch.cat([getattr(row, kind) for row in rows])
                    self.near(f"final.block{place}.router.{kind}", router)
        for part in self.head:
            self.head[part] = recording[f"task{task}.final.head.{part}"].clone()
            ours = torch.cat([getattr(head, part) for head in method.heads.heads])
            self.near(f"final.head.{part}", torch.cat((ours, self.head[part][len(ours) :])))
        with torch.no_grad():
            self.near("test.features", method.features(recording["test.images"]))
            logits = method.predict(recording["test.images"])
            rest = recording[f"task{task}.test.logits"][:, logits.shape[1] :]
            self.near("test.logits", torch.cat((logits, rest), dim=1))


def test_three_tasks_as_recorded():
    """github.com/huiyiwang01/SEMA-CL at 5a45512: the second task adds an adapter, the third trains only the head."""
    recording = AdapterRecording("sema")
    replay = Replay(recording)
    for task in range(3):
        replay.start(task)
        replay.run()
        replay.compare()
    assert [len(replay.method.adapters.at(place).branches) for place in range(3)] == [1, 2, 1]
    recording.assert_all_compared()


# In a run


def events(folder, *keys):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [tuple(event[key] for key in keys) for event in found if event["event"] == "epoch"]


@pytest.mark.usefixtures("few_test_images")
@pytest.mark.parametrize("threshold", [1e-6, pytest.param(1e6, marks=pytest.mark.slow)])
def test_a_run_takes_the_rounds_that_images_ask_for_and_resumes_in_each(threshold, tmp_path):
    """With a tiny threshold, both blocks grow in each later task; with a huge one, none does."""
    options = {"threshold": threshold, "bottleneck": 4, "hidden": 4, "descriptors": 0.5}
    config = {**CONFIG, "method": "sema", "options": options, "stream": {**CONFIG["stream"], "tasks": [5, 5]}}
    config["training"] = {**CONFIG["training"], "passes": 4, "optimizer": "sgd", "schedule": "cosine"}
    whole = tmp_path / "whole"
    run = mambacl.train(config, out=str(whole))
    later = [0, 1, 2, 3] if threshold < 1 else [0]
    assert events(whole, "task", "epoch") == [(0, 0), (0, 1), *((1, epoch) for epoch in later)]
    assert set(events(whole, "lr")) == {(config["training"]["lr"],)}  # each part of a round begins its own schedule
    state = load_file(whole / "checkpoints" / "task-end.safetensors")
    branches = {name.split(".")[5] for name in state if ".branches." in name}
    assert branches == ({"0", "1"} if threshold < 1 else {"0"})
    assert mambacl.evaluate(run.folder).counted == mambacl.evaluate(run.folder).recorded
    for checkpoints in (1, 6, 7, 8):  # within a round, between rounds, after the last one
        broken = tmp_path / f"broken{checkpoints}"
        with interrupted_after(checkpoints):
            mambacl.train(config, out=str(broken))
        mambacl.resume(broken)
        assert_same_run(whole, broken)


def phases(method, epochs):
    return [method.phase(epoch, epochs).name for epoch in range(epochs)]


def test_phases():
    method = METHODS.get("sema")(small("defocus_mamba_nano"), Setup(options={"descriptors": 0.8}, epochs=10))
    assert method.adapters.growing == [0, 1]
    method.start_task(Task(0, 2, 0, seed=0))
    assert phases(method, 10) == ["adapters", *["descriptors"] * 4, *["done"] * 5]
    method.start_task(Task(1, 2, 2, seed=1))
    assert phases(method, 10) == ["head", *["done"] * 9]
    method.adapters.grow(1, seed=0)
    assert phases(method, 10) == ["adapters", *["descriptors"] * 4, *["done"] * 5]
    method.adapters.settle()
    method.adapters.grow(0, seed=0)
    assert phases(method, 10) == ["adapters", *["descriptors"] * 4] * 2
    assert method.adapters.status.tolist() == [TRAINS, TRAINED]
    assert {name.split(".")[2] for name, _ in method.adapters.trained()} == {"0"}
    assert phases(method, 3) == ["adapters", "descriptors", "descriptors"] and phases(method, 1) == ["adapters"]
    second = method.phase(6, 10)
    assert (second.first, second.epochs, second.roles) == (6, 4, ("descriptors",))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_learns_beside_mlps_or_mixers(family):
    method = new_method("sema", family, bottleneck=8, threshold=0.5, record=20)
    weights = {key: tensor.clone() for key, tensor in method.model.state_dict().items()}
    images, labels = task_data(0, 2, seed=0)
    method.start_task(Task(0, 2, 0, seed=0))
    roles = method.named_parameters()
    optimizer = torch.optim.Adam([p for named in roles.values() for _, p in named], lr=5e-3)
    losses = []
    for _ in range(15):
        loss, _ = method.loss(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(method.model.state_dict()[key], tensor) for key, tensor in weights.items())
    counts = [int(branch.branches[0].descriptor.count) for branch in map(method.adapters.at, method.adapters.growing)]
    assert counts == [20] * min(3, len(method.adapters.widths))


def test_old_branches_stay_and_old_heads_only_with_the_paper():
    for variant, stay in (("paper", True), ("public-code", False)):
        method = new_method("sema", variant=variant)
        for task in range(2):
            method.start_task(Task(task, 2, 2 * task, seed=task))
        method.adapters.grow(1, seed=7)
        method.enter(method.phase(0, 4))
        old = {name: p.clone() for name, p in method.adapters.at(1).branches[0].named_parameters()}
        head = method.heads.heads[0].weight.clone()
        roles = method.named_parameters()
        optimizer = torch.optim.SGD([p for named in roles.values() for _, p in named], lr=0.1, weight_decay=0.1)
        method.loss(*task_data(1, 2, seed=1))[0].backward()
        optimizer.step()
        assert all(torch.equal(p, old[name]) for name, p in method.adapters.at(1).branches[0].named_parameters())
        assert torch.equal(method.heads.heads[0].weight, head) == stay
        if not stay:
            torch.testing.assert_close(method.heads.heads[0].weight, 0.99 * head)


def test_drift_is_refused():
    with pytest.raises(UserError, match="sema adds adapters within a task"):
        setup = Setup(classifier="lda", classifier_options={"drift": "linear"})
        METHODS.get("sema")(small("vit_nano"), setup)
    METHODS.get("sema")(small("vit_nano"), Setup(classifier="lda"))
