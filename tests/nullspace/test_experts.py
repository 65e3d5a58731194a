"""Experts of mixtures, whose weights are stacked in one parameter: each is protected by the tokens sent to it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mambacl.errors import UserError
from mambacl.nullspace import NullSpace

WIDTH, HIDDEN, EXPERTS = 12, 6, 4


class Experts(nn.Module):
    """As in `transformers`: called with tokens, the experts chosen for each, and their weights."""

    def __init__(self, transposed=False, gate=True):
        super().__init__()
        first, second = ((2 if gate else 1) * HIDDEN, WIDTH), (WIDTH, HIDDEN)
        if transposed:
            first, second = first[::-1], second[::-1]
        self.name = "gate_up_proj" if gate else "up_proj"
        self.transposed = transposed
        setattr(self, self.name, nn.Parameter(torch.randn(EXPERTS, *first) * 0.4))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, *second) * 0.4)
        self.act_fn = F.silu

    def forward(self, tokens, chosen, weights):
        found = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            row, slot = torch.where(chosen == expert)
            first, second = getattr(self, self.name)[expert], self.down_proj[expert]
            if self.transposed:
                first, second = first.mT, second.mT
            out = F.linear(tokens[row], first)
            if self.name == "gate_up_proj":
                gate, up = out.chunk(2, dim=-1)
                out = self.act_fn(gate) * up
            else:
                out = self.act_fn(out)
            found = found.index_add(0, row, F.linear(out, second) * weights[row, slot, None])
        return found


class Mixture(nn.Module):
    def __init__(self, chosen=2, **options):
        super().__init__()
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.experts = Experts(**options)
        self.head = nn.Linear(WIDTH, 3)
        self.chosen = chosen

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = F.linear(tokens, self.router).softmax(-1).topk(self.chosen)
        return self.head(tokens + self.experts(tokens, chosen, weights)).unflatten(0, x.shape[:2])


def mixture(**options):
    torch.manual_seed(0)
    return Mixture(**options).double().eval()


def inputs(seed, count=4):
    """Few tokens: each expert's inputs leave directions free."""
    return torch.randn(count, 2, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def train(model, space, batch, steps=20, lr=0.02):
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=lr))
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()


LAYOUTS = {"usual": {}, "transposed": {"transposed": True}, "no gate": {"gate": False}}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", ["gpm", "exact", "nscl"])
def test_old_outputs_stay_and_new_ones_are_learned(layout, rule):
    model = mixture(**LAYOUTS[layout])
    chosen = {"gpm": {"rule": "gpm", "rank": "energy:1", "rank_step": 0.0, "acts_on": "update"},
              "exact": {"setting": "exact", "rank": "tolerance:1e-12", "layers": "all", "others": "fixed"},
              "nscl": {"rule": "nscl", "rank": "tolerance:1e-12"}}[rule]  # fmt: skip
    space, old, new = NullSpace(model, **chosen), inputs(0), inputs(1, 30)
    space.consolidate([old])
    with torch.no_grad():
        before, loss = model(old), model(new).square().sum()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, space, new)
    with torch.no_grad():
        torch.testing.assert_close(model(old), before, rtol=0, atol=1e-6)
        assert model(new).square().sum() < 0.9 * loss
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, weights[name])}
    assert {f"experts.{model.experts.name}", "experts.down_proj"} <= moved and "router" not in moved


def test_each_expert_has_the_covariance_of_its_own_tokens():
    model, batch = mixture(), inputs(2, 9)
    space = NullSpace(model, rule="gpm")
    space.consolidate(batch.split(4))
    tokens = batch.flatten(0, 1)
    with torch.no_grad():
        chosen = F.linear(tokens, model.router).softmax(-1).topk(2).indices
    for expert in range(EXPERTS):
        rows = tokens[(chosen == expert).any(-1)]
        gate, up = F.linear(rows, model.experts.gate_up_proj[expert]).chunk(2, dim=-1)
        hidden = (F.silu(gate) * up).detach()
        found = space.covariances()
        torch.testing.assert_close(found[f"experts.gate_up_proj[{expert}]"], rows.T @ rows)
        torch.testing.assert_close(found[f"experts.down_proj[{expert}]"], hidden.T @ hidden)


