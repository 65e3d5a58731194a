"""Writes a report: the page, its figures as files, and the table in several formats.

A folder with a comparison has `runs.json`: the runs that each page shows. A page of other runs is not overwritten.
"""

import itertools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mambacl.errors import UserError
from mambacl.files import write_bytes
from mambacl.reports.rendering import to_csv, to_latex, to_markdown
from mambacl.reports.runs import RunRecord, load_run
from mambacl.reports.tables import comparison_table

if TYPE_CHECKING:
    from mambacl.data import DataSet

PAGE, RUNS = "report.html", "runs.json"


def write_report(
    folders: str | Path | Sequence[str | Path],
    out: Path | None = None,
    imported: Sequence[RunRecord] = (),
    overwrite: bool = False,
    dataset: "DataSet | None" = None,
) -> Path:
    """Writes the report of one run, or a comparison of several. Returns the path of its `report.html`.

    `imported` are records of other tools to compare, from `import_records`.

    `dataset` is that of the runs, if this process has it open: their pages show some images.

    `out` is the folder to write to. By default, a run's report goes to the run folder, and a comparison to `comparison`
    in the folder that contains all the runs, or to `comparison-2` and so on if that holds other runs. It also writes
    `figures/*.png` and `table.md`, `.tex` and `.csv`. A report of other runs in `out` is an error without `overwrite`.
    """
    if isinstance(folders, (str, Path)):
        folders = [Path(folders)]
    unique = list({Path(folder).resolve(): Path(folder) for folder in folders}.values())
    if not unique and not imported:
        raise UserError("A report needs at least one run folder, e.g. `mambacl report runs/<preset>-<method>-0`.")
    records = [*(load_run(folder, dataset) for folder in unique), *imported]
    single = len(records) == 1 and not imported
    shown = [record.folder for record in records]
    own = single and (out is None or Path(out).resolve() == unique[0].resolve())  # the run's page in its folder
    target = unique[0] if own else report_folder(out, shown, overwrite=overwrite)
    # Late, because importing matplotlib takes most of a second.
    from mambacl.reports.pages import comparison_page, run_page

    page = run_page(records[0]) if single else comparison_page(records)
    table = comparison_table(records)
    files: dict[str, bytes] = {f"figures/{chart.name}.png": chart.drawing.png for chart in page.charts}
    files |= {
        "table.md": to_markdown(table).encode(),
        "table.tex": to_latex(table).encode(),
        "table.csv": to_csv(comparison_table(records, tasks="all")).encode(),
        PAGE: page.html.encode(),  # last, so that a page is never without its files
    }
    if not own:
        files[RUNS] = remembered(target, PAGE, shown)
    write_files(target, files)
    return target / PAGE


def write_files(target: Path, files: Mapping[str, bytes]) -> None:
    """All of them; if that fails, a new folder does not stay."""
    new = not target.exists()
    try:
        for name, data in files.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(target / name, data)
    except OSError as error:
        if new:
            shutil.rmtree(target, ignore_errors=True)
        raise UserError(
            f"The report cannot be written to {target} ({error.strerror or error}); choose another folder with --out."
        ) from None


def comparison_folder(folders: Sequence[Path]) -> Path:
    """`comparison` in the deepest folder that contains all the runs."""
    try:
        return Path(os.path.commonpath([folder.resolve().parent for folder in folders])) / "comparison"
    except ValueError:  # on different drives
        raise UserError("These runs have no common folder; choose one for the comparison with --out.") from None


def report_folder(
    out: Path | None, folders: Sequence[Path], page: str = PAGE, overwrite: bool = False, numbered: bool = False
) -> Path:
    """The folder for a page that shows these runs: `out`, or `comparison` next to them. If it has a page of other runs,
    the default's name gets the next free number, and `out` as well if `numbered`; otherwise it is an error."""
    first = Path(out) if out is not None else comparison_folder(folders)
    if overwrite or _same_runs(first, page, folders):
        return first
    if out is not None and not numbered:
        raise UserError(f"{first} has a report of other runs: choose another --out, or replace it with --overwrite.")
    names = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in names if _same_runs(folder, page, folders))


def _same_runs(target: Path, page: str, folders: Sequence[Path]) -> bool:
    """Whether a folder has no such page yet, or one of the same runs."""
    return not (target / page).exists() or _remembered(target).get(page) == _names(target, folders)


def remembered(target: Path, page: str, folders: Sequence[Path]) -> bytes:
    """The new content of runs.json, after writing a page that shows these runs."""
    return json.dumps({**_remembered(target), page: _names(target, folders)}, indent=1).encode()


def _remembered(target: Path) -> dict[str, list[str]]:
    try:
        found = json.loads((target / RUNS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _names(target: Path, folders: Sequence[Path]) -> list[str]:
    """The runs, relative to the page's folder if possible, so that both can move together."""
    try:
        return sorted({Path(os.path.relpath(folder.resolve(), target.resolve())).as_posix() for folder in folders})
    except ValueError:  # on different drives
        return sorted({str(folder.resolve()) for folder in folders})
