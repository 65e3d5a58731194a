"""Classifies a folder with an exported model, without mambacl and PyTorch:  runtimes.py MODEL FOLDER

Prints, as JSON, the probabilities of all classes for each file. The model takes uint8 images of its own size. Its
metadata say how its scores become probabilities.
"""

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

Model = tuple[list[str], dict, Callable[[np.ndarray], np.ndarray]]  # classes, what the file says of itself, the model


def in_onnxruntime(path: str) -> Model:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    said = session.get_modelmeta().custom_metadata_map
    return (
        json.loads(said["classes"]),
        json.loads(said["mambacl.export"]),
        lambda images: session.run(None, {"images": images})[0],
    )


def in_openvino(path: str) -> Model:
    import openvino

    core = openvino.Core()
    network = core.read_model(path)
    classes, said = (
        json.loads(network.get_rt_info(["mambacl", name]).astype(str)) for name in ("classes", "mambacl.export")
    )
    compiled = core.compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return classes, said, lambda images: compiled(images)[0]


def probabilities(scores: np.ndarray, said: dict) -> np.ndarray:
    calibration = said["calibration"]
    scores = scores / said["views"]
    if knee := calibration["knee"]:
        scores = knee * np.arcsinh(scores / knee)
    exponents = scores / calibration["temperature"]
    powers = np.exp(exponents - exponents.max())
    return powers / powers.sum()


def main() -> None:
    there = [name for name in ("mambacl", "torch") if find_spec(name) is not None]
    if there:
        sys.exit(f"{there[0]} is on the path")
    model, folder = sys.argv[1], Path(sys.argv[2])
    classes, said, answer = (in_onnxruntime if model.endswith(".onnx") else in_openvino)(model)
    found = {}
    for file in sorted(folder.rglob("*.png")):
        pixels = np.asarray(Image.open(file).convert("RGB"))
        row = probabilities(answer(pixels[None])[0].astype(np.float64), said)
        found[str(file)] = dict(zip(classes, row.tolist(), strict=True))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
