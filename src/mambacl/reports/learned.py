"""The tasks that `mambacl learn` has added to a run, as a table."""

from mambacl.reports.tables import Column, Table
from mambacl.training.learned import History

MOST_NAMES = 12


def learned_table(history: History) -> Table:
    rows = []
    for number, task in enumerate(history.tasks, start=history.trained + 1):
        more = [name for name in task.images if name not in task.classes]
        rows.append((
            str(number), str(len(task.classes)), str(sum(task.images.values())), _names(task.classes),
            _names(more) or None, "yes" if number <= history.current else "rolled back",
        ))  # fmt: skip
    columns = (
        Column("task"), Column("new classes"), Column("images"), Column("names", text=True),
        Column("more images of", text=True), Column("in use", text=True),
    )  # fmt: skip
    notes = ["accuracies on this page are those of the training: the run has no test images of classes learned since"]
    if history.current < history.trained:
        notes.append(f"the model answers as after task {history.current}: `mambacl rollback` took back the later ones")
    return Table("Tasks added by mambacl learn", columns, tuple(rows), tuple(notes))


def _names(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
