"""Writes recorded results into pages:

    python -m mambacl.bench.page README.md docs/settings.md docs/speed.md

Replaces the text between `<!-- table: FILE -->` and `<!-- end -->` by a table of FILE, relative to the page. FILE holds
speeds, from `mambacl bench against`, `bench exports` or `bench methods` with `--json FILE`, a plan from `mambacl plan
--gpus N --json FILE`, or accuracies. Files of plans and of accuracies have several tables; `<!-- table: FILE NAME -->`
picks one. A file of accuracies has

    rows     by name: "what", the row's first cell, and values by column: a number, [mean, standard deviation] or text
    tables   by name: the names of "columns" and "rows"
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mambacl.bench import exports, methods
from mambacl.bench.peers import OURS
from mambacl.bench.result import Row, shown
from mambacl.errors import UserError
from mambacl.reports import gpu_plans
from mambacl.reports.rendering import pipe_table
from mambacl.training import planning

MARKED = re.compile(
    r"(?P<begin><!-- table: (?P<file>\S+)(?: (?P<name>\S+))? -->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.S
)
BUSY = 0.75  # load per core above which times are unreliable
CALLS = ("forward", "forward_and_backward")
Cases = dict[tuple[str, str], dict[str, Row]]


def with_tables(page: str, folder: Path) -> str:
    """The page with up-to-date tables of all files that it names."""

    def table(match: re.Match[str]) -> str:
        path = folder / match["file"]
        if not path.is_file():
            raise UserError(f"{path} does not exist: record it with `mambacl bench against --json {path}`.")
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("kind") == exports.KIND:
            lines = exports.markdown(record)
        elif record.get("kind") == methods.KIND:
            lines = methods.markdown(record)
        elif record.get("kind") == planning.KIND:
            lines = gpu_plans.markdown(record, match["name"])
        else:
            lines = accuracies(record, match["name"]) if match["name"] else markdown(record)
        return match["begin"] + lines + match["end"]

    return MARKED.sub(table, page)


def accuracies(record: Mapping[str, Any], name: str) -> str:
    """One table of a file of accuracies."""
    if name not in record["tables"]:
        raise UserError(f"There is no table '{name}'; known: {', '.join(record['tables'])}.")
    columns = record["tables"][name]["columns"]
    rows = [record["rows"][row] for row in record["tables"][name]["rows"]]
    cells = ([row["what"], *(_value(row.get(column, "")) for column in columns)] for row in rows)
    return pipe_table([record.get("unit", ""), *columns], cells)


def _value(value: float | str | Sequence[float]) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.1f}" if isinstance(value, float | int) else "±".join(f"{part:.1f}" for part in value)


def markdown(record: Mapping[str, Any]) -> str:
    """A line with command, commit, machine and date; a table with a row per shape and type of inputs; the versions."""
    rows: Sequence[Row] = record["rows"]
    systems = list(dict.fromkeys(str(row["system"]) for row in rows if row["system"] != OURS.name))
    typed = len({row["inputs"] for row in rows}) > 1
    cases: Cases = {}
    for row in rows:
        cases.setdefault((str(row["shape"]), str(row["inputs"])), {})[str(row["system"])] = row
    lines: list[list[str]] = []
    before = ""
    for (shape, inputs), found in cases.items():
        title = "" if shape == before else f"`{shape}`: {next(iter(found.values()))['size']}"
        before = shape
        ours = _cell(found.get(OURS.name), "{}_ms")
        theirs = [_cell(found.get(system), "theirs_/_ours_{}") for system in systems]
        lines.append([title, *[inputs] * typed, ours, *theirs])
    table = pipe_table(["scan", *["inputs"] * typed, f"{OURS.name}, ms", *systems], lines)
    versions = ", ".join(f"{name} {words}" for name, words in record["peers"].items() if name in systems)
    notes = [_head(record), f"{table}\nVersions: {versions}.", *_memory(cases, systems)]
    return "\n\n".join(notes) + "\n"


def _head(record: Mapping[str, Any]) -> str:
    machine, on_gpu = record["machine"], record["machine"]["device"] != "CPU"
    words = [f"`mambacl bench against --device {'cuda' if on_gpu else 'cpu'}`"]
    words += [f"commit {record['commit']}"] if record.get("commit") else []
    words.append(machine["device"] if on_gpu else f"{machine['cpu']}, {machine['vectors']}")
    threads = machine["threads"]
    words += [] if on_gpu else [f"{threads} thread" + "s" * (threads > 1)]
    busy = (machine.get("load") or 0) > BUSY * (machine["cores"] or 1)
    words += [f"while the machine was busy: load {machine['load']} on {machine['cores']} cores"] if busy else []
    words += [f"PyTorch {record['versions']['torch']}", record["date"][:10]]
    return "; ".join(words) + "."


def _cell(row: Row | None, key: str) -> str:
    """Forward / forward and backward; only forward for a system without gradients."""
    if row is None:
        return ""
    if not row["agrees"]:
        return "disagrees"
    return " / ".join(figure for call in CALLS if (figure := shown(row.get(key.format(call)))))


def _memory(cases: Cases, systems: Sequence[str]) -> list[str]:
    """The range of each system's peak memory relative to ours; empty on the CPU, where it is not measured."""
    ranges = []
    for system in systems:
        both = [(found[OURS.name].get("peak_MiB"), found.get(system, {}).get("peak_MiB")) for found in cases.values()]
        ratios = [theirs / ours for ours, theirs in both if isinstance(ours, float) and isinstance(theirs, float)]
        if ratios:
            ranges.append(f"{system} {min(ratios):.2g} to {max(ratios):.2g}")
    return [f"Peak memory of forward and backward, as a multiple of {OURS.name}'s: {', '.join(ranges)}."] * bool(ranges)


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        raise UserError("Name the pages, e.g. docs/speed.md.")
    for page in map(Path, arguments):
        page.write_text(with_tables(page.read_text(encoding="utf-8"), page.parent), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
