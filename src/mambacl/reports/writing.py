"""Writes a report: the page, its figures as files, and the table in the formats that papers and tools want."""

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
    """The report of one run, or a comparison of several; returns the path of its `report.html`.

    Records of other tools, from `import_records`, are compared with the runs.

    It goes to `out`; if that is not given, a run's report goes to the run's own folder, and a comparison to
    `comparison` in the folder that all the runs share. Beside the page: `figures/*.png` and `table.md`, `.tex`, `.csv`.
    """
    if isinstance(folders, (str, Path)):
        folders = [Path(folders)]
    unique = list({Path(folder).resolve(): Path(folder) for folder in folders}.values())
    if not unique and not imported:
        raise UserError("A report needs at least one run folder, as in mambacl report runs/<preset>-<method>-0.")
    records = [*(load_run(folder) for folder in unique), *imported]
    single = len(records) == 1 and not imported
    target = Path(out) if out is not None else unique[0] if single else comparison_folder([r.folder for r in records])
    # Not before there is something to draw: matplotlib takes most of a second to load.
    from mambacl.reports.comparison_page import comparison_page
    from mambacl.reports.run_page import run_page

    page = run_page(records[0]) if single else comparison_page(records)
    table = comparison_table(records)
    files = {f"figures/{picture.name}": picture.png for picture in page.pictures}
    files |= {
        "table.md": to_markdown(table).encode(),
        "table.tex": to_latex(table).encode(),
        "table.csv": to_csv(comparison_table(records, tasks="all")).encode(),
        "report.html": page.html.encode(),  # last: whoever finds the page finds all of it
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
            f"The report cannot be written to {target} ({error.strerror or error}); give another folder with --out."
        ) from None


def comparison_folder(folders: Sequence[Path]) -> Path:
    """`comparison` in the deepest folder that holds all the runs."""
    try:
        return Path(os.path.commonpath([folder.resolve().parent for folder in folders])) / "comparison"
    except ValueError:  # on unique drives
        raise UserError("These runs have no folder in common; say with --out where the comparison goes.") from None
