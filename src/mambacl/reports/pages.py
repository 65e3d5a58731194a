"""The data for the page of a single run and for the page that compares runs; the text is in `templates/`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mambacl.reports import audits, confusions, figures, numbers, spectra
from mambacl.reports.charts import chart
from mambacl.reports.groups import Group, Value, common_headline, group_runs
from mambacl.reports.learned import learned_table
from mambacl.reports.rendering import to_latex, to_markdown
from mambacl.reports.runs import RunRecord
from mambacl.reports.significance import significance_table
from mambacl.reports.tables import comparison_table, differences_table, metrics_table, progress_table
from mambacl.reports.templating import Page, render
from mambacl.scenarios import AMONG_ALL
from mambacl.training.metrics import Metric, table_metrics

Data = dict[str, Any]


def run_page(record: RunRecord) -> Page:
    table = comparison_table([record])
    data: Data = {
        "run": record,
        "classes": len({class_id for task in record.tasks for class_id in task}),
        "headline": _headline(record),
        "features": _features(record),
        "accuracy": _accuracy(record),
        "forgetting": _forgetting(record),
        "by_class": _by_class(record),
        "learned": None if record.learned is None else learned_table(record.learned),
        "training": _training(record),
        "null_space": _null_space(record),
        "audit": _audit(record),
        "tasks": _tasks(record),
        "shared_classes": [record.class_name(class_id) for class_id in record.tasks[0]] if record.domains else [],
        "metrics": metrics_table(record),
        "markdown": to_markdown(table),
        "latex": to_latex(table),
        "transforms": _transforms(record),
    }
    return render("run.html", **data)


def matrix(record: RunRecord) -> Data:
    """The accuracy matrix of a run in per cent, with the shade of each cell: from 0 to 1, or None if unknown."""
    accuracies = 100 * record.accuracies()
    low, high = figures.shade_range(accuracies)
    rows = []
    for t, mean in enumerate(100 * record.after_each_task(record.headline)):
        shades = 0.06 + 0.54 * np.clip((accuracies[t, : t + 1] - low) / (high - low), 0, 1)
        cells = zip(accuracies[t, : t + 1], shades, strict=True)
        rows.append(
            {"cells": [{"accuracy": a, "shade": s if np.isfinite(a) else None} for a, s in cells], "mean": mean}
        )
    lost = list(100 * record.forgetting_by_task())  # of each task but the last
    return {"over": record.headline, "rows": rows, "lost": lost, "mean_lost": np.mean(lost) if lost else None}


def _headline(record: RunRecord) -> list[tuple[Metric, Value | None]]:
    if not record.tasks_done:
        return []
    values = [(metric, record.metric(metric.name)) for metric in table_metrics(record.headline)]
    return [(metric, None if value is None else Value(100 * value)) for metric, value in values]


def _features(record: RunRecord) -> str:
    """What the classifier sees, if it is computed from features; empty if not."""
    match record.results.get("features"):
        case {"count": int(count), "depths": list(depths), "pool": list(pool), "mirror": mirror}:
            named = (
                f"{len(depths)} depth{'' if len(depths) == 1 else 's'} ({', '.join(map(str, pool))}) and the final one"
            )
            views = {"learning": ", mirror images in learning", "both": ", mirror images"}.get(str(mirror), "")
            return f"{named if depths else 'final'}, {count:,} values{views}"
    return ""


def _accuracy(record: RunRecord) -> Data:
    if not record.tasks_done:
        return {}
    curve, last = 100 * record.after_each_task(record.headline), 100 * record.accuracies()[-1]
    return {
        "curve": chart("accuracy", figures.accuracy_curves(group_runs([record])), numbers.run_curve(record)),
        "first": curve[0],
        "last": curve[-1],
        "heat_map": chart("matrix", figures.accuracy_matrix(record), numbers.accuracy_matrix(record)),
        "lowest": np.nanmin(last),
        "highest": np.nanmax(last),
        "matrix": matrix(record),
    }


def _forgetting(record: RunRecord) -> Data:
    if record.tasks_done < 2:
        return {}
    lost = 100 * record.forgetting_by_task()
    worst = int(np.nanargmax(lost)) if np.isfinite(lost).any() else 0
    drawn = chart("forgetting", figures.forgetting_by_task(record), numbers.forgetting(record))
    return {"chart": drawn, "worst": lost[worst], "worst_task": worst + 1}


def _by_class(record: RunRecord) -> Data:
    confusion = record.confusion
    if confusion is None or not confusion.counts:
        return {}
    table, done = confusions.classes_table(record, confusion), record.tasks_done
    data: Data = {
        "classes": chart("classes", confusions.class_accuracies(record, confusion), table),
        "between": None,
        **confusions.commonest(record, confusion),
    }
    if record.scenario in AMONG_ALL and done > 1:
        counts = confusion.between_tasks(record.tasks[:done])
        drawn, listed = confusions.task_confusion(counts), confusions.task_confusion_table(counts)
        data["between"] = chart("task-confusion", drawn, listed)
        data["other_task"] = 100 * (counts.sum() - np.trace(counts)) / max(1, counts.sum())
    return data


def _training(record: RunRecord) -> Data:
    seconds = {str(k): float(v) for k, v in record.results.get("seconds", {}).items() if isinstance(v, int | float)}
    total = sum(seconds.values())
    phases = [
        {
            "name": name,
            "seconds": value,
            "percent": 100 * value / total,
            "colour": figures.COLOURS[i % len(figures.COLOURS)],
        }
        for i, (name, value) in enumerate(seconds.items())
        if value > 0
    ]
    return {
        "phases": phases,
        "speed": record.results.get("images_per_second"),
        "memory": record.results.get("peak_memory_bytes"),
        "classifier": record.results.get("classifier_bytes"),
        "curves": chart("training", figures.training_curves(record), numbers.training(record))
        if record.epochs
        else None,
    }


def _null_space(record: RunRecord) -> Data:
    entries = spectra.spectra_by_feature(record)
    if not entries or record.spectra_task is None:
        return {}
    return {
        "protected": chart("protected", spectra.protected_directions(entries), numbers.protected(entries)),
        "spectra": [_spectra(entry) for entry in entries],
    }


def _spectra(entry: spectra.FeatureSpectra) -> Data:
    return {
        "title": entry.title,
        "blocks": len(entry.spectra),
        "null_percent": float(np.mean([100 * rank / len(values) for values, rank in entry.spectra.values()])),
        "feature": entry.feature,
        "meaning": entry.meaning,
        "chart": chart(f"spectra-{entry.slug}", spectra.spectra_panels(entry), numbers.spectra(entry)),
    }


def _audit(record: RunRecord) -> Data:
    audit = record.audit
    data: Data = {"drift": None, "updates": None}
    if audit.get("tasks"):
        data |= {
            "drift": chart("audit-drift", audits.drift_map(audit), numbers.drift(audit)),
            "drift_table": audits.drift_table(audit),
            "largest": max(found.get("output", 0.0) for entry in audit["tasks"] for found in entry["drift"].values()),
        }
    if audit.get("updates"):
        data |= {
            "updates": chart("audit-updates", audits.updates_map(audit), numbers.updates(audit)),
            "updates_table": audits.updates_table(audit),
        }
    return data


def _tasks(record: RunRecord) -> list[Data]:
    """The class names or the domain of each task, including tasks to come."""
    totals, domains = record.results["total"], record.domains
    return [
        {
            "classes": len(task),
            "tested": totals[t] if t < len(totals) else None,
            "names": [domains[t]] if domains else [record.class_name(class_id) for class_id in task],
            "done": t < record.tasks_done,
        }
        for t, task in enumerate(record.tasks)
    ]


def _transforms(record: RunRecord) -> list[str]:
    """The steps of each transform, one line per transform."""
    transforms = record.stream.get("transforms")
    if not isinstance(transforms, Mapping):
        return []
    return [f"{name}: {', then '.join(_step(step) for step in steps)}" for name, steps in transforms.items()]


def _step(step: Mapping[str, Any]) -> str:
    """Turns {"resize": 32, "interpolation": "bicubic"} into 'resize 32, interpolation bicubic'."""
    parts = {key: _step(value) if isinstance(value, Mapping) else value for key, value in step.items()}
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in parts.items())


# The comparison of runs


def comparison_page(records: Sequence[RunRecord]) -> Page:
    groups, table = group_runs(records), comparison_table(records)
    data: Data = {
        "runs": records,
        "groups": groups,
        "benchmarks": list(dict.fromkeys(record.benchmark for record in records)),
        "backbones": list(dict.fromkeys(record.backbone for record in records)),
        "best": _best(records, groups),
        "results": comparison_table(records, tasks="none"),
        "significance": significance_table(groups),
        "final": _compared_final(groups, common_headline(records)),
        "curves": _compared_curves(groups, common_headline(records)),
        "forgetting": _compared_forgetting(groups),
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


def _compared_final(groups: Sequence[Group], headline: str) -> Data:
    if not any(group.finished for group in groups):
        return {}
    values = [(group.label, group.metric(f"final_accuracy_{headline}")) for group in groups]
    return {
        "chart": chart("final", figures.final_figures(groups), numbers.final(groups)),
        "accuracies": [(label, value.mean) for label, value in values if value is not None],
    }


def _compared_curves(groups: Sequence[Group], headline: str) -> Data:
    started = [group for group in groups if group.first.tasks_done]
    if not started:
        return {}
    return {
        "chart": chart("accuracy", figures.accuracy_curves(started), numbers.curves(started)),
        "last": [(group.label, group.after_each_task(headline)[0][-1]) for group in started],
        "bands": any(len(group.runs) > 1 for group in started),
        "table": progress_table([run for group in started for run in group.runs]),
    }


def _compared_forgetting(groups: Sequence[Group]) -> Data:
    several = [group for group in groups if group.first.tasks_done > 1]
    if not several:
        return {}
    means = [
        (group.label, float(np.nanmean([100 * run.forgetting_by_task() for run in group.runs]))) for group in several
    ]
    return {
        "chart": chart("forgetting", figures.forgetting_curves(several), numbers.forgetting_curves(several)),
        "means": means,
    }
