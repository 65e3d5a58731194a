"""Writes a report: the page, its figures as files, and the table in several formats."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mambacl.errors import UserError
from mambacl.files import write_bytes
from mambacl.reports.rendering import to_csv, to_latex, to_markdown
from mambacl.reports.runs import RunRecord, load_run
from mambacl.reports.tables import comparison_table


def write_report(
    folders: str | Path | Sequence[str | Path], out: Path | None = None, imported: Sequence[RunRecord] = ()
) -> Path:
    """Writes the report of one run, or a comparison of several. Returns the path of its `report.html`.

    `imported` are records of other tools to compare, from `import_records`.

    `out` is the folder to write to. By default, a run's report goes to the run folder, and a comparison to `comparison`
    in the folder that contains all the runs. It also writes `figures/*.png` and `table.md`, `.tex` and `.csv`.
    """
    if isinstance(folders, (str, Path)):
        folders = [Path(folders)]
    unique = list({Path(folder).resolve(): Path(folder) for folder in folders}.values())
    if not unique and not imported:
        raise UserError("A report needs at least one run folder, e.g. `mambacl report runs/<preset>-<method>-0`.")
    records = [*(load_run(folder) for folder in unique), *imported]
    single = len(records) == 1 and not imported
    target = Path(out) if out is not None else unique[0] if single else comparison_folder([r.folder for r in records])
    # Late, because importing matplotlib takes most of a second.
    from mambacl.reports.pages import comparison_page, run_page

    page = run_page(records[0]) if single else comparison_page(records)
    table = comparison_table(records)
    files = {f"figures/{picture.name}": picture.png for picture in page.pictures}
    files |= {
        "table.md": to_markdown(table).encode(),
        "table.tex": to_latex(table).encode(),
        "table.csv": to_csv(comparison_table(records, tasks="all")).encode(),
        "report.html": page.html.encode(),  # last, so that a page is never without its files
    }
    write_files(target, files)
    return target / "report.html"


def write_files(target: Path, files: Mapping[str, bytes]) -> None:
    try:
        for name, data in files.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(target / name, data)
    except OSError as error:
        raise UserError(
            f"The report cannot be written to {target} ({error.strerror or error}); choose another folder with --out."
        ) from None


def comparison_folder(folders: Sequence[Path]) -> Path:
    """`comparison` in the deepest folder that contains all the runs."""
    try:
        return Path(os.path.commonpath([folder.resolve().parent for folder in folders])) / "comparison"
    except ValueError:  # on different drives
        raise UserError("These runs have no common folder; choose one for the comparison with --out.") from None
