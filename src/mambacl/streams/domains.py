"""Domains as tasks: the same classes come again in each, drawn otherwise."""

from collections.abc import Sequence

import numpy as np

from mambacl.datasets.base import DataSet, Domains
from mambacl.errors import UserError
from mambacl.streams.orders import class_order


def domains_in_order(
    dataset: DataSet, order: str | Sequence[int] = "natural", order_seed: int | None = None
) -> Domains:
    """The data set's domains, numbered in the order in which they are learned."""
    domains = dataset.domains
    if domains is None:
        raise UserError(
            f"The data set {dataset.name} names no domains: use domainnet-345, domain-folders or a manifest with a "
            "task for each image, or leave stream.scenario out."
        )
    _refuse_unusable(dataset, domains)
    wanted = class_order(order, len(domains.names), order_seed, domains.names, "domain")
    place = np.argsort(wanted)
    return Domains([domains.names[d] for d in wanted], place[domains.train], place[domains.test])


def _refuse_unusable(dataset: DataSet, domains: Domains) -> None:
    for split, numbers in (("training", domains.train), ("test", domains.test)):
        counts = np.bincount(numbers, minlength=len(domains.names))
        if (counts == 0).any():
            empty = domains.names[int(np.argmin(counts))]
            raise UserError(f"The domain '{empty}' of {dataset.name} has no {split} images; add some, or remove it.")
    if in_several(dataset, domains) is None:
        raise UserError(
            f"Each class of {dataset.name} comes from one domain only, which makes its tasks class-incremental: leave "
            "stream.scenario out, or use a data set whose domains share classes, such as domainnet-345."
        )


def in_several(dataset: DataSet, domains: Domains) -> str | None:
    """Which class is in more than one of them, in words; None where no class is."""
    classes = len(dataset.class_names)
    both = [(domains.train, dataset.train.labels), (domains.test, dataset.test.labels)]
    pairs = np.unique(np.concatenate([numbers + len(domains.names) * labels for numbers, labels in both]))
    counts = np.bincount(pairs // len(domains.names), minlength=classes)
    if (counts < 2).all():
        return None
    found = int(np.argmax(counts > 1))
    one, other = (domains.names[p % len(domains.names)] for p in pairs[pairs // len(domains.names) == found][:2])
    return f"The class '{dataset.class_names[found]}' of {dataset.name} is in the tasks '{one}' and '{other}'"
