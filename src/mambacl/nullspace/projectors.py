"""From a covariance to the projection of an update, eta H + (1 - eta) I with H = U U^T.

U spans the null directions. H is kept by the smaller of the two spaces: with V spanning the others, U U^T = I - V
V^T. Either way the projection is `identity` I + `factor` V V^T for one orthonormal basis V. A convolution of several
groups has a covariance, and so a basis, for each of them: everything here may have a leading axis of groups.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import cycle, repeat

import torch
from torch import Tensor, nn

from mambacl.nullspace.blocks import Part, Side
from mambacl.nullspace.ranks import as_spectrum, null_ranks

Key = tuple[str, str]  # a block, and a feature of it
SMALL = 512  # values of a feature up to which covariances are decomposed together on a GPU
AT_A_TIME = 4  # larger ones


@dataclass(frozen=True)
class Projector:
    basis: Tensor  # (D, r) or (groups, D, r): orthonormal columns, and zeros where a group has fewer of them
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
    """Replaces a part's change, in place, by its projection: the plain twin of `ProjectedStep.project`."""
    old, place = part.matrix(before), part.of(after)
    projected = old + projector.apply(part.matrix(after) - old, "right")  # as matrices, every part has it on the right
    place.copy_(part.restored(projected, place.shape))


@dataclass(frozen=True)
class Decomposition:
    """The spectrum of a covariance, descending, the number of null directions, and the basis of the smaller space."""

    spectrum: Tensor  # (D,) or (groups, D)
    ranks: Tensor  # () or (groups,)
    basis: Tensor  # (D, r) or (groups, D, r)

    @property
    def rank(self) -> int:
        """Null directions; of several groups, the sum."""
        return int(self.ranks.sum())

    @property
    def protected(self) -> int:
        return self.spectrum.numel() - self.rank

    @cached_property
    def holds_null_space(self) -> Tensor:
        return holds_null_space(self.ranks, self.spectrum.shape[-1])

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
    """In which bases are kept: models in float64 keep them so."""
    return torch.float64 if next(model.parameters()).dtype == torch.float64 else getattr(torch, storage)


def holds_null_space(ranks: Tensor, size: int) -> Tensor:
    """Whether the kept basis spans the null directions rather than the others: the fewer of them."""
    return ranks < size - ranks


def decompose(
    covariances: Sequence[Tensor],
    rule: str,
    precision: torch.dtype = torch.float64,
    storage: torch.dtype = torch.float64,
    together: bool = False,
) -> list[Decomposition]:
    """`eigh` in float64 of each covariance, and the ranks by the rule, which sees the spectra in the precision given;
    bases in that of the storage."""
    solved = _eigh(covariances)  # ascending: null directions first
    spectra = [as_spectrum(eigenvalues).cpu() for eigenvalues, _ in solved]
    single = [row for spectrum in spectra for row in spectrum.to(precision).reshape(-1, spectrum.shape[-1])]
    ranks = iter(null_ranks(single, rule, together))
    return [
        _chosen(spectrum, [next(ranks) for _ in spectrum.reshape(-1, spectrum.shape[-1])], vectors, storage)
        for spectrum, (_, vectors) in zip(spectra, solved, strict=True)
    ]


def decompose_features(
    keys: Sequence[Key],
    covariance: Callable[[Key], Tensor],
    sizes: Callable[[Key], torch.Size],
    rule: str,
    precision: torch.dtype,
    storage: torch.dtype,
    together: bool,
) -> dict[Key, Decomposition]:
    """The decomposition of each feature's covariance. They are asked for when their turn comes, as they may be large
    and on disk. With `together`, the rule sees the spectra of a feature in all blocks at once."""
    batches: dict[object, list[Key]] = {}
    for number, key in enumerate(keys):
        shape = sizes(key)  # small ones of a shape at once, large ones a few at a time
        one_by_one = shape if shape[-1] <= SMALL else number // AT_A_TIME
        batches.setdefault(key[1] if together else one_by_one, []).append(key)
    found: dict[Key, Decomposition] = {}
    for batch in batches.values():
        covariances = [covariance(key) for key in batch]
        found |= zip(batch, decompose(covariances, rule, precision, storage, together), strict=True)
    return found if together else {key: found[key] for key in keys}


def _eigh(covariances: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Small ones of one shape all at once: a GPU takes longer to be told about each than to solve it."""
    first = covariances[0]
    if first.is_cuda and first.shape[-1] <= SMALL and all(c.shape == first.shape for c in covariances):
        values, vectors = torch.linalg.eigh(torch.stack([c.double() for c in covariances]))
        return list(zip(values.unbind(0), vectors.unbind(0), strict=True))
    if first.is_cuda and len(covariances) > 1:
        torch.linalg.eigh(torch.ones(1, 1, dtype=torch.float64, device=first.device))  # threads cannot load it at once
        here = torch.cuda.current_stream(first.device)  # a thread would find its own
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            return list(threads.map(_eigh_beside, covariances, cycle(_streams(first.device)), repeat(here)))
    return [torch.linalg.eigh(covariance.double()) for covariance in covariances]


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Always the same ones: memory that was used on one stays with it."""
    return [torch.cuda.Stream(device) for _ in range(AT_A_TIME)]


def _eigh_beside(covariance: Tensor, stream: torch.cuda.Stream, here: torch.cuda.Stream) -> tuple[Tensor, Tensor]:
    """On a stream beside the present one: one alone leaves most of a GPU idle."""
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        values, vectors = torch.linalg.eigh(covariance.double())
    stream.synchronize()
    for tensor in (values, vectors):
        tensor.record_stream(here)
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
    """The textbook twin: the dense matrix by SVD, as the paper writes it."""
    U, _, _ = torch.linalg.svd(covariance.double())
    null = U[:, U.shape[1] - rank :]
    H = null @ null.T
    if scaling == "frobenius" and rank > 0:
        H = H / torch.linalg.norm(H)
    return eta * H + (1 - eta) * torch.eye(len(H), dtype=H.dtype, device=H.device)
