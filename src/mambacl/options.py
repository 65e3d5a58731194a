"""Option dataclasses from nested mappings, with an error for each name or type that does not fit."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_origin

from mambacl.errors import UserError
from mambacl.registry import did_you_mean


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top, mappings inside merged in turn."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


def build_config(config_class: type, values: Mapping[str, Any], owner: str) -> Any:
    """An instance of a configuration dataclass; dataclass fields are built from mappings."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            hint = did_you_mean(key, fields)
            known = f"Known: {', '.join(fields)}." if fields else "It has none."
            raise UserError(f"'{owner}' has no option '{key}'.{hint} {known}")
        kind = fields[key].type
        if get_origin(kind) is not None:  # list[int] and the like, which Python 3.10 also takes for types
            pass
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            value = build_config(kind, value, f"{owner}.{key}")
        elif isinstance(kind, type) and not _fits(value, kind):
            raise UserError(f"'{owner}' takes {key} of type {kind.__name__}, got {value!r}.")
        arguments[key] = value
    return config_class(**arguments)


def _fits(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
