"""Tables of a page that come from recorded figures.

    python -m mambacl.bench.page docs/speed.md benchmarks/results

writes between `<!-- table: FILE -->` and `<!-- end -->` what FILE of the folder says. FILE is what `mambacl bench
against --json` wrote, or `mambacl bench --json` with the name of a part: `<!-- table: FILE PART -->`.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mambacl.bench.peers import OURS
from mambacl.bench.result import Result, Row, shown
from mambacl.errors import UserError

MARKED = re.compile(
    r"(?P<begin><!-- table: (?P<file>\S+)(?: (?P<part>\w+))? -->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.S
)
BUSY = 0.75  # programs for each core, beside which times are not to be trusted
CALLS = {"forward": "forward", "forward_and_backward": "forward + backward"}


def with_tables(page: str, folder: Path) -> str:
    """The page with every marked table as its file has it."""

    def table(match: re.Match[str]) -> str:
        path = folder / match["file"]
        if not path.is_file():
            raise UserError(f"{path} is not there: record it with `mambacl bench ... --json {path}`.")
        return match["begin"] + markdown(json.loads(path.read_text(encoding="utf-8")), match["part"]) + match["end"]

    return MARKED.sub(table, page)


def markdown(record: Mapping[str, Any], part: str | None = None) -> str:
    """A line that says commit, machine, date and command, and a table."""
    if "parts" not in record:
        return f"{_head(record, 'against')}\n\n{_against(record)}"
    if part is None or part not in record["parts"]:
        raise UserError(f"There is no part '{part}' in this file; it has {', '.join(record['parts'])}.")
    found = record["parts"][part]
    result = Result(found["title"], found["rows"], left_out=("size",))
    names = result.columns()
    rows = [[shown(row.get(name)) or "" for name in names] for row in result.rows]
    return f"{_head(record, part)}\n\n{_pipes([name.replace('_', ' ') for name in names], rows)}"


def _head(record: Mapping[str, Any], part: str) -> str:
    machine, on_gpu = record["machine"], record["machine"]["device"] != "CPU"
    words = [f"`mambacl bench {part} --device {'cuda' if on_gpu else 'cpu'}`"]
    words += [f"commit {record['commit']}"] if record.get("commit") else []
    words.append(machine["device"] if on_gpu else f"{machine['cpu']}, {machine['vectors']}")
    threads = machine["threads"]
    words += [] if on_gpu else [f"{threads} thread" + "s" * (threads > 1)]
    busy = (machine.get("load") or 0) > BUSY * (machine["cores"] or 1)
    words += [f"while the machine was busy: load {machine['load']} on {machine['cores']} cores"] if busy else []
    words += [f"PyTorch {record['versions']['torch']}", record["date"][:10]]
    return "; ".join(words) + "."


def _against(record: Mapping[str, Any]) -> str:
    """Milliseconds and MiB of ours; of every other system, how many times that."""
    rows: Sequence[Row] = record["rows"]
    systems = list(dict.fromkeys(str(row["system"]) for row in rows if row["system"] != OURS.name))
    several = len({row["inputs"] for row in rows}) > 1
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((str(row["shape"]), str(row["inputs"])), {})[str(row["system"])] = row
    lines, last = [], ""
    for (shape, inputs), found in cases.items():
        title = "" if shape == last else f"`{shape}`: {next(iter(found.values()))['size']}"
        last = shape
        for call, words in CALLS.items():
            cells = [_cell(found.get(system), f"theirs_/_ours_{call}") for system in systems]
            lines.append([title, *[inputs] * several, words, _ours(found, f"{call}_ms", " ms"), *cells])
            title = inputs = ""
        if _ours(found, "peak_MiB", ""):
            peak = found[OURS.name]["peak_MiB"]
            cells = [_ratio(found.get(system, {}).get("peak_MiB"), peak) for system in systems]
            lines.append(["", *[""] * several, "peak memory", _ours(found, "peak_MiB", " MiB"), *cells])
    table = _pipes(["scan", *["inputs"] * several, "call", OURS.name, *systems], lines)
    versions = ", ".join(f"{name} {words}" for name, words in record["peers"].items() if name in systems)
    notes = [f"The others: how many times {OURS.name}'s. Versions: {versions}", *record["remarks"]]
    return table + "".join(f"\n{note}.\n" for note in notes)


def _ours(found: Mapping[str, Row], key: str, unit: str) -> str:
    figure = shown(found.get(OURS.name, {}).get(key))
    return f"{figure}{unit}" if figure else ""


def _cell(row: Row | None, key: str) -> str:
    if row is None:
        return ""
    return shown(row.get(key)) or "" if row["agrees"] else "disagrees"


def _ratio(theirs: Any, ours: Any) -> str:
    return shown(theirs / ours) or "" if theirs is not None else ""


def _pipes(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(heads), ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        raise UserError("Name a page and the folder of its figures: docs/speed.md benchmarks/results.")
    page = Path(arguments[0])
    page.write_text(with_tables(page.read_text(encoding="utf-8"), Path(arguments[1])), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
