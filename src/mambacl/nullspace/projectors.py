"""From a covariance to the projection of an update, eta H + (1 - eta) I with H = U U^T.

U spans the null directions. H is stored as a basis of the smaller of the two spaces: if V spans the others, U U^T =
I - V V^T. Either way the projection is `identity` I + `factor` V V^T for one orthonormal basis V. A convolution with
several groups has one covariance and one basis per group: everything here can have a leading axis of groups.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import cycle, repeat
from typing import TypeVar

import torch
from torch import Tensor, nn

from mambacl import processes
from mambacl.nullspace.blocks import Part, Side
from mambacl.nullspace.ranks import as_spectrum, null_ranks
from mambacl.nullspace.sharing import failing_together, own, passed_round, shared_out

Key = tuple[str, str]  # a block and one of its features
K = TypeVar("K", bound=Hashable)
SMALL = 512  # largest size of covariances that are decomposed in one batch on a GPU
AT_A_TIME = 4  # larger ones decomposed concurrently


@dataclass(frozen=True)
class Projector:
    basis: Tensor  # (D, r) or (groups, D, r): orthonormal columns, padded with zeros
    identity: Tensor | float  # numbers, or (groups, 1, 1)
    factor: Tensor | float

    def apply(self, update: Tensor, side: Side) -> Tensor:
        """P update (left, update (D, n)) or update P (right, update (n, D))."""
        V = self.basis.to(torch.promote_types(self.basis.dtype, torch.float32))
        update = update.to(V.dtype)
        low_rank = V @ (V.mT @ update) if side == "left" else (update @ V) @ V.mT
        return self.identity * update + self.factor * low_rank

    def dense(self) -> Tensor:
        V = self.basis.to(torch.promote_types(self.basis.dtype, torch.float32))
        eye = torch.eye(V.shape[-2], dtype=V.dtype, device=V.device)
        return self.identity * eye + self.factor * (V @ V.mT)


def project_part(before: Tensor, after: Tensor, part: Part, projector: Projector) -> None:
    """Replaces a part's change by its projection, in place: the plain twin of `ProjectedStep.project`."""
    old, place = part.matrix(before), part.of(after)
    projected = old + projector.apply(part.matrix(after) - old, "right")  # `matrix` puts it on the right
    place.copy_(part.restored(projected, place.shape))


@dataclass(frozen=True)
class Decomposition:
    """The descending spectrum of a covariance, the number of null directions, and a basis of the smaller space."""

    spectrum: Tensor  # (D,) or (groups, D)
    ranks: Tensor  # () or (groups,)
    basis: Tensor  # (D, r) or (groups, D, r)

    @property
    def rank(self) -> int:
        """Number of null directions, summed over groups."""
        return int(self.ranks.sum())

    @property
    def protected(self) -> int:
        return self.spectrum.numel() - self.rank

    @property
    def protected_energy(self) -> float:
        """The share of the spectrum's sum in protected directions; 0 for a spectrum of zeros."""
        size, total = self.spectrum.shape[-1], float(self.spectrum.sum())
        leading = torch.arange(size) < (size - self.ranks.cpu())[..., None]
        return float((self.spectrum.cpu() * leading).sum()) / total if total else 0.0

    @cached_property
    def holds_null_space(self) -> Tensor:
        """Whether the stored basis spans the null directions: it does if they are the smaller space."""
        return self.ranks < self.spectrum.shape[-1] - self.ranks

    def projector(self, eta: float, scaling: str) -> Projector:
        ranks = self.ranks.double()
        strength = eta / ranks.clamp(min=1).sqrt() if scaling == "frobenius" else eta + 0 * ranks  # |U U^T| = sqrt(R)
        identity = torch.where(self.holds_null_space, 1 - eta, 1 - eta + strength)
        factor = torch.where(self.holds_null_space, strength, -strength)
        if ranks.dim() == 0:
            return Projector(self.basis, identity.item(), factor.item())
        shape = (-1, 1, 1)
        device = self.basis.device
        return Projector(self.basis, identity.view(shape).to(device), factor.view(shape).to(device))


