"""Data sets: what they are, where they come from, whether they are whole."""

import mambacl.datasets.cifar  # (each registers itself)
import mambacl.datasets.domain_folders
import mambacl.datasets.fashion
import mambacl.datasets.folders
import mambacl.datasets.listed
import mambacl.datasets.manifest
import mambacl.datasets.tiny  # noqa: F401
from mambacl.datasets.base import DATASETS, ArrayImages, DataSet, Domains, FileImages, Images, open_dataset
from mambacl.datasets.checking import check_dataset
from mambacl.datasets.huggingface import from_huggingface
from mambacl.datasets.preparing import prepare
from mambacl.datasets.sources import SOURCES, Source

__all__ = [
    "DATASETS", "SOURCES", "ArrayImages", "DataSet", "Domains", "FileImages", "Images", "Source", "check_dataset",
    "from_huggingface", "open_dataset", "prepare",
]  # fmt: skip
