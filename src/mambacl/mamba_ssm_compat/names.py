"""Makes mambacl's functions importable under the names of mamba-ssm, causal-conv1d and VMamba's kernels, and undoes it.

An import hook before all others provides the modules below. `importlib.metadata` also finds their versions, which some
libraries check. Nothing happens before `install()` is called.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from mambacl.errors import UserError
from mambacl.mamba_ssm_compat import block, conv, hub, norms, raw, scan

# Below 2.0, because libraries expect Mamba-2 from 2.0 on, and only Mamba-1 is provided.
VERSIONS = {"mamba_ssm": "1.2.2+mambacl", "causal_conv1d": "1.6.1+mambacl"}


def _named(*objects: Any) -> dict[str, Any]:
    return {thing.__name__: thing for thing in objects}


_NORMS = _named(norms.RMSNorm, norms.layer_norm_fn, norms.rms_norm_fn)
_CONVS = _named(conv.causal_conv1d_fn, conv.causal_conv1d_update)
_MAMBA = _named(block.Mamba)
_STEP = _named(scan.selective_state_update)
_SCANS = _named(scan.selective_scan_fn, scan.mamba_inner_fn)
_MORE_SCANS = _named(scan.selective_scan_ref, scan.mamba_inner_fn_no_out_proj, scan.bimamba_inner_fn)

MODULES: dict[str, dict[str, Any]] = {
    "mamba_ssm": {**_SCANS, **_MAMBA},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.selective_scan_interface": {**_SCANS, **_MORE_SCANS},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layer_norm": _NORMS,
    "mamba_ssm.ops.triton.layernorm": _NORMS,  # its name before mamba-ssm 2
    "mamba_ssm.ops.triton.selective_state_update": _STEP,
    "mamba_ssm.modules": {},
    "mamba_ssm.modules.mamba_simple": {**_MAMBA, **_SCANS, **_CONVS, **_STEP, **_NORMS},
    "mamba_ssm.utils": {},
    "mamba_ssm.utils.generation": _named(hub.InferenceParams, hub.GenerationMixin),
    "mamba_ssm.utils.hf": _named(hub.load_config_hf, hub.load_state_dict_hf),
    "causal_conv1d": _CONVS,
    "causal_conv1d.causal_conv1d_interface": _CONVS,
    "selective_scan_cuda": vars(raw.selective_scan_cuda),
    "selective_scan_cuda_core": vars(raw.selective_scan_cuda_core),
    "selective_scan_cuda_oflex": vars(raw.selective_scan_cuda_oflex),
}
_ROOTS = [name for name in MODULES if "." not in name]
_PACKAGES = {name.rpartition(".")[0] for name in MODULES} - {""}


def install(force: bool = False) -> None:
    """Makes `import mamba_ssm`, `causal_conv1d`, `selective_scan_cuda` and their submodules give mambacl's modules.

    Raises `UserError` if one of them is already imported from another package, because its users keep those functions;
    with `force` only later imports are affected. A second call has no effect.
    """
    if _finder in sys.meta_path:
        return
    others = [name for name in _ROOTS if name in sys.modules]
    if others and not force:
        raise UserError(
            f"{' and '.join(others)} is already imported: call mamba_ssm_compat.install() before the first import, or "
            "install(force=True) for the imports that follow."
        )
    _replaced.update(_remove_modules())
    sys.meta_path.insert(0, _finder)
    importlib.invalidate_caches()
    for name in MODULES:  # import all: some code reads submodules as attributes
        importlib.import_module(name)
    _patch_transformers()


def uninstall() -> None:
    """Removes mambacl's modules and restores those that `install(force=True)` replaced. Code that has imported
    functions in the meantime keeps them."""
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    while _patched:
        setattr(*_patched.pop())
    _remove_modules()
    sys.modules.update(_replaced)
    _replaced.clear()
    importlib.invalidate_caches()


@contextmanager
def installed(force: bool = False) -> Iterator[None]:
    """`install()` for a block of code. Nested blocks have no effect."""
    outermost = _finder not in sys.meta_path
    install(force)
    try:
        yield
    finally:
        if outermost:
            uninstall()


def _patch_transformers() -> None:
    """Makes transformers report mamba-ssm as available. Without a GPU it never does, and public models rely on it."""
    if importlib.util.find_spec("transformers") is None:
        return
    for home in ("transformers.utils.import_utils", "transformers.utils"):
        module = importlib.import_module(home)
        for name in ("is_mamba_ssm_available", "is_causal_conv1d_available"):
            if hasattr(module, name):
                _patched.append((module, name, getattr(module, name)))
                setattr(module, name, lambda: True)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        origin = f"{__name__}, in place of {fullname}"
        return ModuleSpec(fullname, self, origin=origin, is_package=fullname in _PACKAGES)

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # an ordinary module

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(MODULES[module.__name__])
        module.__doc__ = f"mambacl's replacement for {module.__name__}."
        if module.__name__ in VERSIONS:
            module.__version__ = VERSIONS[module.__name__]  # type: ignore[attr-defined]

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        wanted = (DistributionFinder.Context() if context is None else context).name
        names = [name for name in VERSIONS if wanted is None or _normalized(wanted) == _normalized(name)]
        return [_Distribution(name) for name in names]


class _Distribution(Distribution):
    def __init__(self, name: str) -> None:
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSIONS[name]}\n",
            "top_level.txt": f"{name}\n",
        }

    def read_text(self, filename: Any) -> str | None:
        return self._files.get(str(filename))

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


def _remove_modules() -> dict[str, ModuleType]:
    """Removes the modules of these packages from `sys.modules` and returns them."""
    names = [name for name in sys.modules if name.partition(".")[0] in _ROOTS]
    return {name: sys.modules.pop(name) for name in names}


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


_finder = _Finder()
_replaced: dict[str, ModuleType] = {}
_patched: list[tuple[ModuleType, str, Any]] = []  # transformers' original functions
