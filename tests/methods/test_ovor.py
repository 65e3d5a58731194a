"""OVOR gives the numbers that were recorded from public code; outliers of the paper by plain arithmetic."""

import pytest
import torch
from prompt_recordings import FIRST, LATER, Recording, adam, as_coda
from small_run import VIT

from mambacl.backbones import create_model
from mambacl.classifiers.outliers import around_the_boundary, around_the_origin, energy_loss
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task


class Replay:
    """Trains the method as recorded: one batch of images per epoch, then epochs of features and outliers."""

    def __init__(self) -> None:
        self.recording = Recording("ovor")
        c = self.recording.config
        _, first, second = c["epochs"]
        options = {
            "variant": "public-code", "first_length": c["g_length"] // 2, "later_length": c["e_length"] // 2,
            "outlier_share": second / (first + second), "weight": c["lmda"], "most": c["thres_id"],
            "least": c["thres_ood"], "neighbour": c["K"], "boundary": c["select"], "offsets": c["sample_from"],
            "deviation": c["cov"], "per_class": c["per_class"],
        }  # fmt: skip
        self.epochs, self.first = first + second, first
        self.method = METHODS.get("ovor")(self.recording.model(), Setup(options=options))
        self.parts = {f"prompt.block{b}": (self.method.parts["first"], b) for b in (0, 1)}
        self.parts |= {f"prompt.block{b}": (self.method.parts["later"], b - 2) for b in (2, 3, 4)}
        with torch.no_grad():
            for name, (part, place) in self.parts.items():
                rows = self.recording[f"init.{name}"]
                part.values[place] = rows.unflatten(-1, (c["heads"], -1)).unflatten(0, (2, -1))

    def task(self, task: int) -> None:
        recording, method, classes = self.recording, self.method, self.recording.classes
        method.start_task(Task(task, classes, task * classes, seed=task))
        method.heads.double()
        self.rows = slice(task * classes, (task + 1) * classes)
        self.head = method.heads.heads[-1]
        with torch.no_grad():
            self.head.weight.copy_(recording["init.head.weight"][self.rows])
            self.head.bias.copy_(recording["init.head.bias"][self.rows])
        taken = adam(method, recording.config["lr"])
        images, labels = recording[f"task{task}.images"], recording[f"task{task}.labels"]
        order, step = labels.sort(stable=True).indices, 0
        for epoch in range(self.epochs):
            method.enter(method.phase(epoch, self.epochs))
            parts = [torch.arange(len(labels))]
            if epoch >= self.first:
                parts = list(order.split(recording.config["id_batch"]))
                self.outliers(f"task{task}.phase2.epoch{epoch - self.first + 1}", epoch, images, labels, parts)
            for part in parts:
                step += 1
                self.step(f"task{task}.step{step}", taken, images[part], labels[part], epoch)
        with torch.no_grad():
            recording.near(f"task{task}.end.test_logits", method.predict(recording["test.images"]), LATER)
        self.prompts(f"task{task}.end.", gradients=False, tolerance=LATER)

    def outliers(self, name, epoch, images, labels, parts) -> None:
        recording, method = self.recording, self.method
        method.draw_offsets = lambda epoch: recording[f"{name}.gaussian_offsets"]
        method.start_epoch(epoch, lambda: [(images[part], labels[part]) for part in parts])
        recording.near(f"{name}.features", method.features(images[torch.cat(parts)]), LATER)
        recording.near(f"{name}.outliers", method.outliers.flatten(0, 1), LATER)

    def step(self, name, taken, images, labels, epoch) -> None:
        recording, method = self.recording, self.method
        tolerance = FIRST if name == "task0.step1" else LATER
        if f"{name}.mean_energy_in" in recording:
            inside = -self.head(method.features(images)).logsumexp(1).mean()
            outside = -self.head(method.outliers[int(method.step)]).logsumexp(1).mean()
            recording.near(f"{name}.mean_energy_in", inside, tolerance)
            recording.near(f"{name}.mean_energy_out", outside, tolerance)
        loss, _ = method.loss(images, labels)
        recording.near(f"{name}.loss.total", loss, tolerance)
        taken.zero_grad()
        loss.backward()
        self.heads(f"{name}.grad.", gradients=True, tolerance=tolerance)
        self.prompts(f"{name}.grad.", gradients=True, tolerance=tolerance)
        for group in taken.param_groups:
            group["lr"] = recording.config["lr"] * as_coda(epoch, self.epochs)
        taken.step()
        self.prompts(f"{name}.", gradients=False, tolerance=LATER)
        self.heads(f"{name}.", gradients=False, tolerance=LATER)

    def heads(self, prefix, gradients, tolerance) -> None:
        for name in ("weight", "bias"):
            stored = f"{prefix}head.{name}"
            if stored in self.recording:
                self.recording.tensors[stored] = self.recording[stored][self.rows]
                parameter = getattr(self.head, name)
                self.recording.near(stored, parameter.grad if gradients else parameter, tolerance)

    def prompts(self, prefix, gradients, tolerance) -> None:
        for name, (part, place) in self.parts.items():
            if prefix + name in self.recording:
                tensor = part.values.grad if gradients else part.values
                self.recording.near(prefix + name, tensor[place].flatten(-2).flatten(0, 1), tolerance)


