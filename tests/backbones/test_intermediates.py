"""`forward_intermediates` of all four families, against hooks on a plain forward and against timm."""

import pytest
import torch
from backbones_help import DEPTHS, hooked_depths, model_of_depths, split_plainly

from mambacl.backbones.layers import Backbone, chosen_indices
from mambacl.errors import UserError

FAMILIES = list(DEPTHS)
WITH_TOKEN = FAMILIES[:2]
VARIANTS = [(family, {}) for family in FAMILIES] + [
    ("defocus_mamba_nano", {"head_type": "IN1k_avg"}),
    ("defocus_mamba_nano", {"patch_embed_change_res": True}),
    ("defocus_mamba_nano", {"num_classes": 5}),
    ("vim_nano", {"patch_size": 8, "num_classes": 5}),  # patches overlap
    ("vmamba_nano", {"patchembed_version": "v1", "downsample_version": "v1"}),
]


def images(height=32, width=32, count=2):
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return model_of_depths(request.param)


@torch.no_grad()
@pytest.mark.parametrize("family, options", VARIANTS)
@pytest.mark.parametrize("height, width", [(32, 32), (24, 40)])
def test_they_are_what_hooks_see(family, options, height, width):
    model, batch = model_of_depths(family, **options), images(height, width)
    final, pairs = model.forward_intermediates(batch, return_prefix_tokens=True)
    _, tokens = model.forward_intermediates(batch, output_fmt="NLC")
    assert torch.equal(final, model.forward_features(batch))
    expected = hooked_depths(model, batch)
    assert len(pairs) == len(tokens) == len(expected) == len(model.feature_info)
    for pair, row, output, info in zip(pairs, tokens, expected, model.feature_info, strict=True):
        image, prefix = pair if model.num_prefix_tokens else (pair, None)
        class_token, plain = split_plainly(model, output, *image.shape[2:])
        assert torch.equal(image, plain) and image.is_contiguous() and image.shape[1] == info["num_chs"]
        assert torch.equal(row, plain.flatten(2).mT)
        assert (prefix is None) == (class_token is None)
        assert prefix is None or torch.equal(prefix[:, 0], class_token)


