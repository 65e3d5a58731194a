"""Feature covariances, their null spaces, and updates projected onto them, for any PyTorch model with selective
SSMs."""

from mambacl.nullspace.projectors import Decomposition, Projector, dense_projector
from mambacl.nullspace.ranks import null_rank
from mambacl.nullspace.settings import KINDS, SETTINGS, Rule, Setting, ablation
from mambacl.nullspace.space import Consolidation, NullSpace

__all__ = [
    "KINDS",
    "SETTINGS",
    "Consolidation",
    "Decomposition",
    "NullSpace",
    "Projector",
    "Rule",
    "Setting",
    "ablation",
    "dense_projector",
    "null_rank",
]
