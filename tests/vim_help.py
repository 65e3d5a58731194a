"""A small Vim."""

import torch

from mambacl.backbones import create_model

TINY = {"img_size": 16, "patch_size": 4, "stride": 4, "embed_dim": 32, "depth": 2, "d_state": 8, "num_classes": 0}


def tiny(**options):
    """A Vim of a few thousand values; the same weights each time, and features of a usual size."""
    torch.manual_seed(0)
    model = create_model("vim", **{**TINY, **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("proj" in name and name.endswith("weight")) or name in ("pos_embed", "cls_token"):
                parameter.normal_(std=0.3)
    return model.eval()
