"""How far logits are from those of an earlier model: the losses of LwF and of the toolboxes' iCaRL."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Distance = Literal["cross-entropy", "kl"]


def distillation(logits: Tensor, target: Tensor, temperature: float, distance: Distance = "cross-entropy") -> Tensor:
    """Between softmax(target / T) and softmax(logits / T), both (b, classes), as a mean over the images and without a
    factor T^2. Cross-entropy and KL divergence differ by the target's entropy, so their gradients are the same. LwF's
    p^(1/T), divided by its sum, is the softmax at T, too."""
    aim = (target / temperature).softmax(1)
    if distance == "kl":
        return F.kl_div((logits / temperature).log_softmax(1), aim, reduction="batchmean")
    return F.cross_entropy(logits / temperature, aim)
