"""Users' own images of several domains: ROOT/train/DOMAIN/CLASS/* and ROOT/test/DOMAIN/CLASS/*, both sorted by name.

A domain may lack some of the classes.
"""

from pathlib import Path

import numpy as np

from mambacl.datasets.base import DATASETS, DataSet, Domains, FileImages
from mambacl.datasets.folders import images_under, subfolders
from mambacl.errors import UserError

LAYOUT = "the layout is ROOT/train/DOMAIN/CLASS/*, ROOT/test/DOMAIN/CLASS/*"


def domain_folders(root: Path | None) -> DataSet:
    if root is None:
        raise UserError(f"The data set 'domain-folders' needs stream.root, a folder: {LAYOUT}.")
    for split in ("train", "test"):
        if not (root / split).is_dir():
            raise UserError(f"There is no folder {root / split}; {LAYOUT}.")
    domains = sorted({*subfolders(root / "train"), *subfolders(root / "test")})
    folders = {
        split: [(domain, name) for domain in domains for name in _classes(root / split / domain)]
        for split in ("train", "test")
    }
    names = sorted({name for found in folders.values() for _, name in found})
    if not names:
        raise UserError(f"{root} holds no class folders; {LAYOUT}.")
    number = {name: position for position, name in enumerate(names)}
    splits: dict[str, FileImages] = {}
    of_image: dict[str, list[str]] = {}
    for split, found in folders.items():
        files = [images_under(root / split / domain / name) for domain, name in found]
        counts = [len(part) for part in files]
        labels = np.repeat(np.array([number[name] for _, name in found], dtype=np.int64), counts)
        splits[split] = FileImages(root / split, [path for part in files for path in part], labels)
        of_image[split] = [domain for (domain, _), count in zip(found, counts, strict=True) for _ in range(count)]
    own = Domains.of(of_image["train"], of_image["test"], domains)
    return DataSet(root.resolve().name, names, splits["train"], splits["test"], domains=own)


def _classes(folder: Path) -> list[str]:
    return subfolders(folder) if folder.is_dir() else []


DATASETS.add("domain-folders", domain_folders)
