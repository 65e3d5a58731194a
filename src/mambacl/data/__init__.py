"""Data sets, class orders, tasks, transforms and loaders.

PyTorch is imported with the first data set or stream, so that options can be checked without it.
"""

from typing import TYPE_CHECKING

from mambacl.data.config import StreamConfig, TransformConfig
from mambacl.data.tasks import ORDERS, class_order, domains_in_order, split_into_tasks, tasks_of
from mambacl.lazy import attributes

if TYPE_CHECKING:
    from mambacl.data.checking import check_dataset
    from mambacl.data.dataset import DataSet, Domains
    from mambacl.data.images import ArrayImages, FileImages, Images
    from mambacl.data.preparing import prepare
    from mambacl.data.sets import DATASETS, SOURCES, Download, Source, list_datasets, open_dataset
    from mambacl.data.sets.huggingface import from_huggingface
    from mambacl.data.stream import Stream, open_data, open_stream
    from mambacl.data.transforms import Transforms

__all__ = [
    "DATASETS", "ORDERS", "SOURCES", "ArrayImages", "DataSet", "Domains", "Download", "FileImages", "Images", "Source",
    "Stream", "StreamConfig", "TransformConfig", "Transforms", "check_dataset", "class_order", "domains_in_order",
    "from_huggingface", "list_datasets", "open_data", "open_dataset", "open_stream", "prepare", "split_into_tasks",
    "tasks_of",
]  # fmt: skip

__getattr__ = attributes(
    __name__,
    {
        "check_dataset": "checking",
        **dict.fromkeys(("DataSet", "Domains"), "dataset"),
        **dict.fromkeys(("ArrayImages", "FileImages", "Images"), "images"),
        "prepare": "preparing",
        **dict.fromkeys(("DATASETS", "SOURCES", "Download", "Source", "list_datasets", "open_dataset"), "sets"),
        "from_huggingface": "sets.huggingface",
        **dict.fromkeys(("Stream", "open_data", "open_stream"), "stream"),
        "Transforms": "transforms",
    },
)
