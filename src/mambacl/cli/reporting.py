"""Commands that show what runs have found: report, audit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mambacl.cli.parsing import Parser
from mambacl.errors import UserError


def report(arguments: Sequence[str]) -> int:
    """an HTML page, figures and tables of one run or several: `mambacl report RUN...`"""
    words = "Writes a page, figures and tables; several runs are compared, and with --table set beside the paper's."
    parser = Parser(prog="mambacl report", description=words)
    parser.add_argument("runs", type=Path, nargs="*", help="run folders")
    parser.add_argument("--out", type=Path, default=None, help="folder for the page")
    formats = ("text", "markdown", "latex", "csv")
    parser.add_argument("--format", choices=formats, default="text", help="of the printed table")
    parser.add_argument("--table", metavar="NAME", help="a table of the paper, with its values: main, ablation, ...")
    foreign = "accuracies from PILOT, Mammoth, Avalanche, or as CSV or JSON; may be repeated"
    parser.add_argument(
        "--import", dest="imports", type=Path, action="append", default=[], metavar="FILE", help=foreign
    )
    parser.add_argument("--import-method", metavar="NAME", help="the method of the imported files")
    parser.add_argument("--import-benchmark", metavar="NAME", help="their benchmark, such as cifar100-10")
    parser.add_argument("--accuracy", metavar="METRIC", help="with --table, instead of final_accuracy_tasks")
    parser.add_argument("--forgetting", metavar="METRIC", help="with --table, instead of forgetting")
    given = parser.parse_intermixed_args(arguments)
    if not (given.runs or given.imports or given.table):
        raise UserError("Say which runs to report, as in mambacl report runs/<preset>-<method>-0.")
    if not given.table and (given.accuracy or given.forgetting):
        raise UserError("--accuracy and --forgetting choose what stands beside the paper's values: add --table NAME.")

    from mambacl.reports import comparison_table, load_run, write_report
    from mambacl.reports.importing import import_records
    from mambacl.reports.rendering import to_csv, to_latex, to_markdown, to_text

    imported = import_records(given.imports, given.import_method, given.import_benchmark)
    runs = list({path.resolve(): path for path in given.runs}.values())
    pages = [path for path in runs if (path / "table.csv").exists() and not (path / "config.yaml").exists()]
    if pages and len(pages) < len(runs):  # as in `mambacl report runs/*`
        print(f"Left out, being comparisons themselves: {', '.join(map(str, pages))}", file=sys.stderr)
        runs = [path for path in runs if path not in pages]
    if given.table:
        return _beside_the_paper(given, [*(load_run(path) for path in runs), *imported])
    page = write_report(runs, given.out, imported)
    table = comparison_table([*(load_run(path) for path in runs), *imported])
    print({"text": to_text, "markdown": to_markdown, "latex": to_latex, "csv": to_csv}[given.format](table))
    print(f"Report: {page}", file=sys.stderr)
    return 0


def _beside_the_paper(given: Any, records: list[Any]) -> int:
    from mambacl.paper.comparison import MetricNames, compare_with_paper
    from mambacl.paper.page import as_table, long_csv, write_paper_table
    from mambacl.reports.rendering import to_latex, to_markdown, to_text
    from mambacl.reports.writing import comparison_folder

    chosen = {key: getattr(given, key) for key in ("accuracy", "forgetting") if getattr(given, key)}
    compared = compare_with_paper(given.table, records, MetricNames(**chosen))
    if given.format == "csv":
        print(long_csv(compared), end="")
    else:
        print({"text": to_text, "markdown": to_markdown, "latex": to_latex}[given.format](as_table(compared)))
    if records or given.out:  # the paper's values alone are printed, and leave nothing behind
        target = given.out or comparison_folder([record.folder for record in records])
        print(f"Report: {write_paper_table(compared, target)}", file=sys.stderr)
    return 0


def audit(arguments: Sequence[str]) -> int:
    """what has moved in a run since each task, and which updates were protected: `mambacl audit RUN`"""
    words = (
        "Measures, block by block, how far delta, exp(delta A), delta B, C and the output have moved since each task, "
        "on the images that --audit-images kept, and how much of each update fell into protected directions."
    )
    parser = Parser(prog="mambacl audit", description=words)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--task", type=int, default=None, help="show the blocks of this task, counted from 1")
    parser.add_argument("--device", default=None, help="another device than the run's own: cpu, cuda, cuda:N")
    given = parser.parse_args(arguments)

    from mambacl.reports import write_report
    from mambacl.reports.audits import drift_table, updates_table
    from mambacl.reports.rendering import to_text
    from mambacl.training.api import audit as audit_run

    found = audit_run(given.run, given.device)
    known = [entry["task"] + 1 for entry in found["tasks"]]
    if given.task is not None and given.task not in known:
        kept = (
            f"there are those of tasks {', '.join(map(str, known))}" if known else "the run kept none (--audit-images)"
        )
        raise UserError(f"No images of task {given.task} were kept: {kept}.")
    if known:
        print(to_text(drift_table(found, None if given.task is None else given.task - 1)))
    else:
        print("The run kept no images (train with --audit-images N): what has moved cannot be measured.\n")
    if found["updates"]:
        print(to_text(updates_table(found)))
    else:
        print("No update was projected.\n")
    print(f"Report: {write_report([given.run])}", file=sys.stderr)
    return 0
