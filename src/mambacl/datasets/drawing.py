"""A picture of a stream: a row a task with its classes, counts and some of its images."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mambacl.datasets.base import DataSet
from mambacl.errors import UserError

SIDE, GAP, TEXT = 64, 4, 330  # pixels


def draw_tasks(dataset: DataSet, tasks: Sequence[Sequence[int]], images: int = 8) -> tuple[Image.Image, list[str]]:
    """The picture, and a line of text a task. Images are training images, of as many classes as there is room for."""
    font = ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), 12)
    size = (TEXT + images * (SIDE + GAP) + GAP, len(tasks) * (SIDE + GAP) + GAP)
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    members = _members(dataset)
    train, test = (
        np.bincount(part.labels, minlength=len(dataset.class_names)) for part in (dataset.train, dataset.test)
    )
    lines = []
    for row, task in enumerate(tasks):
        top = GAP + row * (SIDE + GAP)
        counts = f"{len(task)} classes, {train[list(task)].sum():,} + {test[list(task)].sum():,} images"
        names = ", ".join(dataset.class_names[c] for c in task)
        lines.append(f"task {row + 1:3}: {counts}: {shortened(names, 100)}")
        words = [
            f"task {row + 1}: {counts}",
            shortened(names, 44),
            shortened(names[44:], 44) if len(names) > 44 else "",
        ]
        if len(names) > 44:
            words[1] = names[:44]
        for number, text in enumerate(words):
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


def _members(dataset: DataSet) -> list[np.ndarray]:
    order = np.argsort(dataset.train.labels, kind="stable")
    counts = np.bincount(dataset.train.labels, minlength=len(dataset.class_names))
    return np.split(order, np.cumsum(counts)[:-1])


def _thumbnail(dataset: DataSet, index: int) -> Image.Image:
    """The whole image in a square; a crossed box for one that cannot be read."""
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
