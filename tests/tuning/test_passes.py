"""Changes of a backbone's blocks: none leaves the model's numbers, each does what its definition says."""

import pytest
import torch
import torch.nn.functional as F
from small_run import VIT
from tolerance import assert_near
from torch import nn

from mambacl.backbones import create_model
from mambacl.errors import UserError
from mambacl.tuning.passes import Change, Tokens, check_length, checked_blocks, run_blocks, with_affine, with_attention
from mambacl.tuning.query import frozen_query

SIZES = {
    "vit": VIT["backbone_options"],
    "defocus_mamba_nano": {"embed_dim": 16, "depth": 2, "mamba": {"intermediate_size": 64, "time_step_rank": 4}},
    "vim_nano": {"embed_dim": 16, "depth": 2},
}


def small(family="vit"):
    torch.manual_seed(0)
    model = create_model(family, num_classes=0, pretrained=False, **SIZES[family]).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model.double()


def images(count=3, size=16):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def some(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("family", SIZES)
def test_without_changes_it_is_the_model_bit_for_bit(family):
    model = small(family)
    names = list(model.state_dict())
    output = run_blocks(model, images())
    assert torch.equal(output.feature(), model(images()))
    assert torch.equal(output.norm(output.tokens), model.forward_features(images()))
    assert torch.equal(frozen_query(model, images()), model(images()))
    assert not torch.equal(frozen_query(model, images(), normed=False), model(images()))
    assert list(model.state_dict()) == names


def test_a_change_that_changes_nothing_gives_the_models_numbers():
    """Through our own block: the same operations in the same order."""
    model = small()

    def same(block):
        return Change(
            attention=lambda x, h, y: y,
            mlp=lambda x, h, y: y,
            qkv=lambda h, y: y,
            norm1=with_affine(model.norm, model.blocks[block.index].norm1.weight, model.blocks[block.index].norm1.bias),
        )

    assert_near(run_blocks(model, images(), same).feature(), model(images()), terms=2**12)


def plain_attention(q, k, v):
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v


def test_a_prefix_joins_keys_and_values():
    """Against attention written out: more keys and values, the same queries."""
    model, prefix = small(), some(3, 2, 4, 2, 8)
    seen = {}

    def attend(q, k, v):
        seen["lengths"] = q.shape[2], k.shape[2], v.shape[2]
        return plain_attention(q, k, v)

    def by_hand(block):
        if block.index != 1:
            return None

        def longer(q, k, v):
            keys, values = prefix.permute(1, 0, 3, 2, 4)  # (b, heads, n, d)
            return plain_attention(q, torch.cat((keys, k), 2), torch.cat((values, v), 2))

        return Change(attend=longer)

    found = run_blocks(model, images(), lambda b: Change(prefix=prefix, attend=attend) if b.index == 1 else None)
    assert seen["lengths"] == (17, 21, 21) and found.tokens.shape[1] == 17
    assert_near(found.tokens, run_blocks(model, images(), by_hand).tokens, terms=2**12)
    fused = run_blocks(model, images(), lambda b: Change(prefix=prefix) if b.index == 1 else None)
    assert_near(found.tokens, fused.tokens, terms=2**12)
    shared = run_blocks(model, images(), lambda b: Change(prefix=prefix[:1]) if b.index == 1 else None)
    assert torch.equal(shared.feature()[0], fused.feature()[0])
    assert not torch.allclose(shared.feature()[1], fused.feature()[1])


@pytest.mark.parametrize("at, place", [(0, 5), (1, 0), ("end", 0), (7, 0)])
@pytest.mark.parametrize("kept", ["always", "block", "attention"])
def test_tokens_join_and_leave(at, place, kept):
    model, values = small(), some(3, 5, 16)
    inputs = {}

    def change(block):
        inputs[block.index] = block
        return Change(tokens=Tokens(values, at, kept)) if block.index == 2 else None

    output = run_blocks(model, images(), change)
    assert output.tokens.shape[1] == 17 + 5 * (kept == "always")
    assert output.class_at == (place if kept == "always" else 0)
    before, block = inputs[2].tokens, model.blocks[2]
    cut = 17 if at == "end" else at
    joined = torch.cat((before[:, :cut], values, before[:, cut:]), 1)
    rest = [i for i in range(22) if not cut <= i < cut + 5]
    if kept == "attention":
        y = block.attn(block.norm1(joined))[:, rest]
        expected = before + y
        expected = expected + block.mlp(block.norm2(expected))
    else:
        expected = block(joined)
        expected = expected[:, rest] if kept == "block" else expected
    assert_near(inputs[3].tokens, expected, terms=2**10)
    assert torch.equal(inputs[3].class_token, inputs[3].tokens[:, output.class_at])


@pytest.mark.parametrize("family, at", [("defocus_mamba_nano", 0), ("vim_nano", "ends")])
@pytest.mark.parametrize("count", [3, 4])
def test_tokens_on_a_mamba_backbone(family, at, count):
    """The model's own pooling still finds the class token, and the prompts matter."""
    model, values = small(family), some(1, count, 16)
    output = run_blocks(model, images(size=32), lambda b: Change(tokens=Tokens(values, at)) if b.index == 0 else None)
    assert output.tokens.shape[1] == 65 + count
    pooled = model.forward_head(model.final_norm(output.tokens), pre_logits=True)
    assert torch.equal(output.feature(), pooled)
    assert not torch.allclose(output.feature(), model(images(size=32)))
    dropped = run_blocks(model, images(size=32), lambda b: Change(tokens=Tokens(values, at, "block")))
    assert dropped.tokens.shape[1] == 65


def test_branches_see_the_tokens_before_and_after_the_norm():
    model, layer = small(), nn.Linear(16, 16).double()

    def change(block):
        return Change(attention=lambda x, h, y: y + layer(h), mlp=lambda x, h, y: y + layer(x))

    x = model.embed(images())
    for block in model.blocks:
        h = block.norm1(x)
        x = x + block.attn(h) + layer(h)
        x = x + block.mlp(block.norm2(x)) + layer(x)
    assert_near(run_blocks(model, images(), change).tokens, x, terms=2**12)


def test_other_affine_parameters_of_a_norm():
    """One set for all images, or one per image."""
    model = small()
    weight, bias = some(3, 16), some(3, 16, seed=2)
    each = run_blocks(
        model, images(), lambda b: Change(norm2=with_affine(model.blocks[b.index].norm2, weight, bias)),
        norm=with_affine(model.norm, weight, bias),
    ).feature()  # fmt: skip
    for i in range(3):

        def change(block, i=i):
            return Change(norm2=with_affine(model.blocks[block.index].norm2, weight[i], bias[i]))

        alone = run_blocks(model, images()[i : i + 1], change, norm=with_affine(model.norm, weight[i], bias[i]))
        assert_near(each[i : i + 1], alone.feature(), terms=2**12)
    normed = F.layer_norm(images()[:, 0], (16,), weight[0], bias[0], 1e-6)
    assert torch.equal(with_affine(model.norm, weight[0], bias[0])(images()[:, 0]), normed)


def test_checkpointing_changes_no_gradient():
    model, gradients = small(), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        prefix = some(1, 2, 4, 2, 8).requires_grad_()
        run_blocks(model, images(), lambda b, p=prefix: Change(prefix=p)).feature().square().sum().backward()
        gradients.append(prefix.grad)
    assert torch.equal(*gradients)


def test_what_does_not_fit_is_refused():
    vit, mamba, stages = small(), small("vim_nano"), create_model("vmamba_nano", num_classes=0)
    with pytest.raises(UserError, match=r"'dualprompt' changes attention.*Vim has none.*--backbone vit_nano"):
        with_attention(mamba, "dualprompt")
    with pytest.raises(UserError, match="changes attention"):
        run_blocks(mamba, images(size=32), lambda b: Change(prefix=some(1, 2, 4, 2, 8)))
    with pytest.raises(UserError, match="one sequence of tokens and a class token, which VMamba"):
        run_blocks(stages, images(size=32).float())
    assert checked_blocks(vit, [2, 0], "blocks") == [0, 2]
    for blocks in ([], [6], [-1], [1, 1]):
        with pytest.raises(UserError, match="0 to 5, once each"):
            checked_blocks(vit, blocks, "blocks")
    check_length(vit, 68, "length")
    with pytest.raises(
        UserError, match="length: 69 prompt tokens are too many for a model of 17 tokens: choose 1 to 68"
    ):
        check_length(vit, 69, "length")
