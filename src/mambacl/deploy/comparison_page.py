"""A comparison as tables, for the terminal and for one HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mambacl.deploy.comparison import ClassPairs, Comparison
from mambacl.deploy.paired import Pairs
from mambacl.reports.rendering import to_text
from mambacl.reports.tables import MINUS, MISSING, Column, Table
from mambacl.reports.templating import render

SHOWN = 10  # classes on a terminal


def as_page(found: Comparison, broken: Sequence[str], limited: bool) -> str:
    """One HTML page. `broken`: the limits that were exceeded; `limited`: whether any were given."""
    tables = {"summary": summary_table(found), "classes": classes_table(found.classes), "drift": drift_table(found)}
    return render("update.html", found=found, broken=list(broken), limited=limited, **tables).html


def as_text(found: Comparison) -> str:
    """For a terminal: the summary, and the classes that fell most."""
    rows = sorted((row for row in found.classes if not row.is_new), key=_change)
    shown = [*rows[:SHOWN], *(row for row in found.classes if row.is_new)][: 2 * SHOWN]
    parts = [to_text(summary_table(found)), to_text(classes_table(shown, len(found.classes)))]
    if found.drift is not None and any(found.drift.values()):
        parts.append(to_text(drift_table(found)))
    return "\n".join(parts)


def summary_table(found: Comparison) -> Table:
    old, new, shared = found.old, found.new, found.shared
    low, high = shared.interval
    megabytes = 1e6
    rows = (
        ("accuracy on old classes", _share(shared.old_accuracy), _share(shared.new_accuracy),
         f"{points(shared.change)} points (95%: {points(low)} to {points(high)})"),
        ("accuracy on all classes", _share(found.all.old_accuracy), _share(found.all.new_accuracy),
         f"{points(found.all.change)} points"),
        ("negative flips", "", f"{shared.lost} of {shared.images}", _share(shared.negative_flip_rate)),
        ("positive flips", "", f"{shared.gained} of {shared.images}",
         f"{_share(shared.positive_flip_rate)}; {_p_value(shared)}"),
        ("largest drift of a block", "", "", _largest_drift(found)),
        ("mean confidence", _share(old.confidence), _share(new.confidence),
         f"{points(new.confidence - old.confidence)} points"),
        ("calibration error", _share(old.calibration_error), _share(new.calibration_error),
         f"{points(new.calibration_error - old.calibration_error)} points"),
        ("images per second", f"{old.images_per_second:.1f}", f"{new.images_per_second:.1f}",
         f"{_signed(100 * found.slowdown, 0)}% time per image"),
        ("size in MB", f"{old.bytes / megabytes:.1f}", f"{new.bytes / megabytes:.1f}",
         f"{_signed((new.bytes - old.bytes) / megabytes, 1)} MB"),
        ("classes", str(old.classes), str(new.classes), ""),
    )  # fmt: skip
    notes = [
        "Old classes: those that both models know. Flips, confidence and calibration are on their images.",
        "A negative flip was right before and is wrong now; a positive flip is the opposite. p: McNemar's exact test.",
    ]
    if found.untested:
        notes.append(
            f"{len(found.untested)} of the old model's {old.classes} classes have no test images: "
            f"{', '.join(found.untested[:5])}{', ...' if len(found.untested) > 5 else ''}."
        )
    if found.unreadable:
        count = len(found.unreadable)
        notes.append(f"{count} image{'' if count == 1 else 's'} could not be read: left out.")
    columns = tuple(Column(title, text=title in ("", "change")) for title in ("", "old", "new", "change"))
    return Table(f"{found.all.images} images of {found.test}", columns, rows, tuple(notes))


def classes_table(rows: Sequence[ClassPairs], total: int | None = None) -> Table:
    """One row per class. `total`: how many there are, if these are only some."""
    cells = []
    for row in rows:
        pairs, (low, high) = row.pairs, row.pairs.interval
        flips = [MISSING] * 4 if row.is_new else [
            points(pairs.change), f"{points(low)} to {points(high)}", str(pairs.lost), str(pairs.gained)
        ]  # fmt: skip
        before = "new" if row.is_new else _share(pairs.old_accuracy)
        cells.append((row.name, str(pairs.images), before, _share(pairs.new_accuracy), *flips))
    titles = ("class", "images", "old", "new", "change in points", "95% interval", "negative flips", "positive flips")
    some = "" if total is None or total == len(rows) else f"; {len(rows)} of {total}, those that fell most first"
    return Table(
        f"Accuracy by class{some}",
        tuple(Column(title, text=title == "class") for title in titles),
        tuple(cells),
        (
            "Interval: Newcombe's for paired shares (1998, method 10). If nothing changed, about one interval in 20 "
            "still excludes 0.",
        ),
    )


def drift_table(found: Comparison) -> Table:
    rows = tuple((name, f"{value:.3%}") for name, value in (found.drift or {}).items())
    caption = "Relative change of each block's pooled output, on the images of old classes"
    return Table(caption, (Column("block", text=True), Column("drift")), rows)


def points(share: float) -> str:
    return _signed(100 * share, 1)


def _signed(value: float, decimals: int) -> str:
    if math.isnan(value):
        return MISSING
    text = f"{value:+.{decimals}f}"
    return text[1:] if float(text) == 0 else text.replace("-", MINUS)


def _share(value: float) -> str:
    return MISSING if math.isnan(value) else f"{value:.1%}"


def _p_value(pairs: Pairs) -> str:
    return "p < 0.001" if pairs.p_value < 0.001 else f"p = {pairs.p_value:.3f}"


def _largest_drift(found: Comparison) -> str:
    if found.drift is None:
        return "not known: the backbones or input sizes differ"
    worst = max(found.drift, key=found.drift.__getitem__)
    return f"{found.drift[worst]:.2%} ({worst})" if found.drift[worst] else "0: the backbone did not change"


def _change(row: ClassPairs) -> float:
    return row.pairs.change if row.pairs.images else math.inf
