"""A data set: named classes and two splits of labelled images."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mambacl.data.images import DecodedImages, Images
from mambacl.errors import UserError
from mambacl.log import logger


def indices_by_group(groups: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """The indices of the members of each group, in order."""
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.cumsum(np.bincount(groups, minlength=count))[:-1])


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


@dataclass(frozen=True)
class Domains:
    """The domain of each image, such as photographs or sketches."""

    names: list[str]
    train: NDArray[np.int64]
    test: NDArray[np.int64]

    @classmethod
    def of(cls, train: Sequence[str], test: Sequence[str], names: list[str] | None = None) -> "Domains":
        """From the name of each image's domain. Domains are numbered as in `names`, or sorted without it."""
        names = sorted({*train, *test}) if names is None else names
        number = {name: position for position, name in enumerate(names)}
        return cls(names, *(np.array([number[name] for name in part], dtype=np.int64) for part in (train, test)))


@dataclass(frozen=True)
class DataSet:
    name: str
    class_names: list[str]
    train: Images
    test: Images
    tasks: list[list[int]] | None = None
    """the classes of each task, if the data set defines tasks"""
    skipped: tuple[str, ...] = ()
    """images left out because they cannot be read: split, name and problem"""
    domains: Domains | None = None
    """if the data set defines them"""
    test_share: float | None = None
    """share of each class's images that was held out for testing, if the data set had no test images"""

    def fingerprint(self) -> str:
        """A digest that changes when the data changes."""
        parts = "\n".join([*self.class_names, self.train.digest(), self.test.digest()])
        return hashlib.sha256(parts.encode(errors="surrogateescape")).hexdigest()

    def check(self, number: int = 0, of: int = 1) -> None:
        """Raises a `UserError` if an image cannot be read. `of`: so many processes share the images."""
        self.train.check(number, of)
        self.test.check(number, of)

    def limited(self, train_per_class: int | None, by_domain: bool = False) -> "DataSet":
        """The first training images of each class, or of each class in each domain; all of them if None."""
        if train_per_class is None:
            return self
        if train_per_class < 1:
            raise UserError(f"train_per_class must be at least 1, got {train_per_class}.")
        kept = np.sort(np.concatenate([members[:train_per_class] for members in self._groups(by_domain)]))
        domains = self.domains and dataclasses.replace(self.domains, train=self.domains.train[kept])
        return dataclasses.replace(self, train=self.train.subset(kept), domains=domains)

    def with_validation(self, share: float, by_domain: bool = False) -> "DataSet":
        """Replaces the test images by this share of the training images of each class, or of each class in each domain,
        drawn with a fixed seed. Training keeps the others. The test split is never read."""
        if not 0 < share < 1:
            raise UserError(f"validation is a share of the training images between 0 and 1, got {share}.")
        rng = np.random.Generator(np.random.PCG64(0))
        kept, held = [], []
        for number, members in enumerate(self._groups(by_domain)):
            if len(members) < 2 and not by_domain:  # a domain can lack a class
                name = self.class_names[number]
                raise UserError(f"The class '{name}' has one training image, too few for validation: add some.")
            count = min(len(members) - 1, max(1, round(share * len(members)))) if len(members) > 1 else 0
            order = rng.permutation(members)
            held.append(order[:count])
            kept.append(order[count:])
        train, test = (np.sort(np.concatenate(part)) for part in (kept, held))
        domains = self.domains and Domains(self.domains.names, self.domains.train[train], self.domains.train[test])
        return dataclasses.replace(self, train=self.train.subset(train), test=self.train.subset(test), domains=domains)

    def with_test_images(self, share: float) -> "DataSet":
        """If there are no test images, holds out this share of each class's images. Digests of their names decide
        which: they are always the same, and new images change little."""
        if len(self.test.labels):
            return self
        held: list[int] = []
        for name, members in zip(self.class_names, self._groups(by_domain=False), strict=True):
            if len(members) < 2:
                raise UserError(
                    f"The class '{name}' of {self.name} has too few images to hold one out for testing: add some, or a "
                    "folder with test images."
                )
            count = min(len(members) - 1, max(1, round(share * len(members))))
            held += sorted(members.tolist(), key=lambda index: _digest(self.train.name(index)))[:count]
        test = np.sort(np.array(held, dtype=np.int64))
        train = np.setdiff1d(np.arange(len(self.train.labels)), test)
        logger.info(
            "%s has no test images: %d of its %d images, %.0f%% of each class, are held out for testing, always the "
            "same ones (--stream.test_share).", self.name, len(test), len(test) + len(train), 100 * share,
        )  # fmt: skip
        held_out, kept = self.train.subset(test), self.train.subset(train)
        return dataclasses.replace(self, train=kept, test=held_out, test_share=share)

    def without_bad(self) -> "DataSet":
        """The data set without the images that cannot be read; `skipped` names them."""
        splits: list[Images] = []
        skipped, domains = list(self.skipped), self.domains
        for split, images in (("train", self.train), ("test", self.test)):
            bad = images.bad()
            skipped += [f"{split}: {images.name(index)} {trouble}" for index, trouble in bad.items()]
            kept = np.setdiff1d(np.arange(len(images.labels)), np.array(list(bad), dtype=np.int64))
            images = images.subset(kept) if bad else images
            if isinstance(images, DecodedImages):
                images.checked = True
            splits.append(images)
            domains = domains and dataclasses.replace(domains, **{split: getattr(domains, split)[kept]})
        return dataclasses.replace(self, train=splits[0], test=splits[1], skipped=tuple(skipped), domains=domains)

    def refuse_empty(self, name: str) -> None:
        """Raises a `UserError` if a class has no images in one of the splits."""
        for split, other, images in (("training", "test", self.train), ("test", "training", self.test)):
            present = np.bincount(images.labels, minlength=len(self.class_names))
            if (present == 0).any():
                empty = self.class_names[int(np.argmin(present))]
                raise UserError(
                    f"The class '{empty}' of {name} has no {split} images; add some, or remove its {other} images."
                )

    def _groups(self, by_domain: bool) -> list[NDArray[np.int64]]:
        """The indices of the training images of each class, or of each class in each domain, in order."""
        groups, count = self.train.labels, len(self.class_names)
        if by_domain and self.domains is not None:
            groups, count = groups + count * self.domains.train, count * len(self.domains.names)
        return indices_by_group(groups, count)
