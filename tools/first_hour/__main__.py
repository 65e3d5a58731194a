"""The first hour of a new user, in a clean environment:  python tools/first_hour

Builds and installs the wheel, then uses mambacl as its documentation says, with bad input at each step. Ends with the
list of what passed and failed, in OUT/summary.txt and OUT/summary.json, and exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import disk
import install
import page
import serving
import training
import updating
import using
from hour import FAILED, PASSED, SKIPPED, SOURCE, Hour, PartFailed

PARTS = {  # name: what it does, and the parts that it needs
    "doctor": (install.doctor, ()),
    "demo": (training.demo, ()),
    "own images": (training.own_images, ()),
    "kill and resume": (training.kill_and_resume, ("own images",)),
    "report": (page.report, ("own images",)),
    "learn": (updating.learn, ("own images",)),
    "gate": (updating.gate, ("learn",)),
    "predict": (using.predict, ("own images",)),
    "export": (using.export, ("own images",)),
    "serve": (serving.serve, ("own images",)),
    "rollback": (updating.rollback, ("learn",)),
    "full disk": (disk.full_disk, ("own images",)),
}


def main() -> int:
    given = arguments()
    out = given.out.resolve()
    if not given.again:
        shutil.rmtree(out / "work", ignore_errors=True)
    (out / "work").mkdir(parents=True, exist_ok=True)
    trial = given.environment is not None
    further = {"PYTHONPATH": str(given.source.resolve())} if given.source else {}
    environment = given.environment.absolute() if trial else out / "environment"
    hour = Hour(out / "work", environment, given.seed, further)
    print(f"The first hour, in {out / 'work'}, with the seed {given.seed}", flush=True)
    began, complete = time.monotonic(), set()
    try:
        installed = trial or attempt(hour, "install", lambda hour: install.install(hour, given.python, given.wheel))
        for name, (work, needed) in PARTS.items():
            missing = [other for other in needed if other not in complete and not given.again]
            if given.only and name not in given.only:
                continue
            hour.part, hour.since = name, time.monotonic()
            if not installed or missing:
                hour.skip("the whole part", f"it needs {missing[0] if missing else 'install'}")
            elif attempt(hour, name, work):
                complete.add(name)
    finally:
        code = summarise(hour, out, time.monotonic() - began, given.seed)
        if not given.keep and not trial:
            for folder in (out / "work", out / "environment"):
                shutil.rmtree(folder, ignore_errors=True)
    return code


def attempt(hour: Hour, name: str, work: object) -> bool:
    """Whether a part came to its end. A check that failed on the way does not stop the parts that build on it."""
    hour.part, hour.since = name, time.monotonic()
    try:
        work(hour)  # type: ignore[operator]
    except PartFailed:
        return False
    except Exception as error:  # the other parts are still worth trying
        hour.check("comes to its end", False, f"{type(error).__name__}: {error}")
        return False
    return True


def summarise(hour: Hour, out: Path, seconds: float, seed: int) -> int:
    counts = Counter(check.result for check in hour.checks)
    head = f"{counts[PASSED]} passed, {counts[FAILED]} failed, {counts[SKIPPED]} skipped, in {seconds / 60:.1f} minutes"
    lines = [head]
    for result in (FAILED, SKIPPED, PASSED):
        chosen = [check for check in hour.checks if check.result == result]
        lines += ["", result.capitalize() + ":"] if chosen else []
        lines += [f"  {check.part}: {check.what}{f': {check.words}' if check.words else ''}" for check in chosen]
    (out / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    content = {"seconds": seconds, "seed": seed, **counts, "checks": [asdict(check) for check in hour.checks]}
    (out / "summary.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print("\n" + "\n".join(lines))
    return 1 if counts[FAILED] or not counts[PASSED] else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tools/first_hour", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="the Python to make the environment with")
    parser.add_argument("--wheel", type=Path, help="install this one instead of building one")
    parser.add_argument("--out", type=Path, default=SOURCE / "build" / "first-hour", help="summary and screenshots")
    parser.add_argument("--keep", action="store_true", help="keep the environment and the work folder")
    parser.add_argument("--seed", type=int, default=random.randrange(1000), help="of the random moments")
    parser.add_argument("--environment", type=Path, help="quick trial: use this environment, install nothing")
    parser.add_argument("--source", type=Path, help="with --environment: a folder that holds the package")
    parser.add_argument("--again", action="store_true", help="quick trial: with what the last one left")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="only this part; can be repeated")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
