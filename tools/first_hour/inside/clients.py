"""Fifty clients at once until a file appears:  clients.py URL FOLDER STOP OUT

Writes the answers and what was lost as JSON.
"""

import json
import sys
from pathlib import Path

from mambacl.deploy.clients import ask

CLIENTS, FEWEST = 50, 4  # clients, and requests per client


def main() -> None:
    url, folder, stop, out = sys.argv[1], *map(Path, sys.argv[2:])
    files = sorted(folder.rglob("*.png"))
    outcome = ask(url, [file.read_bytes() for file in files], CLIENTS, lambda sent: sent >= FEWEST and stop.exists())
    answers = [{"file": str(files[a.image]), "version": a.version, "row": a.row} for a in outcome.answers]
    out.write_text(json.dumps({"answers": answers, "lost": outcome.lost, "seconds": outcome.seconds}))


if __name__ == "__main__":
    main()
