"""The selective scan as a graph for inference engines: ONNX's `Scan` for ONNX Runtime, `TensorIterator` for OpenVINO.

Both loop over time with the state (b, n, d) as the loop variable; everything that does not depend on the state is
outside the loop. Two choices depend on the shape, so an engine tries all variants and keeps the fastest: the sum over
states as a matrix product or as a sum, and the exponentials step by step or all before the loop.

Inputs, in this order: u, delta (b, d, l), A (d, n), B, C (b, n, l), D (d, 1), delta_bias (d, 1), z (b, d, l).
"""
# mypy: disable-error-code="import-not-found, import-untyped"

from dataclasses import dataclass
from typing import Any

import numpy as np

from mambacl.bench.shapes import Shape
from mambacl.deploy.onnx_nodes import Nodes

OPSET, IR_VERSION = 17, 9  # old enough for all current engines


@dataclass(frozen=True)
class Variant:
    product: bool
    """whether the sum over states is a matrix product"""
    ahead: bool
    """whether all exponentials come before the loop"""


VARIANTS = tuple(Variant(product, ahead) for product in (True, False) for ahead in (False, True))


def input_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    b, d, length, n = shape.batch, shape.channels, shape.length, shape.states
    tokens, matrices = (b, d, length), (b, n, length)
    return {
        "u": tokens, "delta": tokens, "A": (d, n), "B": matrices, "C": matrices, "D": (d, 1), "delta_bias": (d, 1),
        "z": tokens,
    }  # fmt: skip


def onnx_scan(shape: Shape, variant: Variant) -> bytes:
    from onnx import TensorProto, helper

    b, d, length, n = shape.batch, shape.channels, shape.length, shape.states
    outer, body = Nodes("outer"), Nodes("step")

    def by_time(name: str, axis: int) -> str:
        """Transposes to (l, b, x) and adds an axis."""
        return outer.add("Unsqueeze", outer.add("Transpose", name, perm=[2, 0, 1]), outer.constant([axis]))

    steps = outer.add("Softplus", outer.add("Add", "delta", "delta_bias"))
    entering = by_time(outer.add("Mul", steps, "u"), 2)  # (l, b, 1, d)
    steps = by_time(steps, 2)
    A = outer.add("Transpose", "A", perm=[1, 0])
    B, C = by_time("B", 3), by_time("C", 2 if variant.product else 3)
    if variant.ahead:
        sliced = [outer.add("Exp", outer.add("Mul", steps, A)), outer.add("Mul", entering, B), C]
        names = ["decay", "added", "C_t"]
    else:
        sliced, names = [steps, entering, B, C], ["step", "x_t", "B_t", "C_t"]
        body.add("Exp", body.add("Mul", "step", A), name="decay")
        body.add("Mul", "x_t", "B_t", name="added")
    new = body.add("Add", body.add("Mul", "decay", "h"), "added")
    if variant.product:
        body.add("MatMul", "C_t", new, name="y_t")
    else:
        body.add("ReduceSum", body.add("Mul", new, "C_t"), outer.constant([-2]), name="y_t", keepdims=1)
    body.add("Identity", new, name="h_new")

    def typed(name: str, sizes: tuple[int, ...] | None = None) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)

    inside, results = [typed(name) for name in ("h", *names)], [typed(name) for name in ("h_new", "y_t")]
    loop = helper.make_graph(body.nodes, "step", inside, results, body.constants)
    start = outer.constant(np.zeros((b, n, d)), np.float32)
    outputs = ["last", "y_by_time"]
    outer.nodes.append(helper.make_node("Scan", [start, *sliced], outputs, body=loop, num_scan_inputs=len(sliced)))
    y = outer.add("Reshape", "y_by_time", outer.constant([length, b, d]))
    y = outer.add("Add", outer.add("Transpose", y, perm=[1, 2, 0]), outer.add("Mul", "u", "D"))
    outer.add("Mul", y, outer.add("Mul", "z", outer.add("Sigmoid", "z")), name="y")

    inputs = [typed(name, sizes) for name, sizes in input_shapes(shape).items()]
    graph = helper.make_graph(outer.nodes, "selective_scan", inputs, [typed("y", (b, d, length))], outer.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return model.SerializeToString()


def openvino_scan(shape: Shape, variant: Variant) -> Any:
    import openvino
    from openvino import opset13 as ops

    b, d, length, n = shape.batch, shape.channels, shape.length, shape.states
    given = {name: ops.parameter(list(sizes), np.float32) for name, sizes in input_shapes(shape).items()}

    def by_time(node: Any, axis: int) -> Any:
        return ops.unsqueeze(ops.transpose(node, np.array([2, 0, 1])), np.int64(axis))

    steps = ops.softplus(ops.add(given["delta"], given["delta_bias"]))
    entering = by_time(ops.multiply(steps, given["u"]), 2)  # (l, b, 1, d)
    steps = by_time(steps, 2)
    A = ops.transpose(given["A"], np.array([1, 0]))
    B, C = by_time(given["B"], 3), by_time(given["C"], 2 if variant.product else 3)
    token, state = [1, b, 1, d], [1, b, n, d]
    h = ops.parameter(state, np.float32)
    C_t = ops.parameter([1, b, 1, n] if variant.product else [1, b, n, 1], np.float32)
    fixed, sliced = [], [(C_t, C)]
    if variant.ahead:
        decay, added = (ops.parameter(state, np.float32) for _ in range(2))
        sliced += [(decay, ops.exp(ops.multiply(steps, A))), (added, ops.multiply(entering, B))]
    else:
        step, x_t = (ops.parameter(token, np.float32) for _ in range(2))
        B_t, A_inside = ops.parameter([1, b, n, 1], np.float32), ops.parameter([n, d], np.float32)
        decay, added = ops.exp(ops.multiply(step, A_inside)), ops.multiply(x_t, B_t)
        sliced += [(step, steps), (x_t, entering), (B_t, B)]
        fixed = [(A_inside, A)]
    new = ops.add(ops.multiply(decay, h), added)
    if variant.product:
        y_t = ops.matmul(C_t, new, False, False)
    else:
        y_t = ops.reduce_sum(ops.multiply(new, C_t), np.array([2]), keep_dims=True)
    h_new, y_out = ops.result(new), ops.result(y_t)
    loop = ops.tensor_iterator()
    inside = [h, *(inner for inner, _ in sliced), *(inner for inner, _ in fixed)]
    loop.set_body(openvino.Model([h_new, y_out], inside, "step"))
    zeros = ops.constant(np.zeros(state, np.float32))
    loop.set_merged_input(h, zeros.output(0), h_new.output(0))
    for inner, outer in sliced:
        loop.set_sliced_input(inner, outer.output(0), 0, 1, 1, -1, 0)
    for inner, outer in fixed:
        loop.set_invariant_input(inner, outer.output(0))
    y = ops.reshape(loop.get_concatenated_slices(y_out.output(0), 0, 1, 1, -1, 0), np.array([length, b, d]), False)
    y = ops.add(ops.transpose(y, np.array([1, 2, 0])), ops.multiply(given["u"], given["D"]))
    y = ops.multiply(y, ops.swish(given["z"]))
    return openvino.Model([ops.result(y)], list(given.values()), "selective_scan")