def test_ovor():
    run = Replay()
    for task in range(run.recording.config["tasks_run"]):
        run.task(task)
    ends = (".total", "test_logits", "outliers", ".features", "head.weight", "energy_out")
    recorded = {n for n in run.recording.tensors if not n.startswith(("backbone", "init")) and n.endswith(ends)}
    assert recorded <= run.recording.compared and len(recorded) > 40


# The parts


def plain_distance(point, features, neighbour):
    return sorted(float((point - feature).square().sum()) for feature in features)[neighbour - 1]


@pytest.mark.parametrize("kind", [around_the_boundary, around_the_origin])
def test_outliers(kind):
    """One point at a time, from the description."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    offsets = 0.5 * torch.randn(5, 4, generator=generator, dtype=torch.float64)
    directions = [feature / feature.norm() for feature in features]
    if kind is around_the_boundary:
        far = sorted(range(9), key=lambda i: -plain_distance(directions[i], directions, 3))[:2]
        points = [features[i] + offset for i in far for offset in offsets]
        scored = [(plain_distance(p / p.norm(), directions, 3), p) for p in points]
    else:
        scored = [(plain_distance(p, directions, 3), p) for p in offsets for _ in range(2)]
    expected = [p for _, p in sorted(scored, key=lambda pair: -pair[0])[:6]]
    torch.testing.assert_close(kind(features, offsets, 3, 2, 6), torch.stack(expected))


def test_few_features():
    """Fewer features than neighbours or boundary points, fewer points than outliers wanted."""
    features, offsets = torch.randn(2, 4), torch.randn(3, 4)
    assert around_the_boundary(features, offsets, 50, 50, 40).shape == (6, 4)
    assert around_the_origin(features, offsets, 50, 50, 40).shape == (6, 4)


def test_energies():
    """Within the limits there is no loss; beyond them it is quadratic, then linear."""
    inside, outside = torch.tensor([-20.0, -14.5, -10.0]), torch.tensor([0.0, -3.5, -8.0])
    by_hand = (0.0 + 0.5 * 0.5**2 + (5 - 0.5)) / 3 + (0.0 + 0.5 * 0.5**2 + (5 - 0.5)) / 3
    assert float(energy_loss(inside, outside, -15.0, -3.0)) == pytest.approx(by_hand)


def tiny(**options):
    torch.manual_seed(0)
    model = create_model("vit", num_classes=0, pretrained=False, **VIT["backbone_options"])
    return METHODS.get("ovor")(model, Setup(options={"offsets": 20, "per_class": 4, **options}))


def test_the_head_learns_to_tell_outliers_apart():
    """The energy of outliers rises above the limit, in the phase in which only the head trains."""
    method = tiny(boundary=3, neighbour=2, deviation=1.0, weight=1.0, most=-2.0, least=-1.0)
    method.start_task(Task(0, 2, 0, seed=0))
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 2
    epochs = 5
    assert [method.phase(epoch, epochs).name for epoch in range(epochs)] == ["", "", "", "", "outliers"]
    method.enter(method.phase(4, epochs))
    before = method.parts["first"].values.clone()
    taken = torch.optim.Adam([p for named in method.named_parameters().values() for _, p in named], lr=0.05)
    losses = []
    for _ in range(30):
        method.start_epoch(4, lambda: [(images, labels)])
        loss, _ = method.loss(images, labels)
        taken.zero_grad()
        loss.backward()
        taken.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0] and torch.equal(method.parts["first"].values, before)
    assert method.outliers.shape == (1, 8, 16)


def test_outliers_come_from_the_task_and_the_epoch():
    method, other = tiny(), tiny()
    for one in (method, other):
        one.start_task(Task(0, 2, 0, seed=0))
    assert torch.equal(method.draw_offsets(3), other.draw_offsets(3))
    assert not torch.equal(method.draw_offsets(3), method.draw_offsets(4))
    method.start_task(Task(1, 2, 2, seed=1))
    assert not torch.equal(method.draw_offsets(3), other.draw_offsets(3))


def test_mistakes():
    with pytest.raises(UserError, match=r"block 1 is in options\.first_blocks and options\.later_blocks"):
        tiny(later_blocks=[1, 2])
    with pytest.raises(UserError, match=r"options\.later_length: 69 prompt tokens are too many"):
        tiny(later_length=69)
