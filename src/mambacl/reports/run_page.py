"""The page of a single run, from its headline figures down to its configuration."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mambacl.reports import audits, figures, spectra_figures
from mambacl.reports.groups import Value, group_runs
from mambacl.reports.markup import (
    Picture,
    Section,
    cards,
    class_table,
    copyable,
    document,
    duration,
    escaped,
    facts,
    matrix_html,
    note_list,
    status_mark,
    table_html,
    time_bar,
)
from mambacl.reports.rendering import to_latex, to_markdown
from mambacl.reports.runs import RunRecord
from mambacl.reports.spectra import spectra_by_feature
from mambacl.reports.tables import comparison_table, formula, metrics_table, one_decimal
from mambacl.scenarios import SCENARIOS

OPEN_MATRIX = 12  # tasks up to which the table of numbers is unfolded from the start


@dataclass(frozen=True)
class Page:
    html: str
    pictures: tuple[Picture, ...]


def run_page(record: RunRecord) -> Page:
    title = f"{record.method} on {record.benchmark}"
    accuracy, pictures = _accuracy(record)
    training, more = _training(record)
    space, most = _null_space(record)
    audit, rest = _audit(record)
    data = [_classes(record), *_skipped(record)]
    sections = [*accuracy, *training, *space, *audit, *data, _table(record), _settings(record)]
    return Page(document(title, _header(record, title), sections), (*pictures, *more, *most, *rest))


def banner(record: RunRecord, who: str = "This run") -> str:
    """What to do about a run that is not finished; empty for one that is."""
    if record.finished:
        return ""
    done = f"{record.tasks_done} of {len(record.tasks)} tasks are done"
    command = f"mambacl resume {shlex.quote(str(record.folder))}"
    words = "If it no longer runs, continue it with" if record.status == "running" else "Continue it with"
    return (
        f'<div class="banner" role="status"><p><strong>{escaped(who)} is not finished</strong> '
        f"(status: {escaped(record.status)}; {done}). {words} <code>{escaped(command)}</code>.</p></div>"
    )


def _header(record: RunRecord, title: str) -> str:
    entries = [("backbone", record.backbone), ("seed", record.seed), ("tasks", len(record.tasks))]
    entries.append(("classes", len({class_id for task in record.tasks for class_id in task})))
    entries.append(("scenario", f"{record.scenario}-incremental"))
    setting = record.config.get("setting")
    if isinstance(setting, str):
        entries.append(("setting", setting))
    if record.skipped:
        entries.append(("images left out", f"{len(record.skipped):,}"))
    heading = f"<h1>{escaped(title)} {status_mark(record)}</h1>"
    return heading + facts(entries) + banner(record) + (cards(_headline(record)) if record.tasks_done else "")


def _headline(record: RunRecord) -> list[tuple[str, Value | str | None, str]]:
    so_far = "" if record.finished else " so far"
    over = record.headline
    if record.finished:
        first = ("Final accuracy", record.metric(f"final_accuracy_{over}"), formula(f"final_accuracy_{over}"))
    else:
        label = f"Accuracy after {record.tasks_done} of {len(record.tasks)} tasks"
        first = (label, float(record.after_each_task(over)[-1]), f"accuracy: mean over the {over} seen")
    names = ("forgetting", "learning_accuracy", "average_incremental_accuracy")
    rest = [(name.replace("_", " ").capitalize() + so_far, record.metric(name), formula(name)) for name in names]
    return [
        (label, None if value is None or not np.isfinite(value) else Value(100 * value), words.partition(": ")[2])
        for label, value, words in (first, *rest)
    ]


def _accuracy(record: RunRecord) -> tuple[list[Section], list[Picture]]:
    done = record.tasks_done
    if not done:
        body = "<p>No task is finished yet; its accuracies will stand here.</p>"
        return [Section("accuracy", "Accuracy", body)], []
    curve = 100 * record.after_each_task(record.headline)
    matrix = 100 * record.accuracies()
    pictures = [
        Picture(
            "accuracy.png",
            figures.png(figures.accuracy_curves(group_runs([record]))),
            f"Line chart of the accuracy after each task: {one_decimal(curve[0])} per cent after the first, "
            f"{one_decimal(curve[-1])} after task {done}.",
        ),
        Picture(
            "matrix.png",
            figures.png(figures.accuracy_matrix(record)),
            f"Heat map of the accuracy on each of {done} tasks after each task; after the last, from "
            f"{one_decimal(np.nanmin(matrix[-1]))} to {one_decimal(np.nanmax(matrix[-1]))} per cent.",
        ),
    ]
    body = f'<div class="pair">{"".join(picture.html() for picture in pictures)}</div>'
    state = " open" if done <= OPEN_MATRIX else ""
    body += f"<details{state}><summary>The numbers</summary>{matrix_html(record)}</details>"
    lead = f"After each task the model is tested on every task so far, and {SCENARIOS[record.scenario]}."
    sections = [Section("accuracy", "Accuracy", body, lead)]
    if done > 1:
        lost = 100 * record.forgetting_by_task()
        worst = int(np.nanargmax(lost)) if np.isfinite(lost).any() else 0
        alt = (
            f"For each task its best accuracy before the last task and its accuracy after it; the greatest loss is "
            f"{one_decimal(lost[worst])} points, on task {worst + 1}."
        )
        picture = Picture("forgetting.png", figures.png(figures.forgetting_by_task(record)), alt)
        lead = "The gap between the best accuracy before the last task and the accuracy after it, task by task."
        sections.append(Section("forgetting", "Forgetting", picture.html() + note_list([formula("forgetting")]), lead))
        pictures.append(picture)
    return sections, pictures


def _training(record: RunRecord) -> tuple[list[Section], list[Picture]]:
    results = record.results
    seconds = {str(k): float(v) for k, v in results.get("seconds", {}).items() if isinstance(v, int | float)}
    entries = [("total", duration(sum(seconds.values())))] if sum(seconds.values()) > 0 else []
    if results.get("images_per_second"):
        entries.append(("training speed", f"{results['images_per_second']:,.0f} images per second"))
    if results.get("peak_memory_bytes"):
        entries.append(("peak memory", f"{results['peak_memory_bytes'] / 2**30:.1f} GiB"))
    body = (facts(entries) if entries else "") + time_bar(seconds)
    pictures = []
    if record.epochs:
        alt = f"Training loss and accuracy over {len(record.epochs)} epochs, task by task."
        pictures.append(Picture("training.png", figures.png(figures.training_curves(record)), alt))
        body += pictures[0].html()
    return ([Section("training", "Training and time", body)] if body else []), pictures


def _null_space(record: RunRecord) -> tuple[list[Section], list[Picture]]:
    families = spectra_by_feature(record)
    if not families or record.spectra_task is None:
        return [], []
    counts = ", ".join(f"{family.title}: {_mean_share(family.spectra):.0f} per cent" for family in families)
    protected = Picture(
        "protected.png",
        figures.png(spectra_figures.protected_directions(families)),
        f"Protected directions by block. Null directions, mean over the blocks: {counts}.",
    )
    folded: list[str] = []
    pictures = [protected]
    for family in families:
        picture = Picture(
            f"spectra-{family.slug}.png",
            figures.png(spectra_figures.spectra(family)),
            f"Spectra of the covariance behind {family.title} in {len(family.spectra)} blocks on a logarithmic scale, "
            f"with the null directions shaded: {_mean_share(family.spectra):.0f} per cent of them on average.",
            family.meaning and f"The feature {family.feature}: {family.meaning}.",
        )
        pictures.append(picture)
        state = "" if folded else " open"
        words = f"Spectra behind {family.title}"
        folded.append(f"<details{state}><summary>{escaped(words)}</summary>{picture.html()}</details>")
    lead = (
        f"After task {record.spectra_task + 1}: which directions the features of the tasks so far leave free. "
        f"The next updates are projected onto these null directions, as strictly as eta says. {_how(record.setting)}"
    )
    return [Section("null-space", "Null space", protected.html() + "".join(folded), lead)], pictures


def _how(setting: Mapping[str, Any]) -> str:
    """The choices behind the ranks and the projection, in a sentence."""
    if "rank" not in setting:
        return ""
    over = "over all blocks together" if setting.get("rank_over") == "all" else "block by block"
    words = f"Ranks by {setting['rank']}, {over}; eta {setting.get('eta')}"
    if setting.get("scaling") == "frobenius":
        words += "; projectors divided by their norm, as in the released code, so that steps are mostly shorter"
    return words + "."


def _audit(record: RunRecord) -> tuple[list[Section], list[Picture]]:
    audit, pictures, body = record.audit, [], ""
    if audit.get("tasks"):
        worst = max(found.get("output", 0.0) for entry in audit["tasks"] for found in entry["drift"].values())
        alt = (
            f"Heat maps of the relative change of five quantities by task and block; of an output, at most {worst:.1e}."
        )
        pictures.append(Picture("audit-drift.png", figures.png(audits.drift_map(audit)), alt))
        body += (
            pictures[-1].html()
            + f"<details><summary>The numbers</summary>{table_html(audits.drift_table(audit))}</details>"
        )
    if audit.get("updates"):
        alt = "Heat maps of the share of the last task's updates in protected directions, before and after projection."
        pictures.append(Picture("audit-updates.png", figures.png(audits.updates_map(audit)), alt))
        body += (
            pictures[-1].html()
            + f"<details><summary>By task</summary>{table_html(audits.updates_table(audit))}</details>"
        )
    if not body:
        return [], []
    lead = (
        "How far what every block made of images of earlier tasks has moved since, and how much of each update lay in "
        "directions that were protected for them."
    )
    if not audit.get("tasks"):
        lead = (
            "How much of each update lay in directions that were protected for earlier tasks. A run with "
            "--audit-images N also shows how far the features of each task have moved."
        )
    return [Section("audit", "Consistency audit", body, lead)], pictures


def _mean_share(spectra: Mapping[str, tuple[np.ndarray, int]]) -> float:
    return float(np.mean([100 * rank / len(values) for values, rank in spectra.values()]))


def _classes(record: RunRecord) -> Section:
    order = record.results.get("class_order") or []
    body = class_table(record)
    if record.domains:
        names = "\n".join(record.class_name(class_id) for class_id in record.tasks[0])
        body += copyable("The classes, which all tasks share", names)
    elif order:
        body += copyable("The class order, as numbers", " ".join(str(class_id) for class_id in order))
    fingerprint = record.stream.get("fingerprint")
    if fingerprint:
        body += f"<p>Fingerprint of the data: <code>{escaped(fingerprint)}</code></p>"
    return Section("classes", "Domains by task" if record.domains else "Classes by task", body)


def _skipped(record: RunRecord) -> list[Section]:
    count = len(record.skipped)
    if not count:
        return []
    lead = "Files that could not be read. Figures are comparable only with runs that left out the same ones."
    words = f"{count:,} {'image' if count == 1 else 'images'}"
    return [Section("skipped", "Images left out", copyable(words, "\n".join(record.skipped), count <= 20), lead)]


def _table(record: RunRecord) -> Section:
    table = comparison_table([record])
    body = table_html(metrics_table(record))
    body += copyable("Markdown", to_markdown(table)) + copyable("LaTeX", to_latex(table))
    return Section("table", "Metrics", body)


def _step(step: Mapping[str, Any]) -> str:
    """{"resize": 32, "interpolation": "bicubic"} as 'resize 32, interpolation bicubic'."""
    parts = {key: _step(value) if isinstance(value, Mapping) else value for key, value in step.items()}
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in parts.items())


def _settings(record: RunRecord) -> Section:
    config = record.folder / "config.yaml"
    again = record.folder.with_name(f"{record.folder.name}-again")  # its own folder would show the finished run
    command = f"mambacl train {shlex.quote(str(config))} --out {shlex.quote(str(again))}"
    body = f"<p>To make this run again:</p><pre class=copy>{escaped(command)}</pre>" if record.config_text else ""
    if record.config_text:
        body += copyable("Resolved configuration (config.yaml)", record.config_text)
    transforms = record.stream.get("transforms")
    if isinstance(transforms, Mapping):
        lines = [f"{name}: {', then '.join(_step(step) for step in steps)}" for name, steps in transforms.items()]
        body += copyable("What is done to images", "\n".join(lines))
    versions = record.results.get("versions", {})
    if versions:
        body += "<h3>Versions</h3>" + facts([(name, versions[name]) for name in versions])
    body += f"<p>Run folder: <code>{escaped(record.folder)}</code></p>"
    return Section("settings", "Configuration", body)
