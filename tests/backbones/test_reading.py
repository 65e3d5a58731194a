"""Features of several depths for a classifier, against a plain reading with hooks."""

import re
import weakref
from pathlib import Path

import pytest
import torch
from backbones_help import DEPTHS, hooked_depths, model_of_depths, on_meta, split_plainly
from tolerance import assert_near
from torch import nn

from mambacl.backbones.reading import FeatureReader, chosen_depths, pooled
from mambacl.errors import UserError

FAMILIES = list(DEPTHS)
VARIANTS = [(family, {}) for family in FAMILIES]
VARIANTS += [
    ("defocus_mamba_nano", {"head_type": "IN1k_avg"}),
    ("defocus_mamba_nano", {"patch_embed_change_res": True}),
]


def images(count=2, height=32, width=32):
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))


def read_plainly(model, batch, indices):
    """Token by token from hooks: class token and mean of the patches of each depth, then the model's output."""
    maps = model.forward_intermediates(batch, intermediates_only=True)
    outputs, parts = hooked_depths(model, batch), []
    for index in indices:
        parts += pooled_plainly(*split_plainly(model, outputs[index], *maps[index].shape[2:]), ("class", "mean"))
    return torch.cat([*parts, model(batch)], dim=1)


def pooled_plainly(class_token, image, pool):
    """What `pool` names, place by place, from a map (b, c, h, w). The quadrants of an odd map share its middle."""
    height, width = image.shape[2:]
    places = [(r, c) for r in range(height) for c in range(width)]

    def mean(chosen):
        return sum(image[:, :, r, c] for r, c in chosen) / len(chosen)

    halves = [(range(-(-size // 2)), range(size // 2, size)) for size in (height, width)]
    parts = []
    for name in pool:
        if name == "class":
            parts += [] if class_token is None else [class_token]
        elif name == "mean":
            parts.append(mean(places))
        elif name == "std":
            centre = mean(places)
            squares = sum((image[:, :, r, c] - centre).square() for r, c in places)
            parts.append((squares / len(places)).sqrt())
        else:
            parts += [mean([(r, c) for r in rows for c in columns]) for rows in halves[0] for columns in halves[1]]
    return parts


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return model_of_depths(request.param)


@torch.no_grad()
@pytest.mark.parametrize("family, options", VARIANTS)
@pytest.mark.parametrize("depths", ["all", 2, [0, -1], "final"])
def test_it_reads_what_hooks_see(family, options, depths):
    model = model_of_depths(family, **options)
    count = len(model.feature_info)
    places = {"all": range(count), "2": (-(-count // 2) - 1, count - 1), "[0, -1]": (0, count - 1), "final": ()}
    reader, batch = FeatureReader(model, depths), images(height=24, width=40)
    features, expected = reader(batch), read_plainly(model, batch, places[str(depths)])
    assert features.shape == (2, reader.num_features) and features.dtype == torch.float32
    assert_near(features, expected, terms=64)
    assert torch.equal(features[:, -model.num_features :], model(batch))  # the model's own feature, bit for bit


@torch.no_grad()
@pytest.mark.parametrize("pool", ["std", "quadrants", "quadrants class", "class mean std quadrants"])
def test_every_pool_is_that_of_a_plain_reading(model, pool):
    """In the order of their names, for even and odd maps."""
    odd, even, pool = 0, 0, pool.split()
    for height, width in ((24, 40), (36, 20)):
        batch, reader, parts = images(height=height, width=width), FeatureReader(model, "all", pool), []
        maps = model.forward_intermediates(batch, intermediates_only=True)
        for output, shown in zip(hooked_depths(model, batch), maps, strict=True):
            size = shown.shape[2:]
            odd, even = odd + any(side % 2 for side in size), even + any(side % 2 == 0 for side in size)
            parts += pooled_plainly(*split_plainly(model, output, *size), pool)
        features = reader(batch)
        assert features.shape == (2, reader.num_features)
        assert_near(features, torch.cat([*parts, model(batch)], dim=1), terms=64)
    assert odd and even


def test_wrong_pools(model):
    for pool in ([], ["max"], ["mean", "max"]):
        with pytest.raises(UserError, match="pool must be a list of class, mean, std, quadrants, got"):
            FeatureReader(model, "all", pool)


def test_how_many_values_nano_has():
    nano = on_meta("defocus_mamba_nano", num_classes=0)
    assert FeatureReader(nano, "all").num_features == 12 * 2 * 192 + 192 == 4800
    assert FeatureReader(nano, 4).num_features == 4 * 2 * 192 + 192 == 1728
    assert FeatureReader(nano).num_features == 192
    assert FeatureReader(nano, 4)(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 1728)


def test_chosen_depths():
    assert (
        chosen_depths(4, 12) == [2, 5, 8, 11] and chosen_depths(1, 12) == [11] and chosen_depths(12, 12) == [*range(12)]
    )
    assert chosen_depths(4, 6) == [1, 2, 4, 5] and chosen_depths(5, 7) == [1, 2, 4, 5, 6]
    assert chosen_depths(4, 3) == [0, 1, 2] == chosen_depths("all", 3)  # all, if there are fewer
    assert chosen_depths([2, 5], 12) == [2, 5] and chosen_depths((-1, 3), 12) == [3, 11]
    assert chosen_depths("final", 12) == []
    for n in range(1, 30):
        chosen = chosen_depths(n, 29)
        gaps = {after - before for before, after in zip([-1, *chosen], chosen, strict=False)}
        assert len(chosen) == n and chosen[-1] == 28 and max(gaps) - min(gaps) <= 1  # evenly spaced


@torch.no_grad()
def test_an_images_features_do_not_depend_on_the_batch(model):
    reader = FeatureReader(model, "all")
    assert_near(reader(images(5)), torch.cat([reader(image[None]) for image in images(5)]), terms=2**12)


@torch.no_grad()
def test_half_precision_gives_float32(model):
    reader = FeatureReader(model, "all")
    with torch.autocast("cpu", torch.bfloat16):
        features, final = reader(images()), model(images())
    assert features.dtype == torch.float32
    assert torch.equal(features[:, -model.num_features :], final.float())
    exact = reader(images())
    assert not torch.equal(features, exact)
    # Each of the up to six blocks rounds its products once or more.
    assert_near(features.bfloat16(), exact, terms=2**8)


def test_double_stays_double(model):
    family = next(f for f in FAMILIES if type(model_of_depths(f)) is type(model))
    reader = FeatureReader(model_of_depths(family).double(), "all")
    assert reader(images().double()).dtype == torch.float64


@torch.no_grad()
@pytest.mark.parametrize("depths", ["final", "all"])
def test_a_head_is_ignored(depths):
    for family in FAMILIES:
        bare = model_of_depths(family)
        model = model_of_depths(family, num_classes=7)
        model.load_state_dict(bare.state_dict(), strict=False)
        reader = FeatureReader(model, depths)
        assert reader(images()).shape == (2, reader.num_features)
        assert torch.equal(reader(images()), FeatureReader(bare, depths)(images()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_are_those_of_a_plain_reading(family, recompute):
    model, batch = model_of_depths(family).double(), images().double()
    reader = FeatureReader(model, "all")
    weight = torch.randn(reader.num_features, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def gradients(features):
        model.zero_grad()
        (features @ weight).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = gradients(read_plainly(model, batch, range(len(model.feature_info))))
    model.set_grad_checkpointing(recompute)
    for name, gradient in gradients(reader(batch)).items():
        assert (gradient - expected[name]).abs().max() <= 1e-11 * expected[name].abs().max(), name


@torch.no_grad()
def test_tokens_of_earlier_depths_are_let_go(model):
    """When a depth is read, no tensor refers to the tokens of the depths before."""
    alive, most = weakref.WeakSet(), []
    split = model.prefix_and_map

    def watched(x, batch):
        alive.add(x)
        most.append(len(alive))
        return split(x, batch)

    model.prefix_and_map = watched
    try:
        FeatureReader(model, "all")(images())
    finally:
        del model.prefix_and_map
    assert len(most) == len(model.feature_info) and max(most) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_pooled_holds_no_tokens(dtype):
    tokens = torch.randn(2, 17, 8).to(dtype)
    for parts in ((tokens[:, -1:], tokens[:, :-1].unflatten(1, (4, 4))), (None, tokens.unsqueeze(1))):
        row = pooled(*parts)
        assert row.dtype == torch.float32 and row.untyped_storage().nbytes() == 4 * row.numel()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@torch.no_grad()
def test_a_cuda_graph_replays_it(model):
    """Recording fails if anything waits for the GPU."""
    reader, batch, graph = FeatureReader(model.cuda(), "all"), images().cuda(), torch.cuda.CUDAGraph()
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        for _ in range(3):  # compiles the kernels
            reader(batch)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            features = reader(batch)
        other = images(height=64)[:, :, 32:].cuda()
        expected = reader(other)
    batch.copy_(other)
    graph.replay()
    model.cpu()
    assert_near(features.bfloat16(), expected, terms=2**8)


@pytest.mark.slow
@torch.no_grad()
def test_it_compiles_without_a_break(model):
    reader = FeatureReader(model, "all")
    compiled = torch.compile(reader.__call__, backend="aot_eager", fullgraph=True)
    assert_near(compiled(images()), reader(images()), terms=2**10)


@pytest.mark.parametrize(
    "depths, message",
    [
        ("last", "depths must be final, all, a positive number or a list of indices, got 'last'."),
        (0, "depths must be final, all, a positive number or a list of indices, got 0."),
        ([4], "depths = [4] does not fit a model of 4 depths: list some of 0 to 3."),
        ([], "depths = [] does not fit a model of 4 depths"),
        ([1.5], "depths = [1.5] does not fit a model of 4 depths"),
    ],
)
def test_mistakes(depths, message):
    with pytest.raises(UserError) as caught:
        FeatureReader(model_of_depths("vim_nano"), depths)
    assert message in str(caught.value)


def test_any_module_is_read_at_its_output():
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    with pytest.raises(UserError, match="Sequential has no num_features: set it to the width of its output"):
        FeatureReader(module)
    module.num_features = 5
    reader, batch = FeatureReader(module), images(height=2, width=2)
    assert reader.num_features == 5 and torch.equal(reader(batch), module(batch))
    assert reader.model.bfloat16() and reader(batch.bfloat16()).dtype == torch.float32
    with pytest.raises(UserError) as caught:
        FeatureReader(module, 4)
    assert "depths = 4 needs: choose depths = 'final'" in str(caught.value)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("classes", [0, 3])
def test_timms_models_are_read_too(classes):
    pytest.importorskip("timm")
    from timm.models.convnext import ConvNeXt
    from timm.models.vision_transformer import VisionTransformer

    vit = VisionTransformer(32, 8, embed_dim=16, depth=4, num_heads=2, num_classes=classes).eval()
    convnext = ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 16, 32, 64), num_classes=classes).eval()
    for model, width in ((vit, 4 * 2 * 16 + 16), (convnext, 8 + 16 + 32 + 64 + 64)):
        features = FeatureReader(model, "all")(images())
        final = model.forward_head(model.forward_features(images()), pre_logits=True)
        assert features.shape == (2, width) == (2, FeatureReader(model, "all").num_features)
        assert torch.equal(features[:, -final.shape[1] :], final)
        assert torch.equal(FeatureReader(model)(images()), final)
    outputs = []
    hook = vit.blocks[1].register_forward_hook(lambda _, __, output: outputs.append(output))
    vit(images())
    hook.remove()
    tokens = FeatureReader(vit, [1])(images())
    assert_near(tokens[:, :32], torch.cat((outputs[0][:, 0], outputs[0][:, 1:].mean(1)), dim=1), terms=16)


@torch.no_grad()
def test_the_pages_code_runs():
    page = Path(__file__).parents[2] / "docs" / "backbones.md"
    names = {"images": images()}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        exec(code, names)
    assert names["features"].shape == (2, 1728) and [tuple(m.shape) for m in names["maps"]] == [(2, 192, 8, 8)] * 2
