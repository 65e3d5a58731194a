"""The kernels that project updates against their plain twin, on the GPU or in Triton's interpreter."""

import inspect
import weakref

import pytest
import torch
from kernels_help import DEVICE, captured, gpu, kernels, poisoned
from test_projected_parts import case, made, projection, random_like
from tolerance import assert_near, rounding

from mambacl.nullspace import Part
from mambacl.nullspace.part_views import MOST_ADDRESSES

HERE = torch.device(DEVICE)


def tensors(shapes, seed):
    return {name: tensor.float().to(HERE) for name, tensor in random_like(shapes, seed).items()}


def one_part(n, size, ranks, *, groups=1, dtype=torch.float32, parts=2, eta=0.9):
    """Some parts of (n, size), each with its own decomposition."""
    names = [f"p{i}" for i in range(parts)]
    uses = [
        (made(size, ranks if groups == 1 else [ranks] * groups, seed)[0], [Part("linear", name, groups=groups)])
        for seed, name in enumerate(names)
    ]
    shapes = {name: torch.Size((n * groups, size)) for name in names}
    return projection(uses, shapes, eta, "none", dtype, HERE), shapes


def use(step, backend):
    for constraint in step.constraints:
        constraint.backend = backend


def projected(step, backend, before, after, **options):
    """The parameters after a projection, and what moved."""
    use(step, backend)
    for constraint in step.constraints:
        constraint.energy.zero_()
    new = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in after.items()}
    with poisoned():
        step.project(before, new, **options)
    return new, step.update_energy()


def assert_twins_agree(step, before, after):
    ours, moved = projected(step, "triton", before, after)
    theirs, expected = projected(step, "plain", before, after)
    for name, tensor in theirs.items():
        assert_near(ours[name], tensor, terms=2**8, what=name)
    for name, sums in expected.items():
        assert_near(moved[name].float(), sums, terms=2**12, what=name)  # squares added in float32


def kernel_calls(monkeypatch):
    from mambacl.nullspace import projected_step_kernels

    seen, run = [], projected_step_kernels.project_
    monkeypatch.setattr(
        projected_step_kernels, "project_", lambda *inputs: (seen.append(inputs[2].shape), run(*inputs))
    )
    return seen


@kernels
@pytest.mark.parametrize("name", ["vim", "vmamba", "mambavision", "Mamba2"])  # together they have every kind
def test_every_kind_of_part_is_projected_alike(name, monkeypatch):
    """Linear maps, rows of them, convolutions of many groups, A from the left, 1-D and 3-D parameters."""
    step, _, shapes, _, _ = case(name, dtype=torch.float32, device=HERE)
    seen = kernel_calls(monkeypatch)
    assert_twins_agree(step, tensors(shapes, 1), tensors(shapes, 2))
    assert len(seen) == sum(constraint.bases.basis.shape[-1] > 0 for constraint in step.constraints)


@kernels
@pytest.mark.parametrize("n, size, rank", [(1, 5, 2), (16, 33, 16), (17, 64, 50), (70, 40, 7), (129, 150, 140)])
@pytest.mark.parametrize("groups", [1, 3])
def test_sizes_that_are_no_multiple_of_a_tile(n, size, rank, groups, monkeypatch):
    step, shapes = one_part(n, size, rank, groups=groups)
    seen = kernel_calls(monkeypatch)
    assert_twins_agree(step, tensors(shapes, 1), tensors(shapes, 2))
    assert seen == [(2 * groups, n, size)]


