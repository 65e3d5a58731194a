"""Feature covariances, their null spaces, and updates projected onto them, for any PyTorch model with selective
SSMs."""

from mambacl.nullspace.adapters import ADAPTERS, Block, Part
from mambacl.nullspace.projectors import Decomposition, Projector, dense_projector
from mambacl.nullspace.ranks import null_rank, null_ranks
from mambacl.nullspace.settings import KINDS, PAPER_KINDS, SETTINGS, Rule, Setting, ablation
from mambacl.nullspace.space import Consolidation, NullSpace, Protection

__all__ = [
    "ADAPTERS",
    "KINDS",
    "PAPER_KINDS",
    "SETTINGS",
    "Block",
    "Consolidation",
    "Decomposition",
    "NullSpace",
    "Part",
    "Projector",
    "Protection",
    "Rule",
    "Setting",
    "ablation",
    "dense_projector",
    "null_rank",
    "null_ranks",
]
