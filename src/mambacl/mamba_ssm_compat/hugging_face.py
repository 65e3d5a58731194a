"""Makes transformers' Mamba, FalconMamba, Jamba and similar models use mambacl's functions, on CPU and GPU.

Since 5.15 the modeling files of transformers call five functions of their own module by name. Each is mamba-ssm's if
that is installed, and a slow loop otherwise. `accelerate_transformers` replaces them by mambacl's.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn

from mambacl.errors import UserError
from mambacl.mamba_ssm_compat.conv import causal_conv1d_fn, causal_conv1d_update
from mambacl.mamba_ssm_compat.scan import selective_scan_fn, selective_state_update

TESTED = "5.15 to 5.22"
ARCHITECTURES = ("mamba", "falcon_mamba", "jamba")
ACTIVATIONS = (None, "silu", "swish")  # those of mambacl's convolution


def accelerate_transformers(model: nn.Module | None = None) -> list[str]:
    """Makes transformers' models call mambacl's scan and convolution. Returns the names of the changed modules.

    With a model, changes the modules that define its blocks; otherwise those of Mamba, FalconMamba and Jamba. This also
    affects existing models. A second call has no effect; `restore_transformers()` undoes it.
    """
    modules = _default_modules() if model is None else _modules_of(model)
    for module in modules:  # check all before changing any
        _check(module)
    for module in modules:
        if module.__name__ not in _originals:
            names = [
                name for name in (*_REPLACEMENTS, "mamba_inner_fn") if hasattr(module, name)
            ]  # Zamba lacks the last
            _originals[module.__name__] = {name: getattr(module, name) for name in names}
            for name in names:
                original = getattr(module, name)
                setattr(module, name, _replaced(original, name) if name in _REPLACEMENTS else _inner)
    return [module.__name__ for module in modules]


def restore_transformers() -> None:
    """Restores the original functions of every module that `accelerate_transformers` changed."""
    for name, functions in _originals.items():
        for function, original in functions.items():
            setattr(sys.modules[name], function, original)
    _originals.clear()


def _replaced(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    function, parameters = _REPLACEMENTS[name]
    known = inspect.signature(function).parameters

    @functools.wraps(_function(original))
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(parameters):  # more than is known by position
            return original(*args, **kwargs)
        given = dict(zip(parameters.values(), args, strict=False))  # the rest by keyword, or left out
        given |= {parameters.get(name, name): value for name, value in kwargs.items()}
        exporting = torch.compiler.is_exporting()  # an exported program must not depend on mambacl
        if exporting or given.get("activation") not in ACTIVATIONS:
            return original(*args, **kwargs)
        return function(**{name: value for name, value in given.items() if name in known})

    return call


def _inner(*args: Any, **kwargs: Any) -> None:
    """Returning None makes transformers call the other functions instead. Together they are as fast, and transformers
    masks padding between them, which mamba-ssm's fused call does not."""


def _named(names: str, **others: str) -> dict[str, str]:
    return {name: others.get(name, name) for name in names.split()}


# mambacl's functions, and their names of transformers' parameters, in transformers' order.
_REPLACEMENTS: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "mamba_selective_scan": (
        selective_scan_fn,
        _named("hidden_states dt A B C D z delta_bias delta_softplus return_last_state", hidden_states="u", dt="delta"),
    ),
    "mamba_selective_state_update": (
        selective_state_update,
        _named("state hidden_states dt A B C D dt_bias dt_softplus z", hidden_states="x"),
    ),
    "causal_conv1d_fn": (causal_conv1d_fn, _named("hidden_states weight bias activation", hidden_states="x")),
    "causal_conv1d_update": (
        causal_conv1d_update,
        _named("hidden_states conv_state weight bias activation", hidden_states="x"),
    ),
}
_originals: dict[str, dict[str, Callable[..., Any]]] = {}  # functions of each changed module


def _default_modules() -> list[ModuleType]:
    try:
        return [import_module(f"transformers.models.{name}.modeling_{name}") for name in ARCHITECTURES]
    except ImportError as error:
        raise UserError(f"accelerate_transformers needs transformers {TESTED} ({error}): install it.") from None


def _modules_of(model: nn.Module) -> list[ModuleType]:
    names = sorted({type(module).__module__ for module in model.modules()})
    ours = [
        name for name in names if name.startswith("transformers.") and name.rpartition(".")[2].startswith("modeling")
    ]
    scanning = [name for name in ours if "mamba_selective_scan" in vars(sys.modules[name])]
    known = [name for name in ours if name.split(".")[-2] in ARCHITECTURES]
    if not scanning and not known:
        raise UserError(
            f"This {type(model).__name__} has no block of transformers' Mamba, FalconMamba or Jamba: "
            "accelerate_transformers has nothing to change."
        )
    return [sys.modules[name] for name in scanning or known]


def _check(module: ModuleType) -> None:
    """Raises `UserError` if the module lacks a function to replace, or if its parameters differ."""
    if module.__name__ in _originals:
        return
    for name, (_, parameters) in _REPLACEMENTS.items():
        function = getattr(module, name, None)
        if function is None or not _takes(function, tuple(parameters)):
            version = getattr(sys.modules["transformers"], "__version__", "of unknown version")
            raise UserError(
                f"transformers {version} has no {name} in {module.__name__} that mambacl knows how to replace: "
                f"accelerate_transformers works with transformers {TESTED}."
            )


def _takes(function: Callable[..., Any], names: tuple[str, ...]) -> bool:
    """Whether a function's first parameters have these names, or it takes any arguments, as a hub kernel's wrapper
    does."""
    parameters = inspect.signature(_function(function)).parameters
    general = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())
    return general or tuple(parameters)[: len(names)] == names


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: the package `kernels`, if installed, wraps it in a module."""
    return function.forward if isinstance(function, nn.Module) else function
