"""The null space against numbers recorded from the released code.

The recording is in float32, our side in float64: what differs is the recording's own rounding, equal on every machine.
"""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from nullspace_help import GOLDENS, relative
from safetensors.torch import load_file
from tolerance import assert_near, rounding
from torch import nn

from mambacl.nullspace import NullSpace, Part, Projector
from mambacl.nullspace.projectors import project_part


def public_name(block, word):
    return f"blocks.{block}.mixer." + (f"{word}" if word == "A_log" else f"{word}.weight")


PUBLIC_WORDS = {  # the public code's split of x_proj, and our names of the same rows
    "x_proj_step": "x_proj.weight[0:5]",
    "x_proj_B": "x_proj.weight[5:21]",
    "x_proj_C": "x_proj.weight[21:37]",
    "A_log": "A_log",
    "out_proj": "out_proj.weight",
}
PUBLIC_PARTS = [
    (public_name(block, word), f"blocks.{block}.mixer.{ours}")
    for block, (word, ours) in itertools.product(range(2), PUBLIC_WORDS.items())
]


ADDITIONS = 2**11  # 768 of a patch, 576 per block, 34 rows; a covariance is a product, so its error is twice that


@pytest.fixture
def public(golden_model):
    """The recorded model, its null space after the recorded batches, and the recorded numbers, all in float64."""
    model, tensors, config = golden_model("mambacl_nullspace")
    tensors = {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}
    space = NullSpace(model.double(), "public-code", eta=config["null_eta"])
    space.consolidate(tensors["images"])
    return model, space, tensors, config


def test_covariances_are_the_recorded_ones(public):
    _, space, tensors, _ = public
    covariances = space.covariances()
    assert covariances.keys() == {ours for _, ours in PUBLIC_PARTS}
    for name, ours in PUBLIC_PARTS:
        assert relative(covariances[ours], tensors[f"cov/{name}"]) < rounding(ADDITIONS), name


def test_covariances_of_a_model_in_float32_are_those_in_float64(public, golden_model):
    _, space, tensors, config = public
    model, *_ = golden_model("mambacl_nullspace")
    single = NullSpace(model, "public-code", eta=config["null_eta"])
    single.consolidate(tensors["images"].float())
    for name, covariance in single.covariances().items():
        assert relative(covariance, space.covariances()[name]) < rounding(ADDITIONS), name


def test_projectors_are_the_recorded_ones(public):
    _, space, tensors, _ = public
    for name, ours in PUBLIC_PARTS:
        assert relative(space.projectors()[ours].dense(), tensors[f"proj_eta0.9/{name}"]) < rounding(ADDITIONS), name


def test_two_projected_adam_steps_are_the_recorded_ones(public):
    model, space, tensors, config = public
    trained = [*space.parameters(), *model.head.parameters()]
    optimizer = space.wrap(torch.optim.Adam(trained, lr=config["lr"], weight_decay=config["weight_decay"]))
    for step in range(2):
        loss = F.cross_entropy(model(tensors["images"][0]), tensors["train_targets"])
        assert loss.item() == pytest.approx(tensors[f"loss_step{step}"].item(), abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = dict(model.named_parameters())
    for name, ours in [*PUBLIC_PARTS, ("head.weight", "head.weight"), ("head.bias", "head.bias")]:
        parameter, _, rows = ours.rstrip("]").partition("[")
        value = after[parameter].detach()
        if rows:
            value = value[slice(*map(int, rows.split(":")))]
        atol = 0.005 * config["lr"]  # where a gradient almost cancels, its rounding is that share of Adam's step
        torch.testing.assert_close(value, tensors[f"after2steps/{name}"], rtol=0, atol=atol, msg=name)


STEPS = json.loads((GOLDENS / "mambacl_run" / "modadam_step.json").read_text())


@pytest.fixture(scope="module")
def recorded_steps():
    tensors = load_file(GOLDENS / "mambacl_run" / "modadam_step.safetensors")
    return {name: tensor.double() for name, tensor in tensors.items()}


def projector_of(matrix, eta):
    """The low-rank form of a recorded projector, (1 - eta) I + factor V V^T."""
    values, vectors = torch.linalg.eigh(matrix)
    basis = vectors[:, values > (values[0] + values[-1]) / 2]
    return Projector(basis, 1 - eta, (values[-1] - (1 - eta)).item())


@pytest.mark.parametrize("case", STEPS["cases"], ids=lambda case: case["name"])
def test_a_single_projected_step_is_the_recorded_one(case, recorded_steps):
    """x_proj as one parameter, whose three groups of rows have projectors of their own."""
    names = {"x_proj": ["step", "B", "C"], "A": ["A"], "out": ["out"], "head_weight": ["head_weight"]}

    def recorded(kind, name):
        return torch.cat([recorded_steps[f"{case['name']}.{kind}.{part}"] for part in names[name]])

    parameters = {name: nn.Parameter(recorded("before.param", name)) for name in names}
    heads = [parameters.pop("head_weight")]
    groups = [{"params": list(parameters.values()), "lr": case["lr"][0]}, {"params": heads, "lr": case["lr"][1]}]
    optimizer = torch.optim.Adam(groups, betas=STEPS["betas"], eps=STEPS["eps"], weight_decay=case["wd"])
    parameters["head_weight"] = heads[0]
    for name, parameter in parameters.items():
        parameter.grad = recorded("grad", name)
        moments = {word: recorded(f"before.{word}", name) for word in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(case["step"])), **moments}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer.step()

    if case["proj"]:
        parts = {
            "x_proj": [("step", (0, 4), "right"), ("B", (4, 12), "right"), ("C", (12, 20), "right")],
            "A": [("A", None, "left")],
            "out": [("out", None, "right")],
        }
        for name, pieces in parts.items():
            for kind, rows, side in pieces:
                part = Part(kind, name, (rows,) if rows else (), side)
                projector = projector_of(recorded_steps[f"{case['name']}.proj.{kind}"], case["eta"])
                project_part(before[name], parameters[name].detach(), part, projector)
    for name, parameter in parameters.items():
        assert_near(parameter, recorded("after.param", name).float(), terms=1, what=name)  # float32's rounding
        for word in ("exp_avg", "exp_avg_sq"):
            assert_near(optimizer.state[parameter][word], recorded(f"after.{word}", name).float(), terms=1, what=word)
