"""The data for the page that compares runs; `templates/comparison.html` has its text."""

from collections.abc import Sequence

import numpy as np

from mambacl.reports import figures
from mambacl.reports.groups import Group, Value, common_headline, group_runs
from mambacl.reports.rendering import to_latex, to_markdown
from mambacl.reports.run_page import Data, matrix
from mambacl.reports.runs import RunRecord
from mambacl.reports.tables import comparison_table, differences_table, progress_table
from mambacl.reports.templating import Page, Picture, render
from mambacl.training.metrics import Metric, table_metrics


def comparison_page(records: Sequence[RunRecord]) -> Page:
    groups, table = group_runs(records), comparison_table(records)
    data: Data = {
        "runs": records,
        "groups": groups,
        "benchmarks": list(dict.fromkeys(record.benchmark for record in records)),
        "backbones": list(dict.fromkeys(record.backbone for record in records)),
        "best": _best(records, groups),
        "results": comparison_table(records, tasks="none"),
        "final": _final(groups, common_headline(records)),
        "curves": _curves(groups, common_headline(records)),
        "forgetting": _forgetting(groups),
        "matrices": [
            (f"{group.label}, seed {run.seed}", matrix(run)) for group in groups for run in group.runs if run.tasks_done
        ],
        "differences": differences_table(list({group.label: group for group in groups}.values())),
        "markdown": to_markdown(table),
        "latex": to_latex(table),
    }
    return render("comparison.html", **data)


def _best(records: Sequence[RunRecord], groups: Sequence[Group]) -> list[tuple[Metric, Value, str]]:
    """The best group by each metric; empty if the runs are of different benchmarks, which do not compare."""
    if len({record.benchmark for record in records}) > 1:
        return []
    best = []
    for metric in table_metrics(common_headline(records)):
        known = [(value, group.label) for group in groups if (value := group.metric(metric.name)) is not None]
        if known and metric.better:
            value, label = (min if metric.better == "min" else max)(known, key=lambda pair: pair[0].mean)
            best.append((metric, value, label))
    return best


def _final(groups: Sequence[Group], headline: str) -> Data:
    if not any(group.finished for group in groups):
        return {}
    values = [(group.label, group.metric(f"final_accuracy_{headline}")) for group in groups]
    return {
        "picture": Picture("final.png", figures.png(figures.final_figures(groups))),
        "accuracies": [(label, value.mean) for label, value in values if value is not None],
    }


def _curves(groups: Sequence[Group], headline: str) -> Data:
    started = [group for group in groups if group.first.tasks_done]
    if not started:
        return {}
    return {
        "picture": Picture("accuracy.png", figures.png(figures.accuracy_curves(started))),
        "last": [(group.label, group.after_each_task(headline)[0][-1]) for group in started],
        "bands": any(len(group.runs) > 1 for group in started),
        "table": progress_table([run for group in started for run in group.runs]),
    }


def _forgetting(groups: Sequence[Group]) -> Data:
    several = [group for group in groups if group.first.tasks_done > 1]
    if not several:
        return {}
    means = [
        (group.label, float(np.nanmean([100 * run.forgetting_by_task() for run in group.runs]))) for group in several
    ]
    return {"picture": Picture("forgetting.png", figures.png(figures.forgetting_curves(several))), "means": means}
