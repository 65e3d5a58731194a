"""The backbones under the names of `timm.create_model`, where timm is installed. Neither is imported for the other's
sake: whichever comes second joins them."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def join_timm() -> None:
    """Registers the backbones with timm: now, if it is there already, or as soon as it is imported."""
    if "timm" in sys.modules:
        register()
    elif not any(isinstance(finder, _AfterTimm) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTimm())


def register() -> None:
    """Names that timm has of its own stay its own. A broken package of others is warned of, and breaks no import."""
    from timm.models import is_model, register_model

    from mambacl.backbones.registry import MODELS
    from mambacl.errors import UserError
    from mambacl.log import logger

    try:
        names = MODELS.names()
    except UserError as error:
        logger.warning("%s Until then, timm knows the models without it.", error)
        names = MODELS.known()
    for name in sorted(names):
        if not is_model(name):
            register_model(_entry(name))


def _entry(name: str) -> Callable[..., Any]:
    def build(pretrained: bool = False, **options: Any) -> Any:
        from mambacl.backbones.registry import create_model

        for timms_own in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
            options.pop(timms_own, None)
        return create_model(name, pretrained=pretrained, **options)

    build.__name__ = build.__qualname__ = name
    return build


class _AfterTimm(MetaPathFinder):
    """Lets timm be found as ever, and registers the backbones when it has been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "timm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("timm")
        loader = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                register()

            loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