@kernels
@pytest.mark.parametrize("n, size, ranks", [(70, 160, (66, 76, 130)), (12, 40, (5, 9, 32))])
def test_bases_of_several_widths_in_one_stack(n, size, ranks, monkeypatch):
    """Each is multiplied by its own columns; of a tile that is padding alone nothing is read."""
    names = [f"p{i}" for i in range(len(ranks))]
    uses = [(made(size, rank, seed)[0], [Part("linear", names[seed])]) for seed, rank in enumerate(ranks)]
    shapes = {name: torch.Size((n, size)) for name in names}
    step = projection(uses, shapes, 0.9, "none", torch.float32, HERE)
    (stack,) = [c.bases for c in step.constraints if len(c.bases.widths) > 1]
    assert len(set(stack.widths.flatten().tolist())) > 1 and int(stack.widths.max()) <= stack.basis.shape[-1]
    seen = kernel_calls(monkeypatch)
    assert_twins_agree(step, tensors(shapes, 1), tensors(shapes, 2))
    assert len(seen) == len(step.constraints)


@kernels
def test_a_task_that_changes_ranks_compiles_nothing():
    """A number of columns that were known at compilation would cost two compilations for each shape and task."""
    from mambacl.nullspace.projected_step_kernels import _apply, _inside

    for kernel in (_inside, _apply):
        parameters = inspect.signature(kernel.fn).parameters
        assert parameters["r"].annotation is inspect.Parameter.empty


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bases_in_half_precision(dtype):
    step, shapes = one_part(20, 24, 8, dtype=dtype)
    assert_twins_agree(step, tensors(shapes, 1), tensors(shapes, 2))


@kernels
def test_the_change_that_is_protected_is_gone():
    step, shapes = one_part(24, 40, 30, eta=1.0)
    before, after = tensors(shapes, 1), tensors(shapes, 2)
    new, _ = projected(step, "triton", before, after)
    for part in shapes:
        left = (new[part] - before[part]) @ step.decomposition(part).basis
        assert left.norm() < rounding(40) * (after[part] - before[part]).norm()


@kernels
def test_weights_in_another_layout_are_found(monkeypatch):
    step, shapes = one_part(12, 20, 8)
    before, after = tensors(shapes, 1), tensors(shapes, 2)
    after = {name: tensor.T.contiguous().T for name, tensor in after.items()}
    seen = kernel_calls(monkeypatch)
    assert_twins_agree(step, before, after)
    assert seen


@kernels
@pytest.mark.parametrize("change", ["dtype", "half", "layout of one", "some missing", "nothing protected"])
def test_the_plain_twin_serves_what_the_kernels_do_not(change, monkeypatch):
    step, shapes = one_part(12, 20, 20 if change == "nothing protected" else 8)
    before, after = tensors(shapes, 1), tensors(shapes, 2)
    if change == "dtype":
        before, after = ({name: tensor.double() for name, tensor in table.items()} for table in (before, after))
    elif change == "half":
        before, after = ({name: tensor.bfloat16() for name, tensor in table.items()} for table in (before, after))
    elif change == "layout of one":
        after["p0"] = after["p0"].T.contiguous().T
    elif change == "some missing":
        del before["p0"], after["p0"]
    seen = kernel_calls(monkeypatch)
    assert_twins_agree(step, before, after)
    assert not seen


@kernels
def test_parameters_that_move_are_found_again():
    """Elsewhere, the same memory in another layout, and copies in turn, as a schedule-free optimizer has them."""
    step, shapes = one_part(20, 20, 8)
    before, first, second = (tensors(shapes, seed) for seed in (1, 2, 3))
    use(step, "triton")
    turned = {name: tensor.clone() for name, tensor in first.items()}
    for number, after in enumerate((first, second, first, turned, turned)):
        if number == 4:
            for tensor in turned.values():
                tensor.data = tensor.data.T
        plain = {name: tensor.clone() for name, tensor in after.items()}
        step.project(before, after)
        use(step, "plain")
        step.project(before, plain)
        use(step, "triton")
        for name, tensor in plain.items():
            assert_near(after[name], tensor, terms=2**8, what=f"{name} in step {number}")


@kernels
def test_old_places_are_forgotten_but_those_of_now():
    step, shapes = one_part(4, 6, 2)
    use(step, "triton")
    (parts,) = step.constraints
    kept = [tensors(shapes, seed) for seed in range(MOST_ADDRESSES + 3)]  # alive, so that no address comes twice
    for after in kept:
        step.project(tensors(shapes, 1), after)
    assert len(parts.matrices._addresses) == MOST_ADDRESSES
    assert parts.matrices._of in parts.matrices._addresses


