"""Checks a data set: counts, unreadable files, duplicates, training images among the test images."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mambacl.data.dataset import DataSet
from mambacl.data.images import FileImages, Images, in_threads
from mambacl.data.sets import SOURCES
from mambacl.errors import UserError
from mambacl.status import counted

REMEDIES = {
    "missing": "restore them, or remove them from the list; --skip-bad trains without them",
    "empty": "restore or remove them; --skip-bad trains without them",
    "truncated": "copy them again or remove them; --skip-bad trains without them",
    "too large": "shrink or remove them; --skip-bad trains without them",
    "unreadable": "repair or remove them; --skip-bad trains without them",
}


@dataclass
class Finding:
    """Images with the same problem, and what to do about it."""

    what: str
    remedy: str
    names: list[str]
    serious: bool = True


@dataclass
class DatasetCheck:
    name: str
    class_names: list[str]
    train: NDArray[np.int64]
    """training images of each class"""
    test: NDArray[np.int64]
    tasks: list[list[int]]
    domains: dict[str, tuple[int, int]] = field(default_factory=dict)
    """training and test images of each domain"""
    findings: list[Finding] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not any(finding.serious for finding in self.findings)

    def lines(self, limit: int = 10, classes: bool = False) -> list[str]:
        """The lines to print, with at most `limit` names per finding."""
        lines = [f"{self.name}: {len(self.class_names):,} classes, {self.train.sum():,} training and "
                 f"{self.test.sum():,} test images"]  # fmt: skip
        if len(self.class_names):
            lines.append(f"each class has {_span(self.train)} training and {_span(self.test)} test images")
        for number, task in enumerate(self.tasks if len(self.tasks) > 1 else ()):
            lines.append(f"task {number + 1:3}: {len(task):4} classes, {self.train[task].sum():7,} training and "
                         f"{self.test[task].sum():7,} test images")  # fmt: skip
        for number, (domain, counts) in enumerate(self.domains.items()):
            lines.append(f"domain {number}: {counts[0]:7,} training and {counts[1]:7,} test images of {domain}")
        if classes:
            lines += [f"{self.train[c]:7,} {self.test[c]:7,}  {c:4} {name}" for c, name in enumerate(self.class_names)]
        for finding in self.findings:
            lines += ["", f"{'PROBLEM' if finding.serious else 'note'}: {finding.what}"]
            lines += [f"    {name}" for name in finding.names[:limit]]
            if len(finding.names) > limit:
                lines.append(f"    and {len(finding.names) - limit:,} more (--limit N shows more)")
            lines.append(f"    To do: {finding.remedy}.")
        return [*lines, "", "All images can be read." if self.complete else "The data set is not complete."]


def check_dataset(dataset: DataSet, name: str, tasks: Sequence[Sequence[int]] | None = None) -> DatasetCheck:
    """Reads every image once."""
    count = len(dataset.class_names)
    train, test = (np.bincount(part.labels, minlength=count) for part in (dataset.train, dataset.test))
    report = DatasetCheck(name, dataset.class_names, train, test, [list(task) for task in tasks or dataset.tasks or []])
    if dataset.domains is not None and not report.tasks:
        numbers = (dataset.domains.train, dataset.domains.test)
        counts = (np.bincount(part, minlength=len(dataset.domains.names)).tolist() for part in numbers)
        report.domains = dict(zip(dataset.domains.names, zip(*counts, strict=True), strict=True))
    report.findings += _wrong_counts(dataset, name, train, test)
    content: dict[str, list[bytes | None]] = {}
    bad: dict[str, list[str]] = {}
    for split, images in (("train", dataset.train), ("test", dataset.test)):
        content[split] = []
        read = in_threads(partial(_read, images), range(len(images.labels)))
        for index, (digest, trouble) in enumerate(counted(read, len(images.labels), f"{split} images")):
            content[split].append(digest)
            if trouble is not None:
                sentence = trouble.rpartition(": ")[0]  # the finding states the remedy once
                kind = _kind(sentence.removeprefix(_label(images, split, index)))  # a file can be called broken.png
                bad.setdefault(kind, []).append(sentence)
    for kind, sentences in bad.items():
        remedy = REMEDIES[kind]
        if kind == "missing" and name in SOURCES and SOURCES[name].downloads:
            remedy = f"`mambacl data prepare {name}` with the same root; --skip-bad trains without them"
        files = "1 file is" if len(sentences) == 1 else f"{len(sentences):,} files are"
        report.findings.append(Finding(f"{files} {kind}", remedy, sentences))
    return _with_duplicates(report, dataset, content)


def _read(images: Images, index: int) -> tuple[bytes | None, str | None]:
    """The digest of an image's pixels, or what is wrong with the image."""
    try:
        pixels = images.image(index).numpy()
    except UserError as error:
        return None, str(error)
    digest = hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=16)
    digest.update(str(pixels.shape).encode())
    return digest.digest(), None


