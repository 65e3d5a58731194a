"""Class orders, tasks and transforms of a data set."""

from mambacl.datasets import DATASETS, ArrayImages, DataSet, FileImages, open_dataset
from mambacl.streams.domains import domains_in_order
from mambacl.streams.orders import ORDERS, class_order, split_into_tasks
from mambacl.streams.stream import Stream, StreamConfig, open_data, open_stream, tasks_of
from mambacl.streams.transforms import TransformConfig, Transforms

__all__ = [
    "DATASETS", "ORDERS", "ArrayImages", "DataSet", "FileImages", "Stream", "StreamConfig", "TransformConfig",
    "Transforms", "class_order", "domains_in_order", "open_data", "open_dataset", "open_stream", "split_into_tasks",
    "tasks_of",
]  # fmt: skip
