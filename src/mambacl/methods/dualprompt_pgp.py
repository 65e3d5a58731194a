"""DualPrompt with PGP (Qiao et al., ICLR 2024): gradients of its prompts leave out what earlier tasks need.

Attention compares an image's queries W_q x with the prompts in front of its keys. Each block with prompts has a basis
with directions of the queries of earlier tasks' images, and the gradients of the prompts for keys are orthogonal to it.
The prompts for values train as before.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor

from mambacl.methods.dualprompt import DualPrompt, DualPromptOptions
from mambacl.methods.projected import Projected
from mambacl.methods.registry import METHODS
from mambacl.options import between
from mambacl.tuning.gradient_bases import gram
from mambacl.tuning.prompt_pool import PromptPool


@dataclass(frozen=True)
class DualPromptPGPOptions(DualPromptOptions):
    """Options of DualPrompt, and how much PGP protects."""

    share: Annotated[float, between(0, 1)] = 0.5
    """share of the squared length of a task's queries that a block's basis holds"""


class DualPromptPGP(Projected, DualPrompt):
    name = "dualprompt-pgp"
    summary = "DualPrompt with projected gradients of the prompts for keys (PGP)"
    options_class: ClassVar[type] = DualPromptPGPOptions
    needs_attention: ClassVar[bool] = True

    def products(self, images: Iterable[Tensor]) -> dict[str, tuple[Tensor, float]]:
        """From the prompted pass, with the task's own prompts."""
        blocks = [*self.shared.places, *(block for group in self.groups for block in group)]
        seen: dict[int, Tensor] = {}
        totals: dict[int, Tensor] = {}

        def keep(block: int) -> Any:
            def hook(_: Any, __: Any, output: Tensor) -> None:
                seen[block] = output[..., : self.num_features]  # queries, then keys and values

            return hook

        layers: Any = self.model.blocks
        handles = [layers[block].attn.qkv.register_forward_hook(keep(block)) for block in blocks]
        try:
            for batch in images:
                self.prompted(batch, self.task)  # two passes; the second, with prompts, is what `seen` has at the end
                for block in blocks:
                    product = gram([seen[block]])
                    totals[block] = totals[block] + product if block in totals else product
        finally:
            for handle in handles:
                handle.remove()
        return {f"block{block}": (product, self.options.share) for block, product in totals.items()}

    def protected_gradients(self) -> Iterator[tuple[str, Tensor]]:
        shared = self.shared.values.grad  # (blocks, 2, n, heads, d)
        if shared is not None:
            for block, place in self.shared.places.items():
                yield f"block{block}", shared[place, 0]
        for pool, group in zip(self.pools, self.groups, strict=True):
            assert isinstance(pool, PromptPool)
            gradient = pool.values.grad  # (pool, blocks, 2, n, heads, d)
            if gradient is not None:
                for place, block in enumerate(group):
                    yield f"block{block}", gradient[:, place, 0]


METHODS.add(DualPromptPGP.name, DualPromptPGP)
