"""Null spaces of feature covariances, and updates projected onto them, for any PyTorch model with selective SSMs."""

from typing import TYPE_CHECKING

from mambacl.lazy import attributes

if TYPE_CHECKING:
    from mambacl.nullspace.blocks import ADAPTERS, BLOCK_READERS, Block, Part
    from mambacl.nullspace.projectors import Decomposition, Projector, dense_projector
    from mambacl.nullspace.ranks import null_rank, null_ranks
    from mambacl.nullspace.selection import Protection
    from mambacl.nullspace.settings import KINDS, PAPER_KINDS, SETTINGS, SYSTEMS, Rule, Setting, ablation
    from mambacl.nullspace.space import Consolidation, NullSpace

__all__ = [
    "ADAPTERS", "BLOCK_READERS", "KINDS", "PAPER_KINDS", "SETTINGS", "SYSTEMS", "Block", "Consolidation",
    "Decomposition", "NullSpace", "Part", "Projector", "Protection", "Rule", "Setting", "ablation", "dense_projector",
    "null_rank", "null_ranks",
]  # fmt: skip

__getattr__ = attributes(
    __name__,
    {
        **dict.fromkeys(("BLOCK_READERS", "Block", "Part"), "block_readers"),  # importing it registers the readers
        "ADAPTERS": "blocks",
        **dict.fromkeys(("Decomposition", "Projector", "dense_projector"), "projectors"),
        **dict.fromkeys(("null_rank", "null_ranks"), "ranks"),
        "Protection": "selection",
        **dict.fromkeys(("KINDS", "PAPER_KINDS", "SETTINGS", "SYSTEMS", "Rule", "Setting", "ablation"), "settings"),
        **dict.fromkeys(("Consolidation", "NullSpace"), "space"),
    },
)
