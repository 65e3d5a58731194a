"""Three more classes, the gate, and the way back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from hour import Hour, digest
from images import broken_image, large_png
from page import look
from training import train

NEW = 3  # classes
TASKS = 3  # of the training


def learn(hour: Hour) -> None:
    before = answers(hour, hour.run)
    bad_classes(hour)
    untouched = digest(hour.run)
    plan = hour.works("a dry run", hour.mambacl("learn", "runs/photos", "--new", "more-photos", "--dry-run"))
    same = digest(hour.run) == untouched and "Nothing has changed." in plan.out
    hour.check("it changes nothing", same, plan.out)
    words = ("learn", "runs/photos", "--new", "more-photos", "--test", "test-photos")
    stopped = hour.mambacl(*words, "--max-negative-flips", "0", "--max-drop", "0", "--max-class-drop", "0")
    kept = digest(hour.run) == untouched
    refused = stopped.code == 1 and "keeps its old model" in stopped.out and kept
    none_lost = stopped.code == 0  # nothing was wrong that had been right: possible, and then it is learned
    hour.need("past a limit the old model stays, and the exit code is 1", refused or none_lost, stopped)
    if none_lost:
        hour.works("the way back", hour.mambacl("rollback", "runs/photos", "--task", str(TASKS)))
    done = hour.works(f"{NEW} more classes are learned", hour.mambacl(*words))
    hour.check("it compares before and after", "all known" in done.out and "all new" in done.out, done.out[-500:])
    after = answers(hour, hour.run)
    names = {path.name for path in hour.more.iterdir()}
    found = sum(Path(file).parent.name == name for file, name in best(after).items() if Path(file).parent.name in names)
    of = sum(Path(file).parent.name in names for file in best(after))
    hour.check("most images of the new classes are recognised", found > of / 2, f"{found} of {of}")
    old = [file for file in best(before) if Path(file).parent.name not in names]
    lost = sum(best(before)[file] != best(after)[file] for file in old)
    hour.check("few answers for the old classes change", lost < len(old) / 4, f"{lost} of {len(old)}")


def bad_classes(hour: Hour) -> None:
    folders = hour.work / "bad"
    known = sorted(path.name for path in (hour.photos / "train").iterdir())[0]
    files = {
        "an-empty-folder": {},
        "a-class-without-images": {"new/nothing.txt": b""},
        "a-class-that-exists": {f"{known}/1.png": next(hour.more.rglob("*.png")).read_bytes()},
        "a-broken-image": {"new/1.png": broken_image(hour.photos)},
        "200-megapixels": {"new/1.png": large_png()},
    }
    for what, content in files.items():
        root = folders / what
        root.mkdir(parents=True)
        for name, data in content.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_bytes(data)

        def learned(root: Path = root):  # type: ignore[no-untyped-def]
            return hour.mambacl("learn", "runs/photos", "--new", root)

        hour.refuses(what.replace("-", " "), learned, hour.run, root)
    hour.refuses("a folder of splits", lambda: hour.mambacl("learn", "runs/photos", "--new", "photos"), hour.run)
    (folders / "names.txt").write_text("cat\ndog\n", encoding="utf-8")
    weights = hour.run / "checkpoints" / "backbone.safetensors"
    hour.refuses(
        "a checkpoint of a model of another size",
        lambda: hour.mambacl("learn", weights, "--backbone", "vim_nano", "--classes", "bad/names.txt",
                             "--protect", "photos", "--new", "more-photos", "--out", "runs/adopted"),
        hour.run, absent=hour.work / "runs" / "adopted",
    )  # fmt: skip
    shutil.rmtree(folders)


def gate(hour: Hour) -> None:
    """`run` has learned, `deployed` has not."""
    words = ("compare", "deployed", "runs/photos", "--test", "test-photos")
    passing = ("--max-drop", "30", "--max-negative-flips", "0.5")
    files = ("--json", "update.json", "--page", "update.html")
    done = hour.works("a good update passes, with exit code 0", hour.mambacl(*words, *passing, *files))
    hour.check("and says so", "within the limits" in done.out, done.out[-300:])
    found = json.loads((hour.work / "update.json").read_text(encoding="utf-8"))
    hour.check("its JSON names no broken limit", found["broken"] == [] and found["limits"]["max_drop"] == 30, found)
    look(hour, hour.work / "update.html", "update")
    worse = hour.work / "runs" / "worse"
    hour.works(
        "a worse model is trained, on one image per class",
        train(hour, "images", worse, "--stream.root", "photos", "--stream.tasks", "3", "--stream.train_per_class", "1"),
    )
    (hour.work / "limits.yaml").write_text("max_drop: 1\n", encoding="utf-8")
    stopped = hour.mambacl("compare", "deployed", worse, "--test", "photos/test", "--limits", "limits.yaml")
    one = stopped.err.count("mambacl: ") == len(stopped.err.strip().splitlines()) == 1
    hour.check("it is stopped, with exit code 1 and one sentence", stopped.code == 1 and one, stopped)
    (hour.work / "empty").mkdir()
    hour.refuses("an empty test folder", lambda: hour.mambacl(*words[:3], "--test", "empty"), hour.run, hour.deployed)
    hour.refuses("no test folder", lambda: hour.mambacl(*words[:3]), hour.run, mentions="--test")
    hour.refuses("a limit that is none", lambda: hour.mambacl(*words, "--max-drop", "much"), hour.run)
    hour.refuses("a file that is no model", lambda: hour.mambacl("compare", "deployed", "limits.yaml", *words[3:]))


def rollback(hour: Hour) -> None:
    new = answers(hour, hour.run)
    for name, run in (("old", hour.deployed), ("new", hour.run)):
        hour.works(f"the {name} model is exported", hour.mambacl("export", run, "--out", f"{name}.safetensors"))
    back = ("rollback", "runs/photos", "--task")
    hour.refuses("a task that does not exist", lambda: hour.mambacl(*back, "99"), hour.run)
    hour.refuses("no task", lambda: hour.mambacl("rollback", "runs/photos"), hour.run, mentions="--task")
    hour.works("the run goes back", hour.mambacl(*back, str(TASKS)))
    hour.check("it answers as before", answers(hour, hour.run) == answers(hour, hour.deployed))
    hour.works("it is exported", hour.mambacl("export", "runs/photos", "--out", "back.safetensors"))
    hour.check("the file is the old one, bit for bit", bytes_of(hour, "back") == bytes_of(hour, "old"))
    hour.works("the run goes forward again", hour.mambacl(*back, str(TASKS + 1)))
    hour.check("it answers as the new model", answers(hour, hour.run) == new)
    hour.works("it is exported", hour.mambacl("export", "runs/photos", "--out", "forward.safetensors"))
    hour.check("the file is the new one, bit for bit", bytes_of(hour, "forward") == bytes_of(hour, "new"))


def bytes_of(hour: Hour, name: str) -> bytes:
    return (hour.work / f"{name}.safetensors").read_bytes()


def answers(hour: Hour, model: Path | str, top: int = 3) -> list[dict]:  # type: ignore[type-arg]
    """What `predict` says about the test images."""
    done = hour.works(
        f"`predict` with {Path(model).name}", hour.mambacl("predict", model, "test-photos", "--json", "--top", str(top))
    )
    return json.loads(done.out)


def best(rows: list[dict]) -> dict[str, str]:  # type: ignore[type-arg]
    """The most probable class of each file."""
    return {row["file"]: row["predictions"][0]["class"] for row in rows}
