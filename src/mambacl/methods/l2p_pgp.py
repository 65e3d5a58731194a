"""L2P with PGP (Qiao et al., ICLR 2024): gradients of prompts and keys leave out what earlier tasks need.

The prompts' basis holds directions of the tokens that attention sees, images' and prompts' alike (the sum of both
spaces); the keys' basis holds directions of the queries.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.methods.l2p import L2P, L2POptions
from mambacl.methods.projected import Projected
from mambacl.methods.registry import METHODS
from mambacl.options import between
from mambacl.tuning import Tuning
from mambacl.tuning.gradient_bases import gram
from mambacl.tuning.passes import with_class_token
from mambacl.tuning.query import frozen_query


@dataclass(frozen=True)
class L2PPGPOptions(L2POptions):
    """Options of L2P, and how much PGP protects."""

    prompt_share: Annotated[float, between(0, 1)] = 0.5
    """share of the squared length of a task's tokens that the prompts' basis holds"""
    key_share: Annotated[float, between(0, 1)] = 0.97
    """share of the squared length of a task's queries that the keys' basis holds"""


class L2PPGP(Projected, L2P):
    name = "l2p-pgp"
    summary = "L2P with projected gradients of prompts and keys (PGP)"
    options_class: ClassVar[type] = L2PPGPOptions

    def make_tuning(self) -> Tuning:
        if self.options.variant == "coda":
            raise UserError("l2p-pgp is not defined for prefix prompts: choose another options.variant than coda.")
        return super().make_tuning()

    def products(self, images: Iterable[Tensor]) -> dict[str, tuple[Tensor, float]]:
        tokens: list[Tensor] = []
        queries: list[Tensor] = []
        backbone = with_class_token(self.model)
        for batch in images:
            query = frozen_query(self.model, batch)
            prompts, _, _ = self.prompts_for(query)
            queries.append(gram([query]))
            tokens.append(gram([backbone.embed(batch), prompts]))
        shares = {"prompts": self.options.prompt_share, "keys": self.options.key_share}
        found = {"prompts": tokens, "keys": queries}
        return {name: (torch.stack(parts).sum(0), shares[name]) for name, parts in found.items()}

    def protected_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in (("prompts", self.pool.values), ("keys", self.pool.keys)):
            if parameter.grad is not None:
                yield name, parameter.grad


METHODS.add(L2PPGP.name, L2PPGP)
