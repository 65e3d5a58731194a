"""CPrompt-KAC: CPrompt with heads on Gaussian bumps (KAC, Hu et al., CVPR 2025; `classifiers/kac.py`).

The paper quotes its figures; its code and its definition are not public. Chosen here: one KAC layer per task in place
of each linear head, fixed when its task ends like CPrompt's heads, so that old logits do not drift. The layer is the
one of KAC's public code for other methods. The auxiliary head, which is thrown away, stays linear; everything else, the
recipe included, is CPrompt's.
"""

from typing import Any, ClassVar

from mambacl.classifiers.base import TaskHeads
from mambacl.classifiers.kac import KacHeads
from mambacl.methods.cprompt import CPrompt
from mambacl.methods.registry import METHODS


class CPromptKac(CPrompt):
    name = "cprompt-kac"
    summary = "CPrompt with heads on Gaussian bumps of each feature (CPrompt-KAC)"
    own_classifier: ClassVar[str] = "kac"

    def classifier_defaults(self) -> dict[str, Any]:
        return {"shared": False}

    def make_heads(self) -> TaskHeads:
        return KacHeads(self.num_features, **self.classifier_defaults())


METHODS.add(CPromptKac.name, CPromptKac)
