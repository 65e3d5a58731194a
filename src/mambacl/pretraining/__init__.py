"""Pre-trains a backbone from random weights with a plain softmax classifier.

PyTorch is imported with the first call, so that options can be checked without it.
"""

from typing import TYPE_CHECKING

from mambacl.lazy import attributes
from mambacl.pretraining.options import PretrainConfig

if TYPE_CHECKING:
    from mambacl.pretraining.api import Pretrained, pretrain

__all__ = ["PretrainConfig", "Pretrained", "pretrain"]

__getattr__ = attributes(__name__, dict.fromkeys(("Pretrained", "pretrain"), "api"))
