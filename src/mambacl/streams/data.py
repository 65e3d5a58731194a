"""What a data set is, under its earlier address; `mambacl.datasets` has it."""

from mambacl.datasets.base import DATASETS, ArrayImages, DataSet, FileImages, Images, open_dataset

__all__ = ["DATASETS", "ArrayImages", "DataSet", "FileImages", "Images", "open_dataset"]
