"""`import mambacl.timm` registers the backbones with timm, for `timm.create_model("vim_tiny")`. As in timm, a
dot separates a model's name from the tag of its weights: `timm.create_model("vim_tiny.in1k", pretrained=True)`.

Names that timm already has are left to timm.
"""

from collections.abc import Callable
from typing import Any

try:
    from timm.models import is_model, register_model
except ImportError as error:
    raise ImportError("mambacl.timm needs timm: pip install timm.") from error

from mambacl.backbones import create_model, list_models


def _entrypoint(name: str) -> Callable[..., Any]:
    def build(pretrained: bool | str = False, **options: Any) -> Any:
        tag = options.pop("pretrained_cfg", None)
        for timms_own in ("pretrained_cfg_overlay", "cache_dir"):
            options.pop(timms_own, None)
        return create_model(name, tag if pretrained is True and isinstance(tag, str) else pretrained, **options)

    build.__name__ = build.__qualname__ = name
    return build


for _name in list_models():
    if not is_model(_name):
        register_model(_entrypoint(_name))
