"""Three more classes, the gate, and the way back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from hour import Done, Hour, digest
from images import broken_image, large_png
from page import look
from training import read, results, train

NEW = 3  # classes
TASKS = 3  # of the training
LEAST_NEW = 0.8  # share of the new classes' images that must be right; measured: 0.93
MOST_LOST = 0.05  # share of the old classes' images that may be right before and wrong after; measured: 0.02


def learn(hour: Hour) -> None:
    before = answers(hour, hour.run)
    bad_classes(hour)
    untouched = digest(hour.run)
    plan = hour.works("a dry run", hour.mambacl("learn", "runs/photos", "--new", "more-photos", "--dry-run"))
    same = digest(hour.run) == untouched and "Nothing has changed." in plan.out
    hour.check("it changes nothing", same, plan.out)
    words = ("learn", "runs/photos", "--new", "more-photos", "--test", "test-photos")
    stopped = hour.mambacl(*words, "--max-negative-flips", "0")
    refused = stopped.code == 1 and "keeps its old model" in stopped.out and digest(hour.run) == untouched
    if stopped.code == 0:
        hour.works("the way back", hour.mambacl("rollback", "runs/photos", "--task", str(TASKS)))
    done = hour.works(f"{NEW} more classes are learned", hour.mambacl(*words))
    hour.check("it compares before and after", "all known" in done.out and "all new" in done.out, done.out[-500:])
    after = answers(hour, hour.run)
    names = {path.name for path in hour.more.iterdir()}
    was_right, is_right = right(before), right(after)
    new = {file for file in best(after) if Path(file).parent.name in names}
    old = set(best(after)) - new
    lost = len((was_right - is_right) & old)
    hour.check("past a limit the old model stays, and the exit code is 1", refused == (lost > 0), f"{lost}; {stopped}")
    share = len(is_right & new) / len(new)
    hour.check(f"{LEAST_NEW:.0%} of the images of new classes are recognised", share >= LEAST_NEW, f"{share:.0%}")
    few = lost <= MOST_LOST * len(old)
    hour.check(f"at most {MOST_LOST:.0%} of the images of old classes are lost", few, f"{lost} of {len(old)}")


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
    passing = ("--max-drop", str(100 * MOST_LOST), "--max-negative-flips", str(MOST_LOST))
    files = ("--json", "update.json", "--page", "update.html")
    done = hour.works("a good update passes, with exit code 0", hour.mambacl(*words, *passing, *files))
    hour.check("and says so", "within the limits" in done.out, done.out[-300:])
    found = read(hour.work / "update.json")
    same = found["limits"]["max_drop"] == 100 * MOST_LOST
    hour.check("its JSON names no broken limit", found["broken"] == [] and same, found)
    look(hour, hour.work / "update.html", "update")
    to_the_image(hour, words, found)
    worse_model(hour)
    (hour.work / "empty").mkdir()
    hour.refuses("an empty test folder", lambda: hour.mambacl(*words[:3], "--test", "empty"), hour.run, hour.deployed)
    hour.refuses("no test folder", lambda: hour.mambacl(*words[:3]), hour.run, mentions="--test")
    hour.refuses("a limit that is none", lambda: hour.mambacl(*words, "--max-drop", "much"), hour.run)
    hour.refuses("a file that is no model", lambda: hour.mambacl("compare", "deployed", "limits.yaml", *words[3:]))


def to_the_image(hour: Hour, words: tuple[str, ...], found: dict) -> None:  # type: ignore[type-arg]
    """Limits at what the update costs, and one image below."""
    old, new = right(answers(hour, "deployed")), right(answers(hour, hour.run))
    known = {path.name for path in (hour.photos / "train").iterdir()}
    lost = sum(Path(file).parent.name in known for file in old - new)
    images, drop = found["shared"]["images"], max(0.0, found["drop"])
    hour.check("it counts as lost what `predict` loses", found["shared"]["lost"] == lost, f"{lost}; {found['shared']}")
    exact = ("--max-negative-flips", repr(lost / images), "--max-drop", repr(drop))
    hour.works("limits at exactly what it costs let it pass", hour.mambacl(*words, *exact))
    if lost:
        below = hour.mambacl(*words, "--max-negative-flips", repr((lost - 1) / images))
        hour.check("one image less stops it, with one sentence", stopped_by(below, f"{lost} of {images} images"), below)


def worse_model(hour: Hour) -> None:
    worse = hour.work / "runs" / "worse"
    hour.works(
        "a worse model is trained, on one image per class",
        train(hour, "images", worse, "--stream.root", "photos", "--stream.tasks", "3", "--stream.train_per_class", "1"),
    )
    (hour.work / "limits.yaml").write_text("max_drop: 1\n", encoding="utf-8")
    done = hour.mambacl("compare", "deployed", worse, "--test", "photos/test", "--limits", "limits.yaml")
    before, after = (sum(results(run)["correct"][-1]) for run in (hour.deployed, worse))
    images = sum(results(worse)["total"])
    points = f"fell by {100 * (before - after) / images:.2f} points"
    hour.check("it is stopped, with the drop between the runs' own counts", stopped_by(done, points), (points, done))


def stopped_by(done: Done, words: str) -> bool:
    """Exit code 1, and one sentence with these words."""
    lines = done.err.strip().splitlines()
    return done.code == 1 and len(lines) == 1 and lines[0].startswith("mambacl: ") and words in lines[0]


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


def right(rows: list[dict]) -> set[str]:  # type: ignore[type-arg]
    """The files whose most probable class is their folder's name."""
    return {file for file, name in best(rows).items() if name == Path(file).parent.name}
