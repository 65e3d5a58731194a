"""GPM, DualGPM, Adam-NSCL, OWM, TRGP and OSF as methods: what trains, what stays, what their options mean."""

import pytest
import torch
from small_run import VIT

from mambacl.backbones import create_model
from mambacl.methods import METHODS, Setup, Task
from mambacl.nullspace import SETTINGS
from mambacl.nullspace.subspaces import grown, nothing

EXACT = {
    "gpm": {"share": 1.0, "step": 0.0},
    "dual-gpm": {"share": 1.0, "step": 0.0},
    "owm": {"alpha": 1e-9},
    "trgp": {"share": 1.0, "step": 0.0},
}
PROJECTED = (*EXACT, "nscl")


def images(seed, count=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64)


def vit():
    torch.manual_seed(0)
    return create_model("vit", num_classes=0, **{**VIT["backbone_options"], "depth": 2}).double()


def train(method, task, x, labels, steps=3, lr=0.05):
    method.start_task(Task(task, 2, 2 * task, seed=task))
    method.heads.double()
    method.enter(method.phase(0, 1))
    roles = method.named_parameters()
    optimizer = method.wrap(torch.optim.SGD([p for named in roles.values() for _, p in named], lr=lr))
    method.start_epoch(0, lambda: [(x, labels)])
    for _ in range(steps):
        optimizer.zero_grad()
        method.loss(x, labels)[0].backward()
        optimizer.step()
    method.finish_task([(x, labels)])


@pytest.mark.parametrize("name", EXACT)
def test_features_of_an_old_image_stay_at_full_rank(name, tiny_model):
    """An image has fewer tokens than most layers have inputs: all its inputs are protected, and the rest trains. NSCL
    is left out: it always leaves a direction free, also in layers whose inputs take them all."""
    torch.manual_seed(0)
    method = METHODS.get(name)(tiny_model().double(), Setup(options=EXACT[name]))
    old = images(0)
    train(method, 0, old, torch.tensor([0]), steps=1 if name == "owm" else 2)
    scores = method.predict(old).detach()
    weights = {key: p.detach().clone() for key, p in method.model.named_parameters()}
    train(method, 1, images(1, 6), torch.tensor([2, 3] * 3))
    moved = [key for key, p in method.model.named_parameters() if not torch.equal(p, weights[key])]
    assert any("in_proj" in key for key in moved) and all(key.endswith("proj.weight") for key in moved)
    torch.testing.assert_close(method.predict(old)[:, :2], scores, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [*PROJECTED, "osf"])
