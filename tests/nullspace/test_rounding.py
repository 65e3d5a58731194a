"""What projectors in half precision let through: the formulas against rounded matrices, and against a model."""

import pytest
import torch
from block_models import build, output

from mambacl.nullspace import NullSpace
from mambacl.nullspace.projectors import Decomposition
from mambacl.nullspace.rounding import in_words, let_through, rounding_share

HALF = [torch.bfloat16, torch.float16]
SIZE = 256


def orthonormal(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64))[0]


@pytest.mark.parametrize("dtype", HALF)
def test_the_share_is_that_of_rounded_values(dtype):
    """65,536 values, whose sizes are spread unevenly between powers of two: hence the tolerance."""
    values = orthonormal(0)
    error = (values.to(dtype).double() - values).norm() / values.norm()
    assert float(error) == pytest.approx(rounding_share(dtype), rel=0.05)
    assert rounding_share(torch.bfloat16) == 8 * rounding_share(torch.float16) == pytest.approx(1.66e-3, rel=0.01)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("protected", [0.1, 0.25, 0.45, 0.55, 0.75, 0.9])
def test_what_is_let_through_is_that_of_rounded_projectors(dtype, protected):
    """Updates without a direction of their own: rows of random numbers."""
    basis, rank = orthonormal(1), SIZE - round(protected * SIZE)
    null, others = basis[:, :rank], basis[:, rank:]
    kept = null if rank < SIZE - rank else others
    stored = Decomposition(torch.arange(SIZE, 0, -1.0), torch.tensor(rank), kept.to(dtype))
    update = torch.randn(1000, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    projector = stored.projector(eta=1.0, scaling="none")
    left = (
        projector.identity * update + projector.factor * (update @ kept.to(dtype).double()) @ kept.to(dtype).double().T
    )
    share = (left @ others).norm() / (update @ others).norm()
    assert float(share) == pytest.approx(let_through(dtype, len(others.T) / SIZE), rel=0.1)


def moved(storage):
    """The largest relative change of a block's output on old inputs, after 60 steps; None: without protection."""
    model, inputs, _ = build("defocus")
    space = NullSpace(model, "exact", **({"storage": storage} if storage else {}))
    if storage is None:
        space = NullSpace(model, space.setting.without_projection())
    old, found = inputs(0), []
    space.consolidate([old])
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=1e-3))
    for block in space.selection.blocks:
        block.module.register_forward_hook(lambda _, __, y: found.append(y.detach()))
    with torch.no_grad():
        model(old)
    before, wanted = found[:], torch.randn(4, model.num_features, generator=torch.Generator().manual_seed(3))
    for step in range(60):
        loss = (output(model, inputs(1000 + step, 4)) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found.clear()
    with torch.no_grad():
        model(old)
    return max(float((now - then).norm() / then.norm()) for now, then in zip(found, before, strict=True))


def test_a_model_drifts_by_that_share_of_its_unprotected_drift():
    """Within a factor of two: real updates and features have directions of their own."""
    free = moved(None)
    assert free > 0.05
    for dtype in HALF:
        share = moved(str(dtype).removeprefix("torch.")) / free
        assert rounding_share(dtype) / 2 < share < rounding_share(dtype) * 2, dtype
    assert moved("float32") / free < 0.2 * rounding_share(torch.float16)


def test_a_run_says_so_at_its_start(tiny_model):
    words = "storage bfloat16 (rounding lets about 0.17% of the unprotected movement through)"
    assert words in NullSpace(tiny_model(), storage="bfloat16").describe().split("\n")[0]
    assert "0.02% of" in NullSpace(tiny_model(), storage="float16").describe()
    assert "rounding" not in NullSpace(tiny_model()).describe() and in_words("float64") == ""