def _kind(sentence: str) -> str:
    words = {
        "is empty": "empty", "is missing": "missing", "is too large": "too large", "truncated": "truncated",
        "broken": "truncated",
    }  # fmt: skip
    return next((kind for word, kind in words.items() if word in sentence), "unreadable")


def _wrong_counts(dataset: DataSet, name: str, train: NDArray[np.int64], test: NDArray[np.int64]) -> list[Finding]:
    findings = []
    for split, counts in (("training", train), ("test", test)):
        if empty := [class_name for class_name, n in zip(dataset.class_names, counts, strict=True) if n == 0]:
            what = f"{len(empty)} {'class has' if len(empty) == 1 else 'classes have'} no {split} images"
            findings.append(Finding(what, "add some, or remove the class from the other split as well", empty))
    source = SOURCES.get(name)
    if source is None or source.counts is None:
        return findings
    found = (len(train), int(train.sum()), int(test.sum()))
    if source.counts != found:
        words = ("classes", "training images", "test images")
        compared = zip(words, source.counts, found, strict=True)
        names = [f"{what}: {here:,} instead of {due:,}" for what, due, here in compared if due != here]
        findings.append(Finding("the counts differ from those of the public data set", "prepare it again", names))
    return findings


def _with_duplicates(report: DatasetCheck, dataset: DataSet, content: dict[str, list[bytes | None]]) -> DatasetCheck:
    first: dict[str, dict[bytes, int]] = {"train": {}, "test": {}}
    twice: list[str] = []
    other_class: list[str] = []
    for split, images in (("train", dataset.train), ("test", dataset.test)):
        for index, digest in enumerate(content[split]):
            if digest is None:
                continue
            before = first[split].setdefault(digest, index)
            if before != index:
                same = images.labels[before] == images.labels[index]
                pair = f"{_label(images, split, before)} = {_label(images, split, index)}"
                (twice if same else other_class).append(pair)
    both = [digest for digest in first["test"] if digest in first["train"]]
    overlap = [f"{_label(dataset.train, 'train', first['train'][d])} = {_label(dataset.test, 'test', first['test'][d])}"
               for d in both]  # fmt: skip
    public = report.name in SOURCES and SOURCES[report.name].counts is not None
    keep = "the public data set has them; keep them for comparable results" if public else ""
    for names, what, remedy in (
        (overlap, "test images are among the training images, by content", "remove them from one of the two"),
        (other_class, "images appear again under another class", "check which class is right and remove the other"),
        (twice, "images appear again in their class", "remove one of each pair, or keep both"),
    ):
        if names:
            report.findings.append(Finding(f"{len(names):,} {what}", keep or remedy, names, serious=False))
    return report


def _label(images: Images, split: str, index: int) -> str:
    return str(images.files[index]) if isinstance(images, FileImages) else f"{split} image {index}"


def _span(counts: NDArray[np.int64]) -> str:
    low, high = counts.min(), counts.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
