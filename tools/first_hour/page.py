"""Pages in headless Chromium: no error, no request, and a picture to look at."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hour import SOURCE, Hour

sys.path.append(str(SOURCE / "tests"))
from chromium_help import CHROMIUM, chromium

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


def report(hour: Hour) -> None:
    done = hour.works("`report` writes a page", hour.mambacl("report", "runs/photos"))
    hour.check("it prints the table", "photos" in done.out, done.out)
    look(hour, hour.run / "report.html", "report")
    if (hour.work / "runs" / "demo" / "results.json").exists():
        hour.works("`report` compares two runs", hour.mambacl("report", "runs/photos", "runs/demo"))
        look(hour, hour.work / "runs" / "comparison" / "report.html", "comparison")
    hour.refuses("a run that does not exist", lambda: hour.mambacl("report", "runs/nowhere"), hour.run)
    hour.refuses("a folder that is no run", lambda: hour.mambacl("report", "photos"), hour.photos)


def look(hour: Hour, page: Path, name: str) -> None:
    """Opens a page as on a desktop and on a phone; the screenshots stay."""
    if CHROMIUM is None:
        hour.skip(f"{name} in Chromium", "there is no Chromium here; on Debian `apt-get install chromium` installs it")
        return
    pictures = hour.work.parent / "screenshots"
    pictures.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as tab:
        for size, (width, height) in SIZES.items():
            tab.open(page, width, height)
            complaints = tab.complaints()
            hour.check(f"{name} in Chromium, {size}: no error, no request", not complaints, complaints)
            wide = tab.value("document.documentElement.scrollWidth")
            hour.check(f"{name} in Chromium, {size}: it fits the screen", wide <= width, f"{wide} pixels wide")
            tab.screenshot(pictures / f"{name}-{size}.png")
