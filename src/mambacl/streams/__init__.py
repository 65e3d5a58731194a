"""Data sets, class orders and tasks."""

from mambacl.streams import cifar, fashion, folders  # noqa: F401  (register themselves)
from mambacl.streams.data import DATASETS, ArrayImages, DataSet, FileImages, open_dataset
from mambacl.streams.orders import ORDERS, class_order, split_into_tasks
from mambacl.streams.stream import Stream, StreamConfig, open_stream
from mambacl.streams.transforms import TransformConfig, Transforms

__all__ = [
    "DATASETS", "ORDERS", "ArrayImages", "DataSet", "FileImages", "Stream", "StreamConfig", "TransformConfig",
    "Transforms", "class_order", "open_dataset", "open_stream", "split_into_tasks",
]  # fmt: skip
