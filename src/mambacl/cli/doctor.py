"""The command doctor: prints the findings of `mambacl.diagnosis`."""

from __future__ import annotations

import json as to_json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from mambacl.cli.help import wrap
from mambacl.status import status

if TYPE_CHECKING:
    from mambacl.diagnosis import Finding

COLUMN = 10


def doctor(*, json: Annotated[bool, "print the findings as JSON"] = False) -> int:
    """say what works on this machine, what is slow, and what to do: `mambacl doctor`

    Checks Python, PyTorch, the GPU, Triton, the C++ scan, extras, folders and free disk. Each line begins with ok,
    slow, missing or broken, followed by the remedy. The exit code is 1 if something is broken, else 0."""
    from mambacl.diagnosis import findings, system

    if json:
        found = list(findings())
        print(to_json.dumps({"system": system(), "findings": [asdict(finding) for finding in found]}, indent=1))
    else:
        print(system())
        found = show(findings())
    return int(any(finding.status == "broken" for finding in found))


def show(findings: Iterable[Finding]) -> list[Finding]:
    """Prints each finding as soon as it is made, below the name of its group; then how many need attention."""
    shown: list[Finding] = []
    left = iter(findings)
    while True:
        with status("checking"):
            finding = next(left, None)
        if finding is None:
            break
        if not shown or shown[-1].group != finding.group:
            print(f"\n{finding.group}")
        print("\n".join(lines(finding)), flush=True)
        shown.append(finding)
    print(f"\n{verdict(shown)}")
    return shown


def lines(finding: Finding) -> list[str]:
    """The status and what was found; the remedy stands below."""
    indent = " " * COLUMN
    made = wrap(f"{finding.name}: {finding.words}", f"  {finding.status:{COLUMN - 2}}", indent)
    return made + (wrap(f"-> {finding.remedy}", indent, f"{indent}   ") if finding.remedy else [])


def verdict(findings: Iterable[Finding]) -> str:
    counts = {word: sum(finding.status == word for finding in findings) for word in ("broken", "slow", "missing")}
    named = [f"{count} {word}" for word, count in counts.items() if count]
    if not named:
        return "Everything works."
    return f"{', '.join(named)}; {'fix what is broken first' if counts['broken'] else 'everything else works'}."