@pytest.mark.parametrize("family", FAMILIES)
def test_feature_info_is_true(family):
    """Tokens lie that many pixels apart, and the module exists."""
    model = model_of_depths(family)
    maps = model.forward_intermediates(images(64, 64), intermediates_only=True)
    assert [64 // image.shape[2] for image in maps] == [info["reduction"] for info in model.feature_info]
    assert all(model.get_submodule(info["module"]) is not None for info in model.feature_info)


def test_a_map_has_the_patches_in_their_places():
    """The embedded patches, before any block mixes them, are the convolution's output."""
    model = model_of_depths("defocus_mamba_nano", patch_embed_change_res=True)
    _, image = model.prefix_and_map(model.embed(images(16, 32)), images(16, 32))
    assert torch.equal(image.permute(0, 3, 1, 2), model.patch_embed.proj(images(16, 32)))


@torch.no_grad()
def test_indices(model):
    everything = model.forward_intermediates(images(), intermediates_only=True)
    last = len(everything) - 1
    for indices, places in ((2, [last - 1, last]), ([0, 2], [0, 2]), ([2, 0, 2], [0, 2]), ((-1, 0), [0, last])):
        final, some = model.forward_intermediates(images(), indices)
        assert torch.equal(final, model.forward_features(images())) and len(some) == len(places)
        assert all(torch.equal(one, everything[place]) for one, place in zip(some, places, strict=True))


@torch.no_grad()
def test_stop_early_runs_nothing_deeper(model):
    ran = []
    blocks = [module for name, module in model.named_modules() if name.split(".")[-2:-1] in (["blocks"], ["layers"])]
    hooks = [block.register_forward_hook(lambda *_: ran.append(1)) for block in blocks]
    everything = model.forward_intermediates(images(), intermediates_only=True)
    all_blocks = len(ran)
    ran.clear()
    some = model.forward_intermediates(images(), [0, 1], stop_early=True, intermediates_only=True)
    for hook in hooks:
        hook.remove()
    assert 0 < len(ran) < all_blocks
    assert [torch.equal(one, other) for one, other in zip(some, everything, strict=False)] == [True, True]

    final, _ = model.forward_intermediates(images(), [0], stop_early=True)
    first = hooked_depths(model, images())[0]
    assert torch.equal(final, first if model.hierarchical else model.final_norm(first))


@torch.no_grad()
def test_norm_is_the_last_norm_where_it_fits(model):
    normed = model.forward_intermediates(images(), norm=True, output_fmt="NLC", intermediates_only=True)
    outputs = hooked_depths(model, images())
    grids = [image.shape[2:] for image in model.forward_intermediates(images(), intermediates_only=True)]
    for place, (one, output, grid) in enumerate(zip(normed, outputs, grids, strict=True)):
        fits = not model.hierarchical or place == len(outputs) - 1
        plain = split_plainly(model, model.final_norm(output) if fits else output, *grid)[1]
        assert torch.equal(one, plain.flatten(2).mT)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_are_those_of_a_plain_forward(family, recompute):
    model = model_of_depths(family).double()
    weights = [torch.randn(info["num_chs"], dtype=torch.float64) for info in model.feature_info]

    def gradients(maps):
        model.zero_grad()
        sum(
            (image.mean((2, 3)) @ weight).square().sum() for image, weight in zip(maps, weights, strict=True)
        ).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    grids = [image.shape[2:] for image in model.forward_intermediates(images().double(), intermediates_only=True)]
    hooked = hooked_depths(model, images().double())
    expected = gradients([split_plainly(model, o, *grid)[1] for o, grid in zip(hooked, grids, strict=True)])
    model.set_grad_checkpointing(recompute)
    found = gradients(model.forward_intermediates(images().double(), intermediates_only=True))
    assert len(expected) > 10 and found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max(), name


@pytest.mark.parametrize(
    "options, message",
    [
        ({"indices": 0}, "indices = 0 must be between 1 and"),
        ({"indices": 99}, "indices = 99 must be between 1 and"),
        ({"indices": [0, 9]}, "indices = [0, 9] does not fit a model of"),
        ({"indices": [-9]}, "indices = [-9] does not fit a model of"),
        ({"indices": []}, "indices = [] does not fit a model of"),
        ({"output_fmt": "NHWC"}, "output_fmt must be NCHW or NLC, got 'NHWC'"),
    ],
)
def test_mistakes(model, options, message):
    with pytest.raises(UserError) as caught:
        model.forward_intermediates(images(), **options)
    assert message in str(caught.value)


def test_a_backbone_that_does_not_show_its_depths_says_so():
    class Plain(Backbone):
        pass

    with pytest.raises(UserError, match="Plain cannot show its depths: it sets no feature_info"):
        Plain(4, 8, 1.0).forward_intermediates(images())


def test_chosen_indices():
    assert chosen_indices(3, None) == [0, 1, 2] and chosen_indices(3, 1) == [2] and chosen_indices(3, [-1, 0]) == [0, 2]


@pytest.mark.slow
@torch.no_grad()
def test_arguments_mean_what_they_mean_in_timm():
    """The same calls to timm's ViT and to ours with a class token give outputs of the same shapes; so do timm's
    ConvNeXt and our VMamba."""
    pytest.importorskip("timm")
    from timm.models.convnext import ConvNeXt
    from timm.models.vision_transformer import VisionTransformer

    vit = VisionTransformer(32, 4, embed_dim=16, depth=4, num_heads=2, num_classes=0).eval()
    convnext = ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 16, 32, 64), num_classes=0).eval()
    ours = {family: model_of_depths(family) for family in WITH_TOKEN}
    vmamba = model_of_depths("vmamba_nano", depths=(1, 1, 1, 1))

    def form(result):
        return tuple(result.shape) if isinstance(result, torch.Tensor) else [form(part) for part in result]

    calls = [{"indices": indices} for indices in (None, 1, 2, [0, 2], [2, 0, 0], (-1,))]
    calls += [{"norm": True}, {"intermediates_only": True}, {"indices": [1], "stop_early": True}, {"output_fmt": "NLC"}]
    for call in calls:
        prefix = {"return_prefix_tokens": True}
        for family in WITH_TOKEN:
            for options in (call, {**call, **prefix}):
                expected = form(vit.forward_intermediates(images(), **options))
                assert form(ours[family].forward_intermediates(images(), **options)) == expected, options
        if "output_fmt" not in call:
            expected = convnext.forward_intermediates(images(), **call)
            found = vmamba.forward_intermediates(images(), **call)
            if isinstance(found, tuple):  # VMamba's own features have channels last
                found = (found[0].permute(0, 3, 1, 2), found[1])
            assert form(found) == form(expected), call
    for indices in (0, 5, [4], [-5]):
        with pytest.raises(AssertionError):
            vit.forward_intermediates(images(), indices)
        with pytest.raises(UserError):
            ours["vim_nano"].forward_intermediates(images(), indices)
