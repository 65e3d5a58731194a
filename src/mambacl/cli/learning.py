"""Commands that change a finished run: learn, rollback."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mambacl.cli.deploy import _with_progress
from mambacl.cli.training import RunPath, status
from mambacl.config import Device
from mambacl.errors import UserError
from mambacl.options import at_least

if TYPE_CHECKING:
    from mambacl.deploy.learning import Count, Learning


def learn(
    run: RunPath,
    *,
    new: Annotated[Path | None, "a folder with a folder of images for each class"] = None,
    more: Annotated[bool, "the folder also has images of classes that the model knows"] = False,
    test: Annotated[Path | None, "a folder like --new with test images: compare before and after"] = None,
    unbalanced: Annotated[bool, "do not help classes that have few images"] = False,
    dry_run: Annotated[bool, "change nothing; estimate time and size"] = False,
    skip_bad: Annotated[bool, "leave out images that cannot be read, and list them"] = False,
    device: Annotated[Device, "where to compute: auto, cpu, cuda, cuda:N"] = "auto",
) -> None:
    """add classes to a finished run, without its data: `mambacl learn RUN --new FOLDER`

    The classes of FOLDER/CLASS/* become the next task; one image per class is enough. `mambacl rollback` undoes it.
    It works with runs of the method analytic, the default."""
    _check_run(run)
    if new is None:
        raise UserError("Name the folder with the new classes: --new FOLDER, which holds CLASS/* for each class.")
    with status("loading the model"):
        from mambacl.deploy.learning import learn as learn_task

    done = learn_task(
        run,
        new,
        more=more,
        test=test,
        dry_run=dry_run,
        unbalanced=unbalanced,
        skip_bad=skip_bad,
        device=device,
        show=_with_progress,
    )
    print(_summary(done))
    if done.after:
        print(_table(done))
    if not done.dry_run:
        print(f"`mambacl rollback {run} --task {done.task - 1}` undoes it.")


def rollback(
    run: RunPath, *, task: Annotated[int | None, "the number of the task, counting from 1", at_least(1)] = None
) -> None:
    """make a run answer as it did after an earlier task, bit for bit: `mambacl rollback RUN --task 3`

    It deletes nothing. The tasks after it are forgotten when the run learns the next one."""
    _check_run(run)
    if task is None:
        raise UserError("Name the task to go back to: --task N, counting from 1.")
    with status("loading PyTorch"):
        from mambacl.deploy.learning import rollback as roll_back

    classes = roll_back(run, task)
    print(f"{run} answers as after task {task}, with {_some(classes)}.")


def _check_run(run: Path) -> None:
    """Refuses a mistyped path before PyTorch is imported. A file gets a sentence about exported models later."""
    if not run.is_file() and not (run / "config.yaml").is_file():
        raise UserError(f"{run} is not a run folder (it has no config.yaml); runs are in runs/ unless --out is set.")


def _some(names: list[str], noun: str = "class") -> str:
    """The number of classes, and the first names."""
    if not names:
        return f"no {noun}"
    word = noun if len(names) == 1 else f"{noun}es"
    return f"{len(names)} {word} ({', '.join(names[:6])}{', ...' if len(names) > 6 else ''})"


def _summary(done: Learning) -> str:
    images = sum(done.images.values())
    known = len(done.images) - len(done.new)
    extra = f" and more of {known} known ones" if known else ""
    what = f"{_some(done.new, 'new class')}{extra} from {images} image{'' if images == 1 else 's'}"
    size = f"{done.state_bytes / 1e6:.1f} MB"
    if done.dry_run:
        return (
            f"{done.folder} would learn {what} as task {done.task}, in about {_duration(done.seconds)}. The model "
            f"would have {done.classes} classes, and its state {size}, which stays on disk for each task. Nothing has "
            "changed."
        )
    left_out = len(done.skipped)
    words = "image could not be read and was skipped" if left_out == 1 else "images could not be read and were skipped"
    skipped = f" {left_out} {words}." if left_out else ""
    return (
        f"{done.folder} has learned {what} as task {done.task}, in {_duration(done.seconds)}. The model has "
        f"{done.classes} classes, its state {size}.{skipped}"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.0f} min"


def _table(done: Learning) -> str:
    """Accuracy before and after on the user's test images, by class; means over images for old and new classes."""
    from mambacl.reports.rendering import to_text
    from mambacl.reports.tables import Column, Table

    groups = {"known": [], "new": []}  # type: dict[str, list[str]]
    for name in done.after:
        groups["new" if name in done.new else "known"].append(name)
    rows: list[tuple[str, ...]] = []
    for word, names in groups.items():
        rows += [(name, word, *_cells(done, [name])) for name in names]
    rows += [(f"all {word}", word, *_cells(done, names)) for word, names in groups.items() if names]
    titles = ("class", "kind", "test images", "before", "after", "change")
    columns = tuple(Column(title, text=title in titles[:2]) for title in titles)
    return to_text(Table("Accuracy on your test images", columns, tuple(rows)))


def _cells(done: Learning, names: Iterable[str]) -> tuple[str, str, str, str]:
    names = list(names)
    before, after = (_share([counts[name] for name in names]) for counts in (done.before, done.after))
    total = sum(done.after[name].total for name in names)
    if all(name in done.new for name in names):  # it could not know them
        return str(total), "-", f"{after:.1%}", "-"
    return str(total), f"{before:.1%}", f"{after:.1%}", f"{100 * (after - before):+.1f}"


def _share(counts: list[Count]) -> float:
    return sum(count.right for count in counts) / max(1, sum(count.total for count in counts))