@pytest.mark.parametrize("rule", ["gpm", "dual-gpm", "nscl", "osf"])
def test_an_expert_without_tokens_protects_nothing(rule):
    model = mixture(chosen=1)
    with torch.no_grad():
        model.router.zero_()
        model.router[0, 0], model.router[3, 0] = 1.0, -1.0  # tokens go to 0 or 3
    space = NullSpace(model, rule=rule)
    space.consolidate([inputs(0)])
    space.consolidate([inputs(1)])
    found = space.decompositions()
    if rule != "osf":
        assert found["experts.gate_up_proj[1]"].protected == 0 < found["experts.gate_up_proj[0]"].protected
    before = model.experts.gate_up_proj.detach().clone()
    train(model, space, inputs(3))
    assert torch.isfinite(model.experts.gate_up_proj).all()
    assert not torch.equal(model.experts.gate_up_proj[0], before[0])


def test_state_is_saved_and_loaded_by_expert(tmp_path):
    model = mixture()
    space = NullSpace(model, rule="gpm")
    space.consolidate([inputs(0)])
    space.save(tmp_path / "space.safetensors")
    again = NullSpace(model, rule="gpm")
    again.load(tmp_path / "space.safetensors")
    for name, projector in space.projectors().items():
        assert torch.equal(again.projectors()[name].dense(), projector.dense())


def test_recursive_projectors_refuse_experts():
    with pytest.raises(UserError, match="does not protect experts, as experts"):
        NullSpace(mixture(), rule="owm")
    NullSpace(mixture(), rule="owm", leave=("experts",))


class Listed(nn.Module):
    """Experts as a list of layers: those without tokens do not run."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        rows = x.flatten(0, 1)
        chosen = (rows[:, 0] > 0).long()  # never the third
        return sum(F.pad(self.experts[e](rows[chosen == e]), (0, 0, 0, len(rows)))[: len(rows)] for e in range(2))


def test_listed_experts_without_tokens_do_not_fail():
    torch.manual_seed(0)
    model = Listed().double()
    space = NullSpace(model, rule="gpm")
    space.consolidate([inputs(0)])
    space.consolidate([inputs(1)])
    assert space.decompositions()["experts.2.weight"].protected == 0
    with pytest.raises(UserError, match="does not protect experts"):
        NullSpace(model, rule="owm")


@pytest.mark.parametrize("name", ["Mixtral", "Jamba", "GptOss", "Llama4Text"])
def test_models_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = BUILT[name](transformers).double().eval()
    model.config._experts_implementation = "eager"  # the others know no float64
    space = NullSpace(model, "exact", rank="tolerance:1e-12", layers="all", others="fixed", leave=["lm_head"])
    parts = [p.name for p in space.selection.protections if "experts." in p.name]
    assert len(parts) == 2 * 4 * 2  # two layers of four experts with two matrices each
    old, new = (torch.randint(0, 40, (1, 3), generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    space.consolidate([{"input_ids": old}])
    with torch.no_grad():
        before = model(input_ids=old).logits
    stacked = {
        n: p.detach().clone() for n, p in model.named_parameters() if n.endswith(("up_proj", "experts.down_proj"))
    }
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=1e-3))
    for _ in range(3):
        model(input_ids=new, labels=new).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=old).logits, before, rtol=0, atol=1e-6)
    assert len(stacked) == 4 and not any(torch.equal(model.get_parameter(n), tensor) for n, tensor in stacked.items())


SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "intermediate_size": 24, "use_cache": False}  # fmt: skip
BUILT = {
    "Mixtral": lambda t: t.MixtralForCausalLM(t.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)),
    "Jamba": lambda t: t.JambaForCausalLM(
        t.JambaConfig(**SIZES, num_experts=4, num_experts_per_tok=2, expert_layer_period=1, expert_layer_offset=0,
                      attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=2)
    ),
    "GptOss": lambda t: t.GptOssForCausalLM(
        t.GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    ),
    "Llama4Text": lambda t: t.Llama4ForCausalLM(
        t.Llama4TextConfig(**SIZES, intermediate_size_mlp=24, head_dim=16, num_local_experts=4, num_experts_per_tok=1,
                           interleave_moe_layer_step=1)
    ),
}  # fmt: skip
