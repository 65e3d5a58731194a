"""Decompositions by other rules than the spectrum of all inputs so far: subspaces that grow task by task (GPM), and the
leading singular directions of the weights themselves (OSF)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mambacl.nullspace.blocks import Index
from mambacl.nullspace.memory import Memory
from mambacl.nullspace.projectors import Decomposition, Key, all_decompositions
from mambacl.nullspace.ranks import null_rank
from mambacl.nullspace.selection import Protection
from mambacl.nullspace.settings import Setting, parse_rank
from mambacl.nullspace.shards import whole
from mambacl.nullspace.sharing import failing_together, own, shared_out
from mambacl.nullspace.subspaces import Subspace, complement, descending, dual_grown, nothing

Place = tuple[str, tuple[Index, ...]]  # a weight: its parameter, and which rows of it


def grown_features(
    memory: Memory,
    before: Mapping[Key, Decomposition],
    keys: Sequence[Key],
    setting: Setting,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[Key, Decomposition]:
    """Grows the subspace of each feature. `before`: those of earlier tasks, which grow by the newest task; without
    them, all tasks are gone through in turn. With tasks that were not kept apart, their sum counts as one task. Several
    ranks share the features out."""
    newest = memory.statistics[-1].covariances
    owners = shared_out({key: float(newest[key].numel()) * newest[key].shape[-1] for key in keys})
    with failing_together():
        mine = {key: _grown(key, memory, before, setting, dtype, device) for key in own(owners)}
    shapes = {key: newest[key].shape for key in keys}
    return all_decompositions(mine, owners, shapes, dtype, torch.empty(0, dtype=torch.float64, device=device))


def _grown(
    key: Key,
    memory: Memory,
    before: Mapping[Key, Decomposition],
    setting: Setting,
    dtype: torch.dtype,
    device: torch.device,
) -> Decomposition:
    found, done = before.get(key), len(memory.statistics) - 1 if before else 0
    for number in range(done, len(memory.statistics)):
        newest = memory.statistics[number].covariances[key].to(device)
        task = number if setting.keep_tasks else memory.tasks - 1
        total = newest
        for earlier in memory.statistics[:number]:
            total = total + earlier.covariances[key].to(device)
        share = parse_rank(setting.rank_at(task))[1]
        assert share is not None
        found = _grown_groups(found, newest, total, share, setting.below_at_first, dtype)
    assert found is not None
    return found


def _grown_groups(
    own: Decomposition | None, newest: Tensor, total: Tensor, share: float, below: bool, dtype: torch.dtype
) -> Decomposition:
    size, lead = newest.shape[-1], newest.shape[:-2]
    before = [nothing(size, newest)] * lead.numel() if own is None else _subspaces(own, newest.device)
    spaces, spectra = [], []
    moments = zip(before, newest.reshape(-1, size, size), total.reshape(-1, size, size), strict=True)
    for space, moment, together in moments:
        space = dual_grown(space, moment, share, below_at_first=below)
        spaces.append(space)
        spectra.append(_energies(space, together.double()))
    return _decomposition(spaces, spectra, lead, dtype)


def _subspaces(found: Decomposition, device: torch.device) -> list[Subspace]:
    size, holds_null = found.spectrum.shape[-1], found.holds_null_space.reshape(-1).tolist()
    bases = found.basis.reshape(found.ranks.numel(), size, found.basis.shape[-1]).to(device, torch.float64)
    widths = torch.minimum(found.ranks, size - found.ranks).reshape(-1).tolist()
    return [Subspace(b[:, :w], retain) for b, w, retain in zip(bases, widths, holds_null, strict=True)]


def _energies(space: Subspace, moment: Tensor) -> Tensor:
    """The energy of a moment in protected directions, descending, then in free ones."""
    other = complement(space.basis)
    ordered = (other, space.basis) if space.retain else (space.basis, other)
    return torch.cat([descending(basis.mT @ moment @ basis)[0].clamp(min=0) for basis in ordered])


def _decomposition(
    spaces: Sequence[Subspace], spectra: Sequence[Tensor], lead: torch.Size, dtype: torch.dtype
) -> Decomposition:
    size = len(spaces[0].basis)
    ranks = torch.tensor([size - space.protected for space in spaces]).reshape(lead)
    width = max(space.basis.shape[1] for space in spaces)
    bases = [torch.nn.functional.pad(s.basis.to(dtype), (0, width - s.basis.shape[1])) for s in spaces]
    return Decomposition(
        torch.stack(list(spectra)).cpu().reshape(*lead, size), ranks, torch.stack(bases).reshape(*lead, size, width)
    )


def of_weight(weight: Tensor, rule: str, dtype: torch.dtype) -> tuple[Decomposition, Decomposition]:
    """The leading singular directions of a weight (out, in) as protected ones: of its inputs (right singular vectors)
    and of its outputs (left). The rank rule gets the singular values and says how many are free."""
    U, values, Vh = torch.linalg.svd(weight.double(), full_matrices=True)
    kept = len(values) - null_rank(values, rule)

    def side(vectors: Tensor) -> Decomposition:
        energies = torch.nn.functional.pad(values.square(), (0, len(vectors) - len(values)))
        space = Subspace(vectors[:, :kept]).smaller()
        return _decomposition([space], [energies], torch.Size(), dtype)

    return side(Vh.mT), side(U)


def weight_directions(
    protections: Sequence[Protection], named: Mapping[str, Tensor], rule: str, dtype: torch.dtype
) -> dict[Key, Decomposition]:
    """The directions of each protected weight, on the side on which it is protected. Several ranks share the weights
    out."""
    places = {(p.part.parameter, p.part.index): p.part for p in protections}
    blank = {name: torch.empty(named[name].shape, device="meta") for name, _ in places}
    shapes = {place: part.of(blank[part.parameter]).shape for place, part in places.items()}
    owners = shared_out({place: float(shape.numel()) * max(shape) for place, shape in shapes.items()})
    mine = own(owners)
    done: dict[Place, tuple[Decomposition, Decomposition]] = {}
    failure: Exception | None = None
    for place, part in places.items():
        weight = whole(named[part.parameter].detach())  # all ranks gather it together, also if one has failed
        if place in mine and failure is None:
            try:
                done[place] = of_weight(part.of(weight), rule, dtype)
            except Exception as error:
                failure = error
    with failing_together():
        if failure is not None:
            raise failure
    like = torch.empty(0, dtype=torch.float64, device=next(iter(named.values())).device)
    found: dict[Key, Decomposition] = {}
    for side in (False, True):
        sizes = {place: (shape[0 if side else 1],) * 2 for place, shape in shapes.items()}
        both = all_decompositions({place: done[place][side] for place in mine}, owners, sizes, dtype, like)
        found |= {p.key: both[p.part.parameter, p.part.index] for p in protections if (p.part.side == "left") == side}
    return {p.key: found[p.key] for p in protections}
