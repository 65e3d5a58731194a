"""Class orders, tasks and transforms of a data set."""

from typing import TYPE_CHECKING

from mambacl.lazy import attributes
from mambacl.streams.config import StreamConfig, TransformConfig
from mambacl.streams.orders import ORDERS, class_order, split_into_tasks

if TYPE_CHECKING:
    from mambacl.datasets import DATASETS, ArrayImages, DataSet, FileImages, open_dataset
    from mambacl.streams.domains import domains_in_order
    from mambacl.streams.stream import Stream, open_data, open_stream, tasks_of
    from mambacl.streams.transforms import Transforms

__all__ = [
    "DATASETS", "ORDERS", "ArrayImages", "DataSet", "FileImages", "Stream", "StreamConfig", "TransformConfig",
    "Transforms", "class_order", "domains_in_order", "open_data", "open_dataset", "open_stream", "split_into_tasks",
    "tasks_of",
]  # fmt: skip

__getattr__ = attributes(
    __name__,
    {
        **dict.fromkeys(("DATASETS", "ArrayImages", "DataSet", "FileImages", "open_dataset"), "data"),
        **dict.fromkeys(("Stream", "open_data", "open_stream", "tasks_of"), "stream"),
        "domains_in_order": "domains",
        "Transforms": "transforms",
    },
)
