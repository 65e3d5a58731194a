"""Turns an exported program into an ONNX model that runs without mambacl.

PyTorch's exporter translates everything but the scan in the form "loop", which it leaves as a node of our own; here
that node becomes ONNX's `Scan`, a loop over tokens with the state (b, g, n, k) as loop variable.
"""
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mambacl.deploy.onnx_nodes import Nodes
from mambacl.ops.scan_traced import LOOP

OPSET = 18
DOMAIN = LOOP.partition("::")[0]
INPUT, OUTPUT = "images", "scores"


def onnx_model(program: torch.export.ExportedProgram) -> Any:
    """A `ModelProto` with the input `images` and the output `scores`, both with a dynamic batch."""
    import onnx

    program = program.run_decompositions({torch.ops.aten.softplus.default: softplus})
    with _quiet():
        made = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=[OUTPUT],
            verbose=False,
        )
    assert made is not None
    model = made.model_proto
    _insert_loops(model)
    _forget_sources(model)
    onnx.checker.check_model(model)
    return model


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(x)) with a small relative error also for very negative x, where OpenVINO's operator has one of 1e-4:
    the scan's steps delta are such values. log(1 + e) = 2 artanh(z) with z = e / (2 + e) <= 1/3, as a series."""
    x = x * beta
    e = torch.exp(-x.abs())
    z = e / (2 + e)
    w, series = z * z, torch.full_like(z, 1 / 17)
    for odd in range(15, 0, -2):
        series = series * w + 1 / odd
    return (x.relu() + 2 * z * series) / beta


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's progress and its warnings about things that users cannot change."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _forget_sources(model: Any) -> None:
    """Removes the exporter's notes, which name source files of this machine and can be larger than the weights."""
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        del part.metadata_props[:]


def _insert_loops(model: Any) -> None:
    """Replaces our nodes by loops."""
    shapes = {info.name: info for info in model.graph.value_info}
    nodes = []
    for node in model.graph.node:
        if node.domain == DOMAIN:
            nodes += _loop(node, shapes, model.graph)
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    others = [opset for opset in model.opset_import if opset.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(others)


def _loop(node: Any, shapes: dict[str, Any], graph: Any) -> list[Any]:
    """The nodes of y, last = scan(x (b, l, g, k), delta (b, l, g, k), A (g, n, k), B (b, l, g, n), C (b, l, g, n))."""
    from onnx import TensorProto, helper

    x, delta, A, B, C = node.input
    y, last = node.output
    prefix = f"{y}_loop"
    outer = Nodes(prefix)
    add, constant = outer.add, outer.constant
    dims = shapes[B].type.tensor_type.shape.dim
    groups, states = dims[2].dim_value, dims[3].dim_value
    width = shapes[x].type.tensor_type.shape.dim[3].dim_value

    def by_time(given: str, axis: int) -> str:
        """(l, b, g, ...) with one more axis."""
        return add("Unsqueeze", add("Transpose", given, perm=[1, 0, 2, 3]), constant([axis]))

    sliced = [by_time(delta, 3), by_time(x, 3), by_time(B, 4), by_time(C, 3)]
    batch = add("Shape", x, start=0, end=1)
    start = add("Expand", constant(0.0, np.float32), add("Concat", batch, constant([groups, states, width]), axis=0))
    inner = Nodes(f"{prefix}_step")
    h, delta_t, x_t, B_t, C_t = (f"{prefix}_{name}" for name in ("h", "delta_t", "x_t", "B_t", "C_t"))
    kept = inner.add("Mul", inner.add("Exp", inner.add("Mul", delta_t, A)), h)
    h_new = inner.add("Add", kept, inner.add("Mul", B_t, x_t))
    y_t = inner.add("MatMul", C_t, h_new)

    def typed(name: str, *sizes: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, groups, *sizes])

    body = helper.make_graph(
        inner.nodes,
        prefix,
        [
            typed(h, states, width),
            typed(delta_t, 1, width),
            typed(x_t, 1, width),
            typed(B_t, states, 1),
            typed(C_t, 1, states),
        ],
        [typed(h_new, states, width), typed(y_t, 1, width)],
    )
    steps = f"{prefix}_steps"
    outer.nodes.append(
        helper.make_node("Scan", [start, *sliced], [last, steps], name=prefix, body=body, num_scan_inputs=len(sliced))
    )  # steps (l, b, g, 1, k)
    add("Transpose", add("Squeeze", steps, constant([3])), name=y, perm=[1, 0, 2, 3])
    graph.initializer.extend(outer.constants)
    return outer.nodes