def basis_dtype(model: nn.Module, storage: str) -> torch.dtype:
    """The dtype of stored bases: float64 for models in float64, otherwise the setting's `storage`."""
    return torch.float64 if next(model.parameters()).dtype == torch.float64 else getattr(torch, storage)


def decompose(
    covariances: Sequence[Tensor],
    rule: str,
    precision: torch.dtype = torch.float64,
    storage: torch.dtype = torch.float64,
    together: bool = False,
) -> list[Decomposition]:
    """Decomposes each covariance by `eigh` in float64. The rank rule gets the spectra in `precision`; bases are stored
    in `storage`."""
    solved = _eigh(covariances)  # ascending: null directions first
    spectra = [as_spectrum(eigenvalues).cpu() for eigenvalues, _ in solved]
    return [
        _chosen(spectrum, counts, vectors, storage)
        for spectrum, counts, (_, vectors) in zip(
            spectra, _ranks(spectra, rule, precision, together), solved, strict=True
        )
    ]


def _ranks(spectra: Sequence[Tensor], rule: str, precision: torch.dtype, together: bool) -> list[list[int]]:
    """The ranks of each spectrum's groups."""
    rows = [spectrum.to(precision).reshape(-1, spectrum.shape[-1]) for spectrum in spectra]
    found = iter(null_ranks([row for some in rows for row in some], rule, together))
    return [[next(found) for _ in some] for some in rows]


def decompose_features(
    keys: Sequence[Key],
    covariance: Callable[[Key], Tensor],
    sizes: Callable[[Key], torch.Size],
    rule: str,
    precision: torch.dtype,
    storage: torch.dtype,
    together: bool,
    device: torch.device | None = None,
) -> dict[Key, Decomposition]:
    """Decomposes each feature's covariance. Covariances are loaded when needed, because they can be large and on disk.
    With `together`, the rank rule is applied to the spectra of a feature in all blocks at once. Several ranks share the
    matrices out, and pass the results round; `device`: where they exchange tensors."""
    shapes = {key: sizes(key) for key in keys}
    like = torch.empty(0, dtype=torch.float64, device=device)
    labels: dict[str, list[Key]] = {}
    for key in keys:
        labels.setdefault(key[1] if together else "", []).append(key)
    found: dict[Key, Decomposition] = {}
    for some in labels.values():
        owners = shared_out({key: float(shapes[key][:-2].numel()) * shapes[key][-1] ** 3 for key in some})
        mine: dict[Key, Decomposition] = {}
        if together:
            with failing_together():
                solved = dict(zip(own(owners), _eigh([covariance(key) for key in own(owners)]), strict=True))
            spectra = {key: as_spectrum(values) for key, (values, _) in solved.items()}
            spectra = passed_round(spectra, owners, {key: shapes[key][:-1] for key in some}, like)
            counts = dict(zip(some, _ranks([spectra[key].cpu() for key in some], rule, precision, True), strict=True))
            mine = {key: _chosen(spectra[key].cpu(), counts[key], solved[key][1], storage) for key in own(owners)}
        else:
            with failing_together():
                for batch in _batches({key: shapes[key] for key in own(owners)}):
                    parts = decompose([covariance(key) for key in batch], rule, precision, storage)
                    mine |= zip(batch, parts, strict=True)
        found |= all_decompositions(mine, owners, shapes, storage, like)
    return found if together else {key: found[key] for key in keys}