@kernels
def test_places_that_a_recorded_step_reads_are_kept(monkeypatch):
    step, shapes = one_part(4, 6, 2)
    use(step, "triton")
    (parts,) = step.constraints
    kept = [tensors(shapes, seed) for seed in range(MOST_ADDRESSES + 3)]
    places = []
    for number, after in enumerate(kept):
        monkeypatch.setattr("mambacl.nullspace.part_views._recording", lambda _, now=number == 1: now)
        step.project(tensors(shapes, 1), after)
        places.append(weakref.ref(parts.matrices.addresses(after).addresses))
    assert places[0]() is None and places[2]() is None and places[1]() is not None


@kernels
def test_autograd_sees_that_a_parameter_has_changed():
    step, shapes = one_part(4, 6, 2)
    after = tensors(shapes, 2)
    versions = [tensor._version for tensor in after.values()]
    use(step, "triton")
    step.project(tensors(shapes, 1), after)
    assert all(tensor._version > version for tensor, version in zip(after.values(), versions, strict=True))


@kernels
def test_nothing_is_counted_that_shall_not_be():
    step, shapes = one_part(12, 20, 8)
    _, moved = projected(step, "triton", tensors(shapes, 1), tensors(shapes, 2), counted=False)
    assert all(not sums.any() for sums in moved.values())


@kernels
def test_numbers_that_are_none_stay_in_their_rows():
    step, shapes = one_part(12, 20, 8)
    before, after = tensors(shapes, 1), tensors(shapes, 2)
    after["p1"][3, 4] = float("nan")
    new, _ = projected(step, "triton", before, after)
    bad = new["p1"].isnan().any(1)
    assert bad[3] and bad.sum() == 1
    assert not new["p0"].isnan().any()


class TestForReal:
    pytestmark = gpu

    def test_as_exact_as_float32(self):
        """Against float64, at the size of the paper's largest model: the change that is left in protected directions,
        and all of it; no worse than products of float32, whatever PyTorch is allowed."""
        step, shapes = one_part(1024, 2048, 2048 - 208, eta=1.0)
        before = {name: 0.02 * tensor for name, tensor in tensors(shapes, 1).items()}
        after = {name: tensor + 1e-4 * tensors(shapes, 2)[name] for name, tensor in before.items()}
        zero = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
        change = {name: after[name] - before[name] for name in after}
        errors = {}
        for backend in ("triton", "plain"):
            torch.set_float32_matmul_precision("high")
            try:
                new, _ = projected(step, backend, zero, change)
            finally:
                torch.set_float32_matmul_precision("highest")
            for name in shapes:
                V, asked = step.decomposition(name).basis.double(), change[name].double()
                wanted = asked - asked @ V @ V.T
                errors[name, backend] = ((new[name] - wanted).norm() / wanted.norm()).item()
        for name in shapes:
            assert errors[name, "triton"] < 2e-7
            assert errors[name, "triton"] < 1.5 * errors[name, "plain"]

    def test_the_same_bits_each_time_and_in_a_recorded_step(self):
        step, shapes = one_part(300, 384, 384 - 40)
        before, after = tensors(shapes, 1), tensors(shapes, 2)
        first, _ = projected(step, "triton", before, after)
        again, _ = projected(step, "triton", before, after)
        new = {name: tensor.clone() for name, tensor in after.items()}

        def project_again():
            for name, tensor in new.items():
                tensor.copy_(after[name])
            step.project(before, new)
            return list(new.values())

        graph, made_by = captured(project_again)
        graph.replay()
        torch.cuda.synchronize()
        for name, recorded in zip(new, made_by, strict=True):
            assert torch.equal(first[name], again[name]) and torch.equal(first[name], recorded)
