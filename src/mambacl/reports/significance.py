"""Whether groups of runs differ by more than their seeds do: t-tests, paired by seed where possible."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from mambacl.reports.groups import Group, common_headline
from mambacl.reports.tables import MINUS, Column, Table
from mambacl.training.metrics import METRICS

MOST_GROUPS = 8  # with more, only the best is compared with the others
LEVEL = 0.05


@dataclass(frozen=True)
class Test:
    name: str
    n: str
    difference: float
    """of the means, the second minus the first"""
    p: float
    """two-sided"""


def t_test(first: dict[str, float], second: dict[str, float]) -> Test | None:
    """Of the values by seed: Student's paired test if both have the same seeds, else Welch's test of two samples. None
    if there are too few runs, or if nothing varies."""
    if first.keys() == second.keys():
        changes = [second[seed] - first[seed] for seed in first]
        mean, spread = _moments(changes)
        if len(changes) < 2 or spread == 0:
            return None
        t = mean / math.sqrt(spread / len(changes))
        return Test("paired t-test", f"{len(changes)} seeds", mean, student_p(t, len(changes) - 1))
    if min(len(first), len(second)) < 2:
        return None
    (a, of_a), (b, of_b) = _moments(list(first.values())), _moments(list(second.values()))
    u, v = of_a / len(first), of_b / len(second)
    if u + v == 0:
        return None
    freedom = (u + v) ** 2 / (u**2 / (len(first) - 1) + v**2 / (len(second) - 1))
    return Test(
        "Welch's t-test", f"{len(first)} and {len(second)} seeds", b - a, student_p((b - a) / math.sqrt(u + v), freedom)
    )


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample variance."""
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)


def student_p(t: float, freedom: float) -> float:
    """The two-sided p-value of Student's t: I_x(freedom / 2, 1 / 2) at x = freedom / (freedom + t^2)."""
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (Abramowitz and Stegun 26.5.8)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # Evaluated from the front, as the ratio of consecutive numerators and of consecutive denominators.
    above, below, value = 1.0, 0.0, 1.0
    for step in range(1, 500):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        above, below = 1 + term / above, 1 / (1 + term * below)
        value *= above * below
        if abs(above * below - 1) < 1e-15:
            break
    return math.exp(log_front) / (a * value)


def holm(values: Sequence[float]) -> list[float]:
    """The p-values, corrected for their number by Holm's method."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found, largest = [0.0] * len(values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        found[i] = largest
    return found


def significance_table(groups: Sequence[Group]) -> Table | None:
    """A row per pair of finished groups of the same benchmark and metric; None if there is nothing to compare."""
    finished = [group for group in groups if group.finished]
    headline = common_headline(run for group in finished for run in group.runs)
    rows, tests, untested = [], [], 0
    for name in (f"final_accuracy_{headline}", "forgetting"):
        for first, second in _pairs(finished, name):
            test = t_test(_by_seed(first, name), _by_seed(second, name))
            if test is None:
                untested += 1
                continue
            rows.append((METRICS.get(name).title, first.label, second.label))
            tests.append(test)
    if not rows and not untested:
        return None
    corrected = holm([test.p for test in tests])
    cells = tuple(
        (*row, _signed(test.difference), test.name, test.n, _p(test.p), _p(p), "yes" if p < LEVEL else "no")
        for row, test, p in zip(rows, tests, corrected, strict=True)
    )
    titles = ("metric", "group", "compared with", "difference", "test", "n", "p", "p corrected", "significant")
    columns = tuple(Column(title, text=title in ("metric", "group", "compared with", "test", "n")) for title in titles)
    notes = [
        "difference: mean of the second group minus that of the first, in points",
        "paired: both groups have the same seeds, and the test is of the differences seed by seed; else Welch's test "
        "of two samples. Both assume that values over seeds are about normal",
        f"p corrected: Holm's correction for {len(tests)} tests; significant: below {LEVEL:g}",
    ]
    if any(test.n.startswith(("2 ", "3 ")) for test in tests):
        notes.append("with two or three seeds only large differences can be significant: 'no' does not mean equal")
    if untested:
        notes.append(f"{untested} comparisons are left out: they need two seeds per group, and values that vary")
    return Table("Differences between groups, over seeds", columns, cells, tuple(notes))


def _pairs(groups: Sequence[Group], name: str) -> list[tuple[Group, Group]]:
    """Groups of the same benchmark, two by two. If there are many, the best one with each of the others."""
    found = []
    for benchmark in dict.fromkeys(group.first.benchmark for group in groups):
        own = [group for group in groups if group.first.benchmark == benchmark and group.metric(name) is not None]
        if len(own) <= MOST_GROUPS:
            found += list(combinations(own, 2))
            continue
        choose = min if METRICS.get(name).better == "min" else max
        best = choose(own, key=lambda group: group.summary(lambda run: run.metric(name)).mean)  # type: ignore[union-attr]
        found += [(best, other) for other in own if other is not best]
    return found


def _by_seed(group: Group, name: str) -> dict[str, float]:
    """A seed that appears more than once counts once: its runs are not independent."""
    return {str(run.seed): 100 * (run.metric(name) or 0.0) for run in group.runs}


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", MINUS)


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
