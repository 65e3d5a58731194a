"""Commands that show results: report, audit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from mambacl.cli.training import AnotherDevice, Imports, NewRoot, RunPath, import_files
from mambacl.errors import UserError
from mambacl.lazy import loading_pytorch
from mambacl.options import at_least
from mambacl.status import status

Format = Literal["text", "markdown", "latex", "csv"]


def _tables() -> str:
    from mambacl.paper.quoted import table_names

    return f"compare with a table of the paper: {', '.join(table_names())}"


def report(
    *run: RunPath,
    out: Annotated[Path | None, "folder for the page; default: the run's, or comparison next to the runs"] = None,
    overwrite: Annotated[bool, "replace a report of other runs in that folder"] = False,
    format: Annotated[Format, "format of the printed table"] = "text",
    table: Annotated[str | None, _tables] = None,
    import_: Annotated[
        list[Path] | None, "accuracies from PILOT, Mammoth, Avalanche, or as CSV or JSON; can be repeated"
    ] = None,
    import_method: Annotated[str | None, "method of the imported files"] = None,
    import_benchmark: Annotated[str | None, "benchmark of the imported files, such as cifar100-10"] = None,
    accuracy: Annotated[str | None, "with --table: metric to use instead of final_accuracy_tasks"] = None,
    forgetting: Annotated[str | None, "with --table: metric to use instead of forgetting"] = None,
) -> None:
    """write an HTML page, figures and tables of one run or several: `mambacl report RUN...`

    Several runs are compared; --table compares them with the paper's values."""
    imports = import_ or []
    if not (run or imports or table):
        raise UserError("Name the runs to report, e.g. `mambacl report runs/<preset>-<method>-0`.")
    if not table and (accuracy or forgetting):
        raise UserError("--accuracy and --forgetting choose what to compare with the paper: add --table NAME.")

    with status("writing the report"):
        from mambacl.reports import comparison_table, load_run, write_report
        from mambacl.reports.importing import import_records
        from mambacl.reports.rendering import to_csv, to_latex, to_markdown, to_text

    imported = import_records(imports, import_method, import_benchmark)
    folders = list({path.resolve(): path for path in run}.values())
    pages = [path for path in folders if (path / "table.csv").exists() and not (path / "config.yaml").exists()]
    if pages and len(pages) < len(folders):  # as in `mambacl report runs/*`
        print(f"Skipped, because they are comparisons: {', '.join(map(str, pages))}", file=sys.stderr)
        folders = [path for path in folders if path not in pages]
    if table:
        metrics = {"accuracy": accuracy, "forgetting": forgetting}
        records = [*(load_run(path) for path in folders), *imported]
        return _compare_with_paper(table, format, out, overwrite, metrics, records)
    with status("writing the report"):
        page = write_report(folders, out, imported, overwrite)
    compared = comparison_table([*(load_run(path) for path in folders), *imported])
    print({"text": to_text, "markdown": to_markdown, "latex": to_latex, "csv": to_csv}[format](compared))
    print(f"Report: {page}", file=sys.stderr)


def _compare_with_paper(
    table: str,
    format: Format,
    out: Path | None,
    overwrite: bool,
    metrics: dict[str, str | None],
    records: list[Any],
) -> None:
    from mambacl.paper.comparison import MetricNames, compare_with_paper
    from mambacl.paper.page import as_table, as_text, long_csv, write_paper_table
    from mambacl.reports.rendering import to_latex, to_markdown
    from mambacl.reports.writing import RUNS, remembered, report_folder, write_files

    compared = compare_with_paper(table, records, MetricNames(**{key: name for key, name in metrics.items() if name}))
    if format == "csv":
        print(long_csv(compared), end="")
    elif format == "text":
        print(as_text(compared))
    else:
        print({"markdown": to_markdown, "latex": to_latex}[format](as_table(compared)))
    if records or out:  # the paper's values alone are only printed
        folders, page = [record.folder for record in records], f"paper-{table}.html"
        target = report_folder(out, folders, page, overwrite)
        print(f"Report: {write_paper_table(compared, target)}", file=sys.stderr)
        write_files(target, {RUNS: remembered(target, page, folders)})


def audit(
    run: RunPath,
    *,
    task: Annotated[int | None, "show each block for this task, counted from 1", at_least(1)] = None,
    device: AnotherDevice = None,
    root: NewRoot = None,
    import_: Imports = None,
) -> None:
    """measure how far a run's features have drifted, and how far updates were projected: `mambacl audit RUN`

    Measures, block by block, how far delta, exp(delta A), delta B, C and the output have drifted since each task, on
    the images that --audit-images kept, and how much of each update fell into protected directions."""
    with loading_pytorch():
        from mambacl.reports import write_report
        from mambacl.reports.audits import drift_table, updates_table
        from mambacl.reports.rendering import to_text
        from mambacl.training.api import audit as audit_run

    import_files(import_)
    with status("measuring the drift"):
        found = audit_run(run, device, root)
    known = [entry["task"] + 1 for entry in found["tasks"]]
    if task is not None and task not in known:
        kept = f"it kept those of tasks {', '.join(map(str, known))}" if known else "train with --audit-images N"
        raise UserError(f"The run kept no images of task {task}: {kept}.")
    if known:
        print(to_text(drift_table(found, None if task is None else task - 1)))
    else:
        print("The run kept no images, so drift cannot be measured: train with --audit-images N.\n")
    if found["updates"]:
        print(to_text(updates_table(found)))
    else:
        print("No update was projected.\n")
    with status("writing the report"):
        page = write_report([run])
    print(f"Report: {page}", file=sys.stderr)