def _batches(shapes: Mapping[Key, torch.Size]) -> Iterable[list[Key]]:
    """Small matrices of one shape in one batch, large ones a few at a time."""
    batches: dict[object, list[Key]] = {}
    for number, (key, shape) in enumerate(shapes.items()):
        batches.setdefault(shape if shape[-1] <= SMALL else number // AT_A_TIME, []).append(key)
    return batches.values()


def all_decompositions(
    mine: Mapping[K, Decomposition],
    owners: Mapping[K, int],
    shapes: Mapping[K, Sequence[int]],
    storage: torch.dtype,
    like: Tensor,
) -> dict[K, Decomposition]:
    """The decompositions of all ranks, with the same bits on each. `shapes`: of the covariances; `like`: float64, on
    the device on which ranks exchange tensors."""
    if processes.count() == 1:
        return dict(mine)
    leads = {key: tuple(shape[:-2]) for key, shape in shapes.items()}
    numbers, bases = like.to(torch.int64), like.to(storage)
    spectra = passed_round({key: own.spectrum for key, own in mine.items()}, owners,
                           {key: (*leads[key], shapes[key][-1]) for key in owners}, like)  # fmt: skip
    counts = passed_round({key: own.ranks for key, own in mine.items()}, owners, leads, numbers)
    widths = {key: int(torch.minimum(n, shapes[key][-1] - n).max()) for key, n in counts.items()}
    basis = passed_round({key: own.basis for key, own in mine.items()}, owners,
                         {key: (*leads[key], shapes[key][-1], widths[key]) for key in owners}, bases)  # fmt: skip
    return {key: Decomposition(spectra[key].cpu(), counts[key].cpu(), basis[key]) for key in owners}


def _eigh(covariances: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Small matrices of one shape are solved in one batch, because launching each takes longer than solving it. Large
    ones run on several streams of a GPU."""
    if not covariances:
        return []
    first = covariances[0]
    if first.is_cuda and first.shape[-1] <= SMALL and all(c.shape == first.shape for c in covariances):
        values, vectors = torch.linalg.eigh(torch.stack([c.double() for c in covariances]))
        return list(zip(values.unbind(0), vectors.unbind(0), strict=True))
    if first.is_cuda and len(covariances) > 1:
        torch.linalg.eigh(torch.ones(1, 1, dtype=torch.float64, device=first.device))  # threads cannot load the solver
        main = torch.cuda.current_stream(first.device)  # read here: each thread has its own current stream
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            return list(threads.map(_eigh_on, covariances, cycle(_streams(first.device)), repeat(main)))
    return [torch.linalg.eigh(covariance.double()) for covariance in covariances]


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Cached, because PyTorch's allocator keeps memory per stream."""
    return [torch.cuda.Stream(device) for _ in range(AT_A_TIME)]


def _eigh_on(covariance: Tensor, stream: torch.cuda.Stream, main: torch.cuda.Stream) -> tuple[Tensor, Tensor]:
    """`eigh` on a given stream; a single decomposition leaves most of a GPU idle."""
    stream.wait_stream(main)
    with torch.cuda.stream(stream):
        values, vectors = torch.linalg.eigh(covariance.double())
    stream.synchronize()
    for tensor in (values, vectors):
        tensor.record_stream(main)
    return values, vectors


def _chosen(spectrum: Tensor, ranks: list[int], vectors: Tensor, storage: torch.dtype) -> Decomposition:
    size = spectrum.shape[-1]
    counts = torch.tensor(ranks).reshape(spectrum.shape[:-1])
    kept = torch.minimum(counts, size - counts)
    width = int(kept.max())
    bases = []
    for rank, group in zip(ranks, vectors.reshape(-1, size, size), strict=True):
        own = group[:, :rank] if rank < size - rank else group[:, rank:]
        bases.append(torch.nn.functional.pad(own.to(storage), (0, width - own.shape[1])))
    return Decomposition(spectrum, counts, torch.stack(bases).reshape(*vectors.shape[:-1], width))


def dense_projector(covariance: Tensor, rank: int, eta: float, scaling: str) -> Tensor:
    """The textbook twin of `Projector`: the dense matrix by SVD, as in the paper."""
    U, _, _ = torch.linalg.svd(covariance.double())
    null = U[:, U.shape[1] - rank :]
    H = null @ null.T
    if scaling == "frobenius" and rank > 0:
        H = H / torch.linalg.norm(H)
    return eta * H + (1 - eta) * torch.eye(len(H), dtype=H.dtype, device=H.device)
