"""Nodes of an ONNX graph, made by hand."""
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from typing import Any

import numpy as np


class Nodes:
    """Each node has one output and its name. The prefix keeps names different from those of an outer graph, as ONNX
    demands."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def add(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        from onnx import helper

        name = name or f"{self.prefix}_{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Any, kind: type = np.int64) -> str:
        from onnx import numpy_helper

        name = f"{self.prefix}_constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, kind), name))
        return name
