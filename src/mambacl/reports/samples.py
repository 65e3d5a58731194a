"""Small pictures of a run's test images, read from its data while a page is written; nothing else keeps them."""

import base64
import io
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mambacl.errors import UserError
from mambacl.reports.runs import RunRecord
from mambacl.training.folder import RunFolder

SIDE = 72  # pixels
Place = tuple[int, int]  # task, and position among its test images


def thumbnails(record: RunRecord, wanted: Iterable[Place]) -> tuple[dict[Place, str], str]:
    """The pictures as addresses for an HTML page; or none, and the reason in one sentence."""
    from mambacl.data.dataset import indices_by_group
    from mambacl.data.stream import open_data
    from mambacl.data.tasks import tasks_or_domains

    try:
        config = RunFolder(record.folder).config().stream
        dataset = record.dataset or open_data(config)
        _, tasks, domains = tasks_or_domains(dataset, config.scenario, *config.cut)
        if domains is None:
            task_of = np.empty(len(dataset.class_names), dtype=np.int64)
            for t, classes in enumerate(tasks):
                task_of[classes] = t
            groups = indices_by_group(task_of[dataset.test.labels], len(tasks))
        else:
            groups = indices_by_group(domains.test, len(tasks))
        if tasks != record.tasks or [len(group) for group in groups] != record.results["total"]:
            return {}, "The data have changed since the run, so the page has no sample images."
        return {(t, i): _address(dataset.test.image(int(groups[t][i])).permute(1, 2, 0).numpy()) for t, i in wanted}, ""
    except (UserError, OSError, IndexError) as error:
        return {}, f"The page has no sample images, because the run's data cannot be read: {error}"


def _address(pixels: NDArray[np.uint8]) -> str:
    image = Image.fromarray(np.ascontiguousarray(pixels))
    scale = min(1.0, SIDE / max(image.size))
    image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    out = io.BytesIO()
    image.save(out, format="jpeg", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode("ascii")