def test_all_linear_layers_of_a_vit_train(name):
    method = METHODS.get(name)(vit(), Setup(tasks=2))
    expected = {f"blocks.{b}.{layer}" for b in range(2) for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    before = {key: p.detach().clone() for key, p in method.model.named_parameters()}
    for task in range(2):
        train(method, task, images(task, 4), torch.tensor([0, 1, 0, 1]) + 2 * task)
    trained = {
        key.removesuffix(".weight") for key, p in method.model.named_parameters() if not torch.equal(p, before[key])
    }
    assert trained == expected
    assert method.predict(images(5, 3)).shape == (3, 4)


def test_the_share_of_dual_gpm_rises_over_all_tasks(tiny_model):
    rules = [METHODS.get(name)(tiny_model(), Setup(tasks=20)).space.setting for name in ("gpm", "dual-gpm")]
    assert [rule.rank_at(0) for rule in rules] == ["energy:0.97", "energy:0.97"]
    assert [float(rule.rank_at(10).partition(":")[2]) for rule in rules] == pytest.approx([1.0, 0.985])
    released = METHODS.get("dual-gpm")(tiny_model(), Setup(options={"variant": "public-code", "acts_on": "update"}))
    assert released.space.setting.below_at_first and released.space.setting.acts_on == "update"


def test_variants_of_nscl(tiny_model):
    paper, released = (
        METHODS.get("nscl")(tiny_model(), Setup(options={"variant": v})) for v in ("paper", "public-code")
    )
    assert (paper.space.setting.scaling, paper.space.setting.accumulate) == ("none", "sum")
    assert (released.space.setting.scaling, released.space.setting.accumulate) == ("frobenius", "mean-input")
    assert METHODS.get("nscl")(tiny_model(), Setup(options={"factor": 30})).space.setting.rank == "multiple:30.0"


def test_a_cuda_graph_cannot_replay_projected_gradients(tiny_model):
    """The graph would repeat one step's gradients, alpha and projectors."""
    recordable = {name: METHODS.get(name)(tiny_model(), Setup()).recordable for name in (*PROJECTED, "osf", "mamba-cl")}
    assert [name for name, can in recordable.items() if can] == ["nscl", "osf", "mamba-cl"]
    assert METHODS.get("gpm")(tiny_model(), Setup(options={"acts_on": "update"})).recordable
    assert not METHODS.get("mamba-cl")(tiny_model(), Setup(SETTINGS["paper"].override(acts_on="gradient"))).recordable


def test_alpha_of_owm_falls_over_the_steps_of_a_task(tiny_model):
    method = METHODS.get("owm")(tiny_model().double(), Setup(options={"alpha": 1e-4}))
    for task in range(2):
        method.start_task(Task(task, 2, 2 * task, seed=task, steps=4))
        method.heads.double()
        optimizer = method.wrap(torch.optim.SGD([p for _, p in method.tuning.trained()], lr=0.01))
        alphas = []
        for _ in range(4):
            alphas.append(method.space.projected_step.clock.alpha(1e-4))
            method.loss(images(task, 4), torch.tensor([0, 1, 0, 1]) + 2 * task)[0].backward()
            optimizer.step()
        assert alphas == pytest.approx([1.0, 0.1, 0.01, 0.001])
        method.finish_task([])
    assert method.space.tasks == 2


def test_osf_keeps_more_with_each_task(tiny_model):
    method = METHODS.get("osf")(tiny_model(), Setup(tasks=4))
    kept = []
    for task in range(4):
        method.start_task(Task(task, 2, 2 * task, seed=task))
        kept.append(method.weights.factors["blocks.0.mixer.in_proj"].kept_S.numel())
    assert kept == [0, 8, 16, 24]  # of 32
    fixed = METHODS.get("osf")(tiny_model(), Setup(options={"keep": 0.5}))
    fixed.start_task(Task(0, 2, 0, seed=0))
    assert fixed.weights.factors["blocks.0.mixer.in_proj"].kept_S.numel() == 16


def test_trgp_trusts_by_gradients_and_answers_each_task_with_its_scales():
    method = METHODS.get("trgp")(vit(), Setup(options={"share": 0.8, "threshold": 0.2}))
    for task in range(3):
        x, labels = images(task, 8), torch.tensor([0, 1] * 4) + 2 * task
        before = {name: covariance.clone() for name, covariance in method.space.covariances().items()}
        train(method, task, x, labels)
        for name, own in method.scales.bases[task].items():
            moment = method.space.covariances()[f"{name}.weight"] - before.get(f"{name}.weight", 0)
            space = grown(nothing(len(moment), moment), moment, 0.8 + 0.003 * task)
            torch.testing.assert_close(own @ own.T, space.basis @ space.basis.T)
    trusts = [set(t.tolist()) for t in method.scales.trusts[2].values()]
    assert set.union(*trusts) == {-1, 0, 1} or set.union(*trusts) == {0, 1}
    moved = [
        (Q - torch.eye(len(Q))).abs().max() > 0
        for name, own in method.scales.scales[2].items()
        for number, Q in zip(method.scales.trusts[2][name].tolist(), own, strict=True)
        if number >= 0
    ]
    assert moved and all(moved)
    x = images(9, 3)
    found = method.predict(x)
    for task, head in enumerate(method.heads.heads):
        with method.scales.using(task):
            torch.testing.assert_close(found[:, 2 * task : 2 * task + 2], head(method.model(x)))
    method.options = type(method.options)(scales="last")
    latest = method.predict(x)
    torch.testing.assert_close(latest[:, 4:], found[:, 4:])
    assert not torch.allclose(latest[:, 2:4], found[:, 2:4])


def test_trgp_trusts_nobody_above_every_share():
    method = METHODS.get("trgp")(vit(), Setup(options={"threshold": 1.0}))
    for task in range(2):
        train(method, task, images(task, 8), torch.tensor([0, 1] * 4) + 2 * task)
    assert all(t.tolist() == [-1] for t in method.scales.trusts[1].values())
