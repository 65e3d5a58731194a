"""CL-LoRA gives the numbers that were recorded from its public code, with its one mistake corrected: there, the second
step of a batch takes gradients through parameters that the first has changed."""

import pytest
import torch
from adapter_methods_help import accuracy, learn, new_method, small, task_data
from adapter_recordings import AdapterRecording
from prompt_recordings import FIRST, LATER

from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.training.optimizers import make_optimizer
from mambacl.training.recipe import Recipe

AGAIN = "ce_recomputed."


def recorded_parameters(method):
    """Of the current task, by their recorded names; A of the shared changes is fixed."""
    lora, found = method.lora, {}
    for kind, changes, task in (("shared", lora.shared, 1), ("specific", lora.own, -1)):
        for place, change in zip(changes.places, changes.tasks.tasks[task], strict=True):
            _, block, _, _, part = place.name.split(".")
            name = f"block{block}.{kind}.{ {'q': 'query', 'v': 'value'}[part] }"
            found |= {f"{name}_down": change.A, f"{name}_up": change.B}
    head = method.heads.heads[-1]
    return {
        **found,
        "block_scales": lora.weights.tasks[-1].values,
        "head_weight": head.weight,
        "head_scale": head.scale,
    }


class Replay:
    """Of one task: compares what the method does in `loss` with the recording."""

    def __init__(self, recording, method, task):
        self.recording, self.method, self.task, self.c = recording, method, task, recording.config
        self.prefix = f"{AGAIN if task else ''}task{task}."
        self.parameters = recorded_parameters(method)
        self.tolerance = LATER if task else FIRST
        self.found = {"cross_entropy": [], "distillation_without_weight": [], "scale_orthogonality_without_weight": []}
        self.rates, self.step = [], 0

    def near(self, name, found, tolerance=LATER):
        """In the shape that is recorded; of a later task also as released, if it is the same there."""
        if name in self.recording:
            self.recording.near(name, found.reshape(self.recording[name].shape), tolerance)

    def start(self):
        with torch.no_grad():
            for name, tensor in self.recording.under(f"task{self.task}.initial.").items():
                if self.task == 0 or "shared" not in name:
                    self.parameters[name].copy_(tensor)
        if self.task == 0:  # A of the shared changes of any task is the first one's
            before, now = self.method.lora.shared.tasks.tasks
            before.load_state_dict(now.state_dict())

    def gradients(self, name):
        for parameter, tensor in self.parameters.items():
            if tensor.grad is not None:
                self.near(f"{name}.gradient.{parameter}", tensor.grad, self.tolerance)

    def distil(self, images):
        loss = type(self.method).distil(self.method, images)
        self.found["distillation_without_weight"].append(loss)
        if self.step == 0:
            self.gradients(f"task{self.task}.first_distillation_step")
        return loss

    def stepped(self, optimizer, *_):
        self.rates.append(torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64))
        if self.task and len(self.rates) == 1:
            for name, parameter in self.parameters.items():
                self.near(f"task{self.task}.after_first_distillation_step.{name}", parameter)

    def run(self):
        c, method, weight = self.c, self.method, self.method.options.orthogonality
        recipe = Recipe(optimizer="sgd", weight_decay=c["weight_decay"], schedule="epoch-cosine", passes=c["epochs"])
        trained = [p for named in method.named_parameters().values() for _, p in named]
        optimizer = method.wrap(make_optimizer(recipe, [{"params": trained, "lr": c["lr"]}]))
        optimizer.register_step_post_hook(self.stepped)
        method.distil = self.distil
        for self.step in range(c["epochs"] * c["batches"]):
            for group in optimizer.param_groups:
                group["lr"] = c["lr"] * recipe.lr_factor(self.step // c["batches"])
            loss, _ = method.loss(*self.recording.batch(self.task, self.step))
            overlap = method.lora.overlap().detach()
            self.found["cross_entropy"].append(loss.detach() - weight * overlap)
            self.found["scale_orthogonality_without_weight"].append(overlap)
            optimizer.zero_grad()
            loss.backward()
            if self.step == 0:
                self.gradients(f"{self.prefix}first_ce_step")
            optimizer.step()
        del method.distil
        self.near(f"task{self.task}.learning_rates_of_all_steps", torch.stack(self.rates), FIRST)
        for name, values in self.found.items():
            self.near(self.prefix + name, torch.stack(values) if values else torch.zeros(0))
        for name, parameter in self.parameters.items():
            self.near(f"{self.prefix}final.{name}", parameter)


def test_three_tasks_as_recorded():
    """github.com/JiangpengHe/CL-LoRA at df4e74e."""
    recording = AdapterRecording("cl_lora")
    c, classes = recording.config, recording.classes
    options = {"variant": "public-code", "rank": c["rank"], "shared": len(c["shared_blocks"])}
    method = METHODS.get("cl-lora")(recording.model(), Setup(options=options))
    for task in range(c["tasks"]):
        method.start_task(Task(task, classes, task * classes, seed=task))
        method.heads.double()
        replay = Replay(recording, method, task)
        replay.start()
        replay.run()
        method.finish_task(recording.batches(task))
        with torch.no_grad():
            recorded = recording[f"{replay.prefix}prototypes"].unflatten(1, (task + 1, -1)).clone()
            for space in range(task + 1):
                own = slice(space * classes, (space + 1) * classes)
                recorded[own, space] = method.prototypes[own]
                if space < task:  # the task's classes in earlier subspaces, which the answer does not use
                    x = method.lora.early(torch.cat([images for images, _ in recording.batches(task)]))
                    labels = torch.cat([labels for _, labels in recording.batches(task)])
                    features = method.lora.late(x, space)
                    for label in range(task * classes, (task + 1) * classes):
                        recorded[label, space] = features[labels == label].mean(0)
            replay.near(f"{replay.prefix}prototypes", recorded)
            x = method.lora.early(recording["test.images"])
            spaces = [method.lora.late(x, space) for space in range(task + 1)]
            replay.near(f"task{task}.test.features_all_subspaces", torch.cat(spaces, dim=1))
            replay.near(f"{replay.prefix}test.logits", method.predict(recording["test.images"]))
    recording.assert_all_compared()


# On other backbones


@pytest.mark.parametrize("family", ["defocus_mamba_nano", "vim_nano", "vit_nano"])
def test_two_tasks_are_learned(family):
    method = new_method("cl-lora", family, rank=4)
    weights = {key: tensor.clone() for key, tensor in method.model.state_dict().items()}
    losses = learn(method, range(2))
    assert losses[-1] < losses[0] and accuracy(method, range(2)) > 0.7  # chance is 0.25
    assert all(torch.equal(method.model.state_dict()[key], tensor) for key, tensor in weights.items())
    places = {place.name.rpartition(".")[2] for place in method.lora.own.places}
    mamba = {"x_proj", "out_proj"} | ({"x_proj_b"} if family == "vim_nano" else set())
    assert places == ({"q", "v"} if family == "vit_nano" else mamba)
    assert [weights.values.shape for weights in method.lora.weights.tasks] == [(1, 1)] * 2


def test_only_shared_changes_move_old_features_and_old_prototypes_stay():
    method = new_method("cl-lora")
    learn(method, range(1), steps=4)
    images, _ = task_data(0, 2, seed=5)
    lora, prototypes = method.lora, method.prototypes.clone()
    with torch.no_grad():
        early = lora.early(images)
        before = lora.late(early, 0)
    learn(method, range(1, 2), steps=4)
    with torch.no_grad():
        assert torch.equal(lora.late(early, 0), before)
        assert not torch.equal(lora.late(lora.early(images), 0), before)
    assert torch.equal(method.prototypes[:2], prototypes) and method.prototypes.shape == (4, 32)


def test_a_state_from_the_middle_of_a_task_goes_on_in_the_same_way():
    method, other = new_method("cl-lora"), new_method("cl-lora")
    learn(method, range(1), steps=3)
    method.start_task(Task(1, 2, 2, seed=1))
    batch = task_data(1, 2, seed=1)

    def steps(one):
        trained = [p for named in one.named_parameters().values() for _, p in named]
        optimizer = one.wrap(torch.optim.SGD(trained, lr=0.05))
        for _ in range(3):
            loss, _ = one.loss(*batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    steps(method)
    other.load_state_dict({key: tensor.clone() for key, tensor in method.state_dict().items()})
    other.load_task_state_dict(method.task_state_dict())
    for one in (method, other):
        steps(one)
        one.finish_task([batch])
    states = [{**one.state_dict(), **one.task_state_dict()} for one in (method, other)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())
    assert torch.equal(method.model(batch[0]), other.model(batch[0]))


def test_variants():
    """A weight per block or per layer; with public-code the head also learns from the scores before the task."""
    losses, gradients = [], []
    for variant, rows in (("paper", 1), ("public-code", 3)):
        method = new_method("cl-lora", "vit_nano", variant=variant)
        generator = torch.Generator().manual_seed(0)
        for task in range(2):
            method.start_task(Task(task, 2, 2 * task, seed=task))
        with torch.no_grad():
            for change in method.lora.shared.tasks[1]:
                change.B.normal_(std=0.2, generator=generator)
        assert method.lora.weights[1].values.shape == (rows, 1)
        losses.append(method.distil(task_data(1, 2, seed=0)[0]))
        gradients.append(method.heads.heads[1].weight.grad)
    assert torch.equal(*losses) and not torch.allclose(*gradients)


def test_what_does_not_fit_is_refused():
    for family, options, words in (
        ("vit_nano", {"shared": 2}, r"options\.shared \(2\) must be at least 1 and below the number of blocks \(2\)"),
        ("vmamba_nano", {}, "equally wide: use a vit, De-focus Mamba or Vim backbone"),
        ("vit_nano", {"rank": 40}, "cl-lora: options.rank 40 is too large"),
        ("vit_nano", {"layers": ["in_proj"]}, "has no linear layers named in_proj"),
        ("defocus_mamba_nano", {"layers": []}, "options.layers names no layer in the first blocks"),
    ):
        with pytest.raises(UserError, match=words):
            METHODS.get("cl-lora")(small(family), Setup(options=options))
