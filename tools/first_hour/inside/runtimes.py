"""Classifies a folder with an exported model, without mambacl and PyTorch:  runtimes.py MODEL FOLDER

Prints, as JSON, the probabilities of all classes for each file. The model takes uint8 images of its own size and gives
estimates of the probabilities.
"""

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image


def in_onnxruntime(path: str) -> tuple[list[str], Callable[[np.ndarray], np.ndarray]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
    return classes, lambda images: session.run(None, {"images": images})[0]


def in_openvino(path: str) -> tuple[list[str], Callable[[np.ndarray], np.ndarray]]:
    import openvino

    core = openvino.Core()
    network = core.read_model(path)
    classes = json.loads(network.get_rt_info(["mambacl", "classes"]).astype(str))
    compiled = core.compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return classes, lambda images: compiled(images)[0]


def probabilities(scores: np.ndarray) -> np.ndarray:
    """The nearest values that are not negative and add up to 1."""
    low, high = scores.min() - 1, scores.max()  # what to subtract is between them
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(scores - middle, 0, None).sum() > 1 else (low, middle)
    return np.clip(scores - high, 0, None)


def main() -> None:
    there = [name for name in ("mambacl", "torch") if find_spec(name) is not None]
    if there:
        sys.exit(f"{there[0]} is on the path")
    model, folder = sys.argv[1], Path(sys.argv[2])
    classes, answer = (in_onnxruntime if model.endswith(".onnx") else in_openvino)(model)
    found = {}
    for file in sorted(folder.rglob("*.png")):
        pixels = np.asarray(Image.open(file).convert("RGB"))
        row = probabilities(answer(pixels[None])[0].astype(np.float64))
        found[str(file)] = dict(zip(classes, row.tolist(), strict=True))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
