"""Recorded training of public code, replayed by `NullSpace(model, rule=...)`: GPM, Adam-NSCL and OWM.

Each recording is of a small network with convolutions; a head per task is left out of the space (GPM, NSCL) or is one
of the layers (OWM).
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from mambacl.nullspace import BLOCK_READERS, Block, NullSpace, Part
from mambacl.nullspace.recursive import absorbed

GRADIENT, LATER = {"rtol": 1e-8, "atol": 1e-10}, {"rtol": 1e-7, "atol": 1e-9}


def near(actual: Tensor, expected: Tensor, what: str, tolerance: dict[str, float]) -> None:
    torch.testing.assert_close(actual.detach(), expected, msg=lambda text: f"{what}: {text}", **tolerance)


class Recorded(dict[str, Tensor]):
    """The tensors of a recording, and which of them have been looked at."""

    def __init__(self, path: Path) -> None:
        super().__init__(load_file(path))
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.used.add(name)
        return super().__getitem__(name)

    def unused(self) -> set[str]:
        return {name for name in self if name not in self.used and not name.startswith("initial.")}


def start(net: nn.Module, recorded: Mapping[str, Tensor]) -> None:
    initial = {name.removeprefix("initial."): t for name, t in recorded.items() if name.startswith("initial.")}
    missing, unexpected = net.double().load_state_dict(initial, strict=False)
    assert not unexpected and all("running" in name or "num_batches" in name for name in missing)


class Sampled(nn.Conv2d):
    """In evaluation, only the first images go through the module, whose inputs the space sees."""

    count = 0

    def part(self, x: Tensor, training: bool) -> Tensor:
        if training:
            return self(x)
        return torch.cat([self(x[: self.count]), F.conv2d(x[self.count :], self.weight)])


class GPMNet(nn.Module):
    """Batch statistics are those of the batch, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        sizes = zip((2, 5, 6), (5, 6, 8), (3, 3, 2), (4, 6, 6), strict=True)
        for number, (before, after, kernel, count) in enumerate(sizes, 1):
            conv = Sampled(before, after, kernel, bias=False)
            conv.count = count
            setattr(self, f"conv{number}", conv)
            setattr(self, f"bn{number}", nn.BatchNorm2d(after, track_running_stats=False))
        self.fc1, self.fc2 = nn.Linear(8, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.bn4, self.bn5 = (nn.BatchNorm1d(12, track_running_stats=False) for _ in range(2))
        self.fc3 = nn.ModuleList(nn.Linear(12, 3, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number in (1, 2, 3):
            conv, norm = getattr(self, f"conv{number}"), getattr(self, f"bn{number}")
            x = F.max_pool2d(F.relu(norm(conv.part(x, self.training))), 2)
        x = F.relu(self.bn4(self.fc1(x.flatten(1))))
        return F.relu(self.bn5(self.fc2(x)))


def test_gpm(goldens: Path) -> None:
    recorded, net = Recorded(goldens / "gpm.safetensors"), GPMNet()
    start(net, recorded)
    space = NullSpace(
        net, rule="gpm", rank="energy:0.9", rank_step=0.01, below_at_first=True, conv={"trains": True},
        others="first-task", leave="fc3",
    )  # fmt: skip
    layers = ("conv1", "conv2", "conv3", "fc1", "fc2")
    for task in range(3):
        own = f"task{task}."
        head = net.fc3[task]
        optimizer = space.wrap(torch.optim.SGD([*space.parameters(), head.weight], lr=0.05))
        x, y = recorded[own + "images"], recorded[own + "labels"]
        losses = []
        for begin in (0, 6, 0, 6):
            optimizer.zero_grad()
            loss = F.cross_entropy(head(net(x[begin : begin + 6])), y[begin : begin + 6])
            loss.backward()
            raw = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
            optimizer.step()
            losses.append(loss.detach())
        near(torch.stack(losses), recorded[own + "losses"], "losses", GRADIENT)
        for name, parameter in net.named_parameters():
            if (key := f"{own}last_step.gradient_before_projection.{name}") in recorded:
                near(raw[name], recorded[key], key, GRADIENT)
            if (key := f"{own}last_step.gradient_used.{name}") in recorded:
                fixed = task > 0 and name.startswith("bn")  # by a zero gradient there, by undoing the step here
                near(0 * parameter if fixed else parameter.grad, recorded[key], key, GRADIENT)
            if (key := f"{own}parameters_after.{name}") in recorded:
                near(parameter, recorded[key], key, GRADIENT)
        net.eval()
        for number in range(task + 1):
            near(net.fc3[number](net(x)), recorded[f"{own}logits_head{number}"], "logits", GRADIENT)
        net.train()
        before = {name: covariance.clone() for name, covariance in space.covariances().items()}
        space.consolidate([x])
        for layer in layers:
            name = f"{layer}.weight"
            found, gram = space.decompositions()[name], space.covariances()[name]
            near(gram - before.get(name, 0), recorded[f"{own}{layer}.activation_gram"], "Gram", GRADIENT)
            if (key := f"{own}{layer}.activation_matrix") in recorded:
                near(recorded[key] @ recorded[key].T, recorded[f"{own}{layer}.activation_gram"], key, GRADIENT)
            share = float(recorded[own + "thresholds"][layers.index(layer)])
            assert share == pytest.approx(float(space.setting.rank_at(task).partition(":")[2]), abs=1e-12)
            assert found.protected == int(recorded[f"{own}{layer}.rank"])
            free = space.projectors()[name].dense()
            near(torch.eye(len(free)).double() - free, recorded[f"{own}{layer}.projector"], name, GRADIENT)
    assert not recorded.unused()


class OldAdam(torch.optim.Adam):
    """Adam as it was: eps is added before the second moment's bias is corrected."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"n": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["n"] += 1
                grad = p.grad + group["weight_decay"] * p if p.grad is not None else group["weight_decay"] * p
                state["m"].lerp_(grad, 1 - 0.9)
                state["v"].mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
                rate = group["lr"] * (1 - 0.999 ** state["n"]) ** 0.5 / (1 - 0.9 ** state["n"])
                p.addcdiv_(state["m"], state["v"].sqrt() + 1e-8, value=-rate)


class NSCLNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Conv2d(4, 6, 3, 2, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(6)
        self.fc1, self.fc2 = nn.Linear(6, 10, bias=False), nn.Linear(10, 10, bias=False)
        self.last = nn.ModuleDict({str(number): nn.Linear(10, 3) for number in (1, 2, 3)})

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x))).mean((2, 3))
        return torch.tanh(self.fc2(torch.tanh(self.fc1(x))))


def test_adam_nscl(goldens: Path) -> None:
    recorded, net = Recorded(goldens / "adam_nscl.safetensors"), NSCLNet()
    start(net, recorded)
    space = NullSpace(
        net, rule="nscl", rank="multiple:30", accumulate="mean-input", scaling="frobenius", conv={"trains": True},
        leave=["last", "bn1", "bn2"],
    )  # fmt: skip
    norms = {name: p for name, p in net.named_parameters() if name.startswith("bn")}
    kept: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []  # importance and anchor of the norms, per task

    def penalty(moved: float = 0.0) -> Tensor:
        terms = [(w[n] * (norms[n] + moved - a[n]).square()).sum() for w, a in kept for n in norms]
        return torch.stack(terms).sum() if terms else torch.zeros(()).double()

    for task in range(3):
        own, head = f"task{task}.", net.last[str(task + 1)]
        batches = list(zip(*(recorded[own + name].split(4) for name in ("images", "labels")), strict=True))
        groups = [
            {"params": space.parameters(), "lr": 0.01 if task == 0 else 0.005, "weight_decay": 0.005},
            {"params": list(head.parameters()), "lr": 0.01},
            {"params": list(norms.values()), "lr": 0.005, "weight_decay": 0.005},
        ]
        optimizer = space.wrap(OldAdam(groups))
        net.train()
        for step, (x, y) in enumerate(batches[:3]):
            optimizer.zero_grad()
            loss = F.cross_entropy(head(net(x)), y) + 100.0 * penalty()
            loss.backward()
            near(loss, recorded[own + "losses"][step], "loss", LATER)
            for name, p in net.named_parameters():
                if (key := f"{own}step{step}.gradient.{name}") in recorded:
                    near(p.grad if p.grad is not None else 0 * p, recorded[key], key, LATER)
            optimizer.step()
            for name, p in net.named_parameters():
                if (key := f"{own}step{step}.parameter_after.{name}") in recorded:
                    near(p, recorded[key], key, LATER)
        for name, tensor in net.state_dict().items():
            if (key := f"{own}after_steps.{name}") in recorded:
                near(tensor, recorded[key], key, LATER)
        if task == 2:
            break  # nothing is recorded after the last steps
        net.eval()
        importance = {name: torch.zeros_like(p) for name, p in norms.items()}
        for x, _ in batches:
            logits = head(net(x))
            found = torch.autograd.grad(F.cross_entropy(logits, logits.argmax(1)), list(norms.values()))
            for name, gradient in zip(norms, found, strict=True):
                importance[name] += gradient.square() * len(x) / len(batches)
        kept.append((importance, {name: p.detach().clone() for name, p in norms.items()}))
        for name in norms:
            near(importance[name], recorded[f"{own}importance.{name}"], name, LATER)
            near(norms[name], recorded[f"{own}anchor.{name}"], name, LATER)
        near(penalty(0.01), recorded[f"{own}penalty_if_all_bn_parameters_move_by_0.01"], "penalty", LATER)
        space.consolidate(x for x, _ in batches)
        for layer in ("conv1", "conv2", "fc1", "fc2"):
            name, found = f"{layer}.weight", space.decompositions()[f"{layer}.weight"]
            near(space.covariances()[name], recorded[f"{own}{layer}.covariance_accumulated"], name, LATER)
            near(found.spectrum, recorded[f"{own}{layer}.singular_values"], name, LATER)
            assert found.rank == int(recorded[f"{own}{layer}.null_rank"])
            near(space.projectors()[name].dense(), recorded[f"{own}{layer}.update_projector"], name, LATER)
    assert not recorded.unused()


class OWMNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number, (before, after) in enumerate(((2, 4), (4, 5), (5, 6)), 1):
            setattr(self, f"conv{number}", nn.Conv2d(before, after, 2, bias=False))
        self.fc1, self.fc2 = nn.Linear(6, 10, bias=False), nn.Linear(10, 10, bias=False)
        self.fc3 = nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.max_pool2d(F.relu(conv(F.pad(x, (1, 1, 1, 1), mode="replicate"))), 2)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


def every_second_window(module: nn.Module, name: str) -> Block | None:
    """OWM's code shows its projectors windows at a stride of 2 of convolutions at a stride of 1."""
    if not isinstance(module, nn.Conv2d):
        return None

    def hooks(record):
        def show(_, arguments):
            record({"in": F.unfold(arguments[0], module.kernel_size, stride=2).mT.unsqueeze(2)})

        return [module.register_forward_pre_hook(show)]

    return Block(name, module, (Part("conv", f"{name}.weight"),), hooks, selective=False)


def mean_input(recorded: Mapping[str, Tensor], own: str, layer: str) -> Tensor:
    """As rows of the projector: one, or a convolution's windows at a stride of 2."""
    given = recorded[f"{own}.mean_input.{layer}"]
    return F.unfold(given, 2, stride=2).mT[0] if given.dim() == 4 else given


def test_owm(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BLOCK_READERS, "_entries", {**BLOCK_READERS._entries, "stride 2": every_second_window})
    recorded, net = Recorded(goldens / "owm.safetensors"), OWMNet()
    start(net, {f"{name}.weight" if name.startswith("initial") else name: t for name, t in recorded.items()})
    space = NullSpace(net, rule="owm", conv={"trains": True}, alpha=[1e-5, 1e-5, 1e-5, 1e-4, 1e-2, 0.1])
    layers = ("conv1", "conv2", "conv3", "fc1", "fc2", "fc3")
    for task in range(2):
        own = f"task{task}."
        optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.02, momentum=0.9), steps=4)
        x, y = recorded[own + "images"], recorded[own + "labels"]
        for step, begin in enumerate((0, 5, 0, 5)):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x[begin : begin + 5]), y[begin : begin + 5])
            loss.backward()
            near(loss, recorded[own + "losses"][step], "loss", LATER)
            for number, layer in enumerate(layers):
                alpha = space.projected_step.clock.alpha(space.setting.alpha[number])
                near(torch.tensor(alpha).double(), recorded[own + "alphas"][step][max(number - 2, 0)], "alpha", LATER)
                if (key := f"{own}step{step}.mean_input.{layer}") in recorded:
                    seen = space.projected_step.recursive()[f"{layer}.weight"].seen
                    near(seen[0], mean_input(recorded, f"{own}step{step}", layer), key, LATER)
                if (key := f"{own}step{step}.gradient_raw.{layer}") in recorded:
                    near(getattr(net, layer).weight.grad, recorded[key], key, LATER)
            optimizer.step()
            square = sum(p.grad.square().sum() for p in net.parameters())
            near(square.sqrt(), recorded[f"{own}step{step}.gradient_norm_after_projection"], "norm", LATER)
            assert square < 100  # the recorded clipping at 10 changes nothing
            for layer in layers:
                if (key := f"{own}step{step}.gradient_projected.{layer}") in recorded:
                    near(getattr(net, layer).weight.grad, recorded[key], key, LATER)
                projector = space.projected_step.recursive()[f"{layer}.weight"].projector[0]
                if (key := f"{own}step{step}.projector.{layer}") in recorded:
                    near(projector, recorded[key], key, LATER)
        for layer in layers:
            near(getattr(net, layer).weight, recorded[f"{own}parameters_after.{layer}"], layer, LATER)
        space.consolidate()
    assert space.tasks == 2

    W, P = recorded["mlp_layer.weight_initial"], recorded["mlp_layer.projector_initial"]  # in x out
    for step, alpha in enumerate((1.0, 0.1, 0.01)):
        own = f"mlp_layer.step{step}."
        P = absorbed(P, recorded[own + "inputs"].mean(0, keepdim=True), alpha)
        W = W - 0.2 * P @ recorded[own + "gradient"]
        near(P, recorded[own + "projector"], "MLP", LATER)
        near(W, recorded[own + "weight"], "MLP", LATER)
    assert not recorded.unused()
