"""The page that sets several runs side by side."""

from collections.abc import Sequence

import numpy as np

from mambacl.reports import figures
from mambacl.reports.groups import Group, Value, common_headline, group_runs
from mambacl.reports.markup import (
    Picture,
    Section,
    cards,
    copyable,
    document,
    escaped,
    facts,
    matrix_html,
    note_list,
    status_mark,
    table_html,
)
from mambacl.reports.rendering import to_latex, to_markdown
from mambacl.reports.run_page import Page, banner
from mambacl.reports.runs import RunRecord
from mambacl.reports.tables import comparison_table, differences_table, formula, one_decimal, progress_table


def comparison_page(records: Sequence[RunRecord]) -> Page:
    groups = group_runs(records)
    benchmarks = list(dict.fromkeys(record.benchmark for record in records))
    title = f"Comparison on {' and '.join(benchmarks)}"
    pictures: list[Picture] = []
    sections = [_table(records, groups, pictures)]
    if any(record.tasks_done for record in records):
        sections.append(_curves(groups, pictures))
    sections += [_matrices(groups, pictures), _differences(groups), _folders(records)]
    return Page(document(title, _header(records, groups, title), sections), tuple(pictures))


def _header(records: Sequence[RunRecord], groups: Sequence[Group], title: str) -> str:
    entries: list[tuple[str, object]] = [("runs", len(records)), ("groups", len(groups))]
    entries += [("backbone", name) for name in dict.fromkeys(record.backbone for record in records)]
    open_runs = "".join(banner(run, f"{group.label}, seed {run.seed},") for group in groups for run in group.runs)
    return f"<h1>{escaped(title)}</h1>{facts(entries)}{open_runs}{cards(_headline(records, groups))}"


def _headline(records: Sequence[RunRecord], groups: Sequence[Group]) -> list[tuple[str, Value, str]]:
    """The best group by each headline figure; only where all runs are of one benchmark and so can compete."""
    if len({record.benchmark for record in records}) > 1:
        return []
    headline = common_headline(records)
    entries = []
    for label, name, best in (
        ("Highest final accuracy", f"final_accuracy_{headline}", max),
        ("Lowest forgetting", "forgetting", min),
        ("Highest learning accuracy", "learning_accuracy", max),
        ("Highest average incremental accuracy", "average_incremental_accuracy", max),
    ):
        known = [(value, group.label) for group in groups if (value := group.metric(name)) is not None]
        if known:
            value, who = best(known, key=lambda pair: pair[0].mean)
            entries.append((label, value, who))
    return entries


def _table(records: Sequence[RunRecord], groups: Sequence[Group], pictures: list[Picture]) -> Section:
    table = comparison_table(records, tasks="none")
    full = comparison_table(records)
    body = table_html(table)
    finished = [group for group in groups if group.finished]
    if finished:
        name = f"final_accuracy_{common_headline(records)}"
        figures_in_words = ", ".join(
            f"{group.label} {one_decimal(value.mean)}"
            for group in finished
            if (value := group.metric(name)) is not None
        )
        alt = f"Final accuracy and forgetting of each group. Final accuracy in per cent: {figures_in_words}."
        pictures.append(Picture("final.png", figures.png(figures.final_figures(groups)), alt))
        body += pictures[-1].html()
    body += copyable("Markdown", to_markdown(full)) + copyable("LaTeX", to_latex(full))
    return Section("table", "Results", body)


def _curves(groups: Sequence[Group], pictures: list[Picture]) -> Section:
    started = [group for group in groups if group.first.tasks_done]
    headline = common_headline(run for group in groups for run in group.runs)
    ends = ", ".join(f"{group.label} {one_decimal(group.after_each_task(headline)[0][-1])}" for group in started)
    band = "" if all(len(group.runs) == 1 for group in started) else "Bands: one sample standard deviation over seeds."
    alt = f"Accuracy after each task, a line a group. At their last task, in per cent: {ends}."
    pictures.append(Picture("accuracy.png", figures.png(figures.accuracy_curves(started)), alt, band))
    table = progress_table([run for group in started for run in group.runs])
    return Section("curves", "Accuracy after each task", pictures[-1].html() + table_html(table))


def _matrices(groups: Sequence[Group], pictures: list[Picture]) -> Section:
    """Each run's matrix, behind a fold when there are many, and what each task lost."""
    parts = []
    shown = " open" if sum(len(group.runs) for group in groups) <= 4 else ""
    for group in groups:
        for run in group.runs:
            if run.tasks_done:
                words = f"{group.label}, seed {run.seed}"
                parts.append(f"<details{shown}><summary>{escaped(words)}</summary>{matrix_html(run)}</details>")
    several = [group for group in groups if group.first.tasks_done > 1]
    if several:
        worst = {
            group.label: float(np.nanmean([100 * run.forgetting_by_task() for run in group.runs])) for group in several
        }
        in_words = ", ".join(f"{label} {one_decimal(value)}" for label, value in worst.items())
        alt = f"What each task lost by the end, a line a group. Means in points: {in_words}."
        pictures.append(Picture("forgetting.png", figures.png(figures.forgetting_curves(several)), alt))
        parts.insert(0, pictures[-1].html() + note_list([formula("forgetting")]))
    return Section("matrices", "Task by task", "".join(parts) or "<p>No run has finished a task yet.</p>")


def _differences(groups: Sequence[Group]) -> Section:
    table = differences_table(list({group.label: group for group in groups}.values()))
    body = table_html(table) if table.rows else "<p>The configurations are equal but for the seeds.</p>"
    return Section("differences", "What differs", body, "Settings in which the groups are not equal; seeds apart.")


def _folders(records: Sequence[RunRecord]) -> Section:
    left_out = any(record.skipped for record in records)
    items = "".join(
        f"<tr><th scope=row class=text><code>{escaped(record.folder)}</code></th><td>{status_mark(record)}</td>"
        f"<td>{escaped(record.seed)}</td><td>{record.tasks_done} of {len(record.tasks)}</td>"
        + (f"<td>{len(record.skipped):,}</td></tr>" if left_out else "</tr>")
        for record in records
    )
    head = (
        "<th scope=col class=text>folder</th><th scope=col>status</th><th scope=col>seed</th><th scope=col>tasks</th>"
    ) + ("<th scope=col>images left out</th>" if left_out else "")
    table = f'<table class="full"><thead><tr>{head}</tr></thead><tbody>{items}</tbody></table>'
    table = f'<div class="wide" tabindex="0">{table}</div>'
    return Section("runs", "Runs", table, "Each folder holds the configuration with which its run can be made again.")
