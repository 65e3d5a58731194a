"""Every benchmark. The names below are imported on first use, so that the help of `mambacl bench` is fast."""

from typing import TYPE_CHECKING

from mambacl.bench.names import PARTS
from mambacl.lazy import attributes

if TYPE_CHECKING:
    from mambacl.bench.parts import bench, measure
    from mambacl.bench.result import Result
    from mambacl.bench.shapes import SHAPES

__all__ = ["PARTS", "SHAPES", "Result", "bench", "measure"]

__getattr__ = attributes(__name__, {"bench": "parts", "measure": "parts", "Result": "result", "SHAPES": "shapes"})
