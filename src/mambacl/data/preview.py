"""A picture of the tasks of a stream: one row per task with its classes, counts and some of its images."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mambacl.data.dataset import DataSet, Domains, indices_by_group
from mambacl.errors import UserError

SIDE, GAP, TEXT = 64, 4, 330  # pixels


def preview_tasks(
    dataset: DataSet, tasks: Sequence[Sequence[int]], images: int = 8, domains: Domains | None = None
) -> tuple[Image.Image, list[str]]:
    """The picture, and one line of text per task. It shows training images of as many classes as fit. If each task is a
    domain, `domains` are numbered like the tasks."""
    font = ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), 12)
    size = (TEXT + images * (SIDE + GAP) + GAP, len(tasks) * (SIDE + GAP) + GAP)
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    splits, classes = (dataset.train, dataset.test), len(dataset.class_names)
    members, tested = (indices_by_group(part.labels, classes) for part in splits)
    lines = []
    for row, task in enumerate(tasks):
        top = GAP + row * (SIDE + GAP)
        if domains is not None:
            parts = zip(splits, (domains.train, domains.test), strict=True)
            groups = (np.where(which == row, part.labels, classes) for part, which in parts)  # the rest comes last
            members, tested = (indices_by_group(labels, classes + 1) for labels in groups)
            task = [c for c in task if len(members[c])]  # a domain can lack classes
        counts = f"{len(task)} classes, {_total(members, task):,} + {_total(tested, task):,} images"
        counts = counts if domains is None else f"{domains.names[row]}: {counts}"
        names = ", ".join(dataset.class_names[c] for c in task)
        lines.append(f"task {row + 1:3}: {counts}: {shortened(names, 100)}")
        for number, text in enumerate((f"task {row + 1}: {counts}", names[:44], shortened(names[44:], 44))):
            pen.text((GAP, top + 4 + 18 * number), text, fill="black", font=font)
        for column in range(images):
            found = members[task[column % len(task)]]
            turn = column // len(task)
            if turn < len(found):
                place = (TEXT + GAP + column * (SIDE + GAP), top)
                picture.paste(_thumbnail(dataset, int(found[turn])), place)
    return picture, lines


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _total(members: Sequence[np.ndarray], task: Sequence[int]) -> int:
    return sum(len(members[c]) for c in task)


def _thumbnail(dataset: DataSet, index: int) -> Image.Image:
    """The image in a square; a crossed-out box if it cannot be read."""
    square = Image.new("RGB", (SIDE, SIDE), (235, 235, 235))
    try:
        image = Image.fromarray(np.ascontiguousarray(dataset.train.image(index).permute(1, 2, 0).numpy()))
    except UserError:
        ImageDraw.Draw(square).line([(0, 0), (SIDE, SIDE)], fill="red", width=2)
        return square
    scale = SIDE / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    square.paste(image.resize((width, height)), ((SIDE - width) // 2, (SIDE - height) // 2))
    return square
