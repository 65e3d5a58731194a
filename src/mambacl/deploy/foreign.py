"""File formats of other runtimes: each writes a model, and opens its file in the runtime that users run it in."""
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambacl.errors import UserError

MARK = "mambacl.export"  # the name of an entry in every file
PT2_TEXT = "mambacl.json"  # the extra file of a .pt2 file
LARGEST_ONNX = 2**31 - 2**20  # bytes of tensors: protobuf ends at 2 GiB

Program = torch.export.ExportedProgram
Answer = Callable[[Tensor], Tensor]  # inputs to scores


@dataclass(frozen=True)
class Format:
    name: str
    suffix: str
    runtime: str
    """what runs the file"""
    forms: tuple[str, ...]
    """of the scan that can be the fastest: see `ops.scan_traced`. Unrolled ones are not: thousands of nodes"""
    modules: tuple[str, ...]
    """what it needs, in the extra of the same name"""
    write: Callable[[Program, Path, Mapping[str, str]], None]
    open: Callable[[Path, int], Answer]
    """for a number of threads; 0: as many as the runtime likes"""
    others: tuple[str, ...] = ()
    """suffixes of further files that belong to it"""

    def files(self, path: Path) -> list[Path]:
        """All its files, the one that names it last."""
        return [*(path.with_suffix(suffix) for suffix in self.others), path]

    def check_installed(self) -> None:
        if missing := [module for module in self.modules if find_spec(module) is None]:
            raise UserError(
                f"Export to {self.name} needs the package {missing[0]}: install it with "
                f"`pip install 'mambacl[{self.name}]'`."
            )


def _onnx_bytes(program: Program, text: Mapping[str, str]) -> bytes:
    from mambacl.deploy.onnx_graph import onnx_model

    tensors = (*program.state_dict.values(), *program.constants.values())
    size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
    if size > LARGEST_ONNX:
        raise UserError(f"The model has {size / 1e9:.1f} GB, but an ONNX file holds at most 2 GB: use --to pt2.")
    try:
        model = onnx_model(program)
    except torch.onnx.OnnxExporterError as error:
        causes = str(error).strip().splitlines()
        raise UserError(
            f"PyTorch cannot translate an operator of this model to ONNX ({causes[-1]}): export it with --to pt2."
        ) from error
    for name, value in text.items():
        model.metadata_props.add(key=name, value=value)
    return model.SerializeToString()


def _write_onnx(program: Program, path: Path, text: Mapping[str, str]) -> None:
    path.write_bytes(_onnx_bytes(program, text))


def _open_onnx(path: Path, threads: int) -> Answer:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # between calls, other programs have the cores
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    [name] = [given.name for given in session.get_inputs()]
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def _write_openvino(program: Program, path: Path, text: Mapping[str, str]) -> None:
    import openvino

    model = openvino.Core().read_model(_onnx_bytes(program, {}))
    for name, value in text.items():
        model.set_rt_info(value, ["mambacl", name])
    openvino.save_model(model, str(path), compress_to_fp16=False)


def _open_openvino(path: Path, threads: int) -> Answer:
    """Takes an ONNX file, too."""
    import openvino

    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    model = openvino.Core().compile_model(str(path), "CPU", hints)
    return lambda images: torch.from_numpy(model(images.numpy())[0].copy())


def _write_pt2(program: Program, path: Path, text: Mapping[str, str]) -> None:
    torch.export.save(program, path, extra_files={PT2_TEXT: json.dumps(dict(text))})


def _open_pt2(path: Path, _: int) -> Answer:
    """Has PyTorch's threads."""
    model: Any = torch.export.load(path).module()

    def answer(images: Tensor) -> Tensor:
        with torch.no_grad():
            return model(images)

    return answer


FORMATS = {
    made.name: made
    for made in (
        Format(
            "onnx", ".onnx", "onnxruntime", ("loop", "chunked"), ("onnx", "onnxscript", "onnxruntime"), _write_onnx,
            _open_onnx,
        ),
        Format(
            "openvino", ".xml", "OpenVINO", ("loop", "chunked"), ("openvino", "onnx", "onnxscript"), _write_openvino,
            _open_openvino, others=(".bin",),
        ),
        Format("pt2", ".pt2", "torch.export", ("chunked",), (), _write_pt2, _open_pt2),
    )
}  # fmt: skip
