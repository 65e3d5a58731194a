"""Commands that change a finished run: learn, rollback."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mambacl.cli.deploy import chosen_limits
from mambacl.config import Device
from mambacl.deploy.comparison import Limits
from mambacl.deploy.hub_files import refuse_address
from mambacl.errors import UserError
from mambacl.files import expanded
from mambacl.lazy import loading_pytorch
from mambacl.options import at_least
from mambacl.status import working

if TYPE_CHECKING:
    from mambacl.deploy.learning import Count, Learning


def learn(
    run: Annotated[str, "a run folder, or a checkpoint that was trained elsewhere"],
    *,
    new: Annotated[Path | None, "a folder with a folder of images for each class"] = None,
    more: Annotated[bool, "the folder also has images of classes that the model knows"] = False,
    test: Annotated[Path | None, "a folder like --new with test images: compare before and after"] = None,
    own: Limits,
    limits: Annotated[Path | None, "a YAML file with these limits; the command line comes first"] = None,
    unbalanced: Annotated[bool, "do not help classes that have few images"] = False,
    dry_run: Annotated[bool, "change nothing; estimate time, memory, disk and free capacity"] = False,
    skip_bad: Annotated[bool, "leave out images that cannot be read, and list them"] = False,
    device: Annotated[Device, "where to compute: auto, cpu, cuda, cuda:N"] = "auto",
    backbone: Annotated[str | None, "of a checkpoint: its model; `mambacl models` lists them"] = None,
    classes: Annotated[Path | None, "of a checkpoint: a file with one class per line, in its order"] = None,
    protect: Annotated[Path | None, "of a checkpoint: a folder with some images of its kind"] = None,
    out: Annotated[Path | None, "of a checkpoint: the run folder to make"] = None,
    **options: Any,
) -> int:
    """add classes to a finished run, without its data: `mambacl learn RUN --new FOLDER`

    The classes of FOLDER/CLASS/* become the next task, trained as the run's own tasks were. Past a limit the run keeps
    its old model, and the exit code is 1. `mambacl rollback` undoes it."""
    _check_run(run)
    if new is None:
        raise UserError("Name the folder with the new classes: --new FOLDER, which holds CLASS/* for each class.")
    bounds = chosen_limits(own, limits)
    with working("loading the model", "computing") as show:
        from mambacl.deploy.learning import learn as learn_task

        done = learn_task(
            run,
            new,
            more=more,
            test=test,
            limits=bounds,
            dry_run=dry_run,
            unbalanced=unbalanced,
            skip_bad=skip_bad,
            device=device,
            show=show,
            backbone=backbone,
            classes=classes,
            protect=protect,
            out=out,
            **options,
        )
    print(_summary(done))
    if done.comparison is not None:
        from mambacl.deploy.comparison_page import summary_table
        from mambacl.reports.rendering import to_text

        print(to_text(summary_table(done.comparison)))
    if done.after:
        print(_table(done))
    for sentence in done.broken:
        print(f"mambacl: {sentence}", file=sys.stderr)
    if done.broken:
        print(f"{done.folder} keeps its old model.")
        return 1
    if bounds != Limits() and not dry_run:
        print("The new model is within the limits.")
    if not done.dry_run:
        print(f"`mambacl rollback {done.folder} --task {done.task - 1}` undoes it.")
    return 0


def rollback(
    run: Annotated[str, "a run folder"],
    *,
    task: Annotated[int | None, "the number of the task, counting from 1", at_least(1)] = None,
) -> None:
    """make a run answer as it did after an earlier task, bit for bit: `mambacl rollback RUN --task 3`

    It deletes nothing. The tasks after it are forgotten when the run learns the next one."""
    _check_run(run)
    if task is None:
        raise UserError("Name the task to go back to: --task N, counting from 1.")
    with loading_pytorch():
        from mambacl.deploy.learning import rollback as roll_back

    classes = roll_back(run, task)
    print(f"{run} answers as after task {task}, with {_some(classes)}.")


def _check_run(run: str) -> None:
    """Refuses a mistyped path before PyTorch is imported. A file gets a sentence about exported models later."""
    refuse_address(run)
    place = expanded(run)
    if not place.is_file():
        from mambacl.training.folder import RunFolder

        RunFolder.existing(place)


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
    if known and not done.new:
        what = f"{images} more image{'' if images == 1 else 's'} of {_some(list(done.images), 'known class')}"
    size = megabytes(done.state_bytes)
    left_out = len(done.skipped)
    words = "image could not be read and was skipped" if left_out == 1 else "images could not be read and were skipped"
    notes = [*done.notes, *([f"{left_out} {words}."] if left_out else [])]
    if done.dry_run:
        room = [done.capacity.describe()] if done.capacity is not None else []
        sentences = [
            f"{done.folder} would learn {what} as task {done.task}, in about {_duration(done.seconds)}.",
            f"The model would have {done.classes} classes, and a state of about {size}, which stays on disk for each "
            "task.",
            f"Learning needs about {megabytes(done.memory_bytes)} of memory and {megabytes(done.disk_bytes)} on disk.",
            *room,
            *notes,
            "Nothing has changed.",
        ]
    elif done.broken:
        sentences = [f"{what[0].upper()}{what[1:]} took {_duration(done.seconds)} to learn.", *notes]
    else:
        sentences = [
            f"{done.folder} has learned {what} as task {done.task}, in {_duration(done.seconds)}.",
            f"The model has {done.classes} classes, its state {size}.",
            *notes,
        ]
    return "\n".join(sentences)


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


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
