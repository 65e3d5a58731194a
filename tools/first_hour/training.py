"""The demo, the user's own images, and a run that is killed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

from hour import LONGEST, SOURCE, Hour
from images import broken_image, large_png

LEAST = 0.75  # accuracy on the user's 140 test images: 0.82, less two standard errors; chance would be 0.14
RECORDED = json.loads((SOURCE / "docs" / "results" / "demo.json").read_text(encoding="utf-8"))["rows"]["analytic"]
MARGIN = 3  # points beyond the range that seeds and CPUs have given
KILLS = 2
TRAINED = ("--method", "mamba-cl", "--training.passes", "2")


def demo(hour: Hour) -> None:
    done = hour.works("the demo trains", hour.mambacl("train", "demo", "--out", "runs/demo"))
    hour.check("it prints a table and names the report", "Report: runs/demo/report.html" in done.out, done.out[-300:])
    accuracy = 100 * results(hour.work / "runs" / "demo")["metrics"]["final_accuracy_tasks"]
    low, high = RECORDED["range over seeds and CPUs"]
    hour.check("its accuracy is the documented one", low - MARGIN <= accuracy <= high + MARGIN, accuracy)
    run = hour.work / "runs" / "demo"
    hour.refuses("a preset that does not exist", lambda: hour.mambacl("train", "demoo"), run, mentions="demo")
    hour.refuses("a value of a wrong type", lambda: hour.mambacl("train", "demo", "--seed", "x"), run, mentions="seed")
    hour.refuses("other options for the same folder", lambda: train(hour, "demo", run, "--seed", "1"), run)


def own_images(hour: Hour) -> None:
    hour.works("folders of images are made", hour.script("photos.py", hour.work))
    train_images = ("--stream.root", "photos", "--stream.tasks", "3")
    hour.works("they train", hour.mambacl("train", "images", *train_images, "--out", "runs/photos"))
    accuracy = results(hour.run)["metrics"]["final_accuracy_tasks"]
    hour.check(f"the accuracy is above {LEAST:.0%}", accuracy > LEAST, accuracy)
    again = hour.works("`evaluate` counts the same", hour.mambacl("evaluate", "runs/photos"))
    hour.check("and says so", "The run recorded the same counts." in again.out, again.out)
    shutil.copytree(hour.run, hour.deployed)
    bad_folders(hour)


def bad_folders(hour: Hour) -> None:
    out = hour.work / "runs" / "bad"

    def trained(root: Path, *words: str) -> None:
        what = root.name.replace("-", " ")
        hour.refuses(what, lambda: train(hour, "images", out, "--stream.root", str(root), *words), root, absent=out)

    folders = hour.work / "bad"
    (folders / "an-empty-folder").mkdir(parents=True)
    trained(folders / "an-empty-folder")
    trained(folders / "no-such-folder")
    for what, data in (
        ("a-broken-image", broken_image(hour.photos)),
        ("an-empty-image", b""),
        ("text-named-png", b"hello"),
        ("200-megapixels", large_png()),
    ):
        root = folders / what
        shutil.copytree(hour.photos, root)
        some_class = sorted((root / "train").iterdir())[0]
        (some_class / "bad.png").write_bytes(data)
        trained(root, "--stream.tasks", "3")
    root = folders / "a-class-without-images"
    shutil.copytree(hour.photos, root)
    (root / "train" / "nothing").mkdir()
    (root / "test" / "nothing").mkdir()
    trained(root, "--stream.tasks", "3")
    root = folders / "more-tasks-than-classes"
    shutil.copytree(hour.photos, root)
    trained(root, "--stream.tasks", "30")
    hour.refuses(
        "an option under a shorter name",
        lambda: hour.mambacl("train", "images", "--root", "photos"), absent=out, mentions="--stream.root",
    )  # fmt: skip
    weights = next(iter((hour.run / "checkpoints").glob("backbone.safetensors")))
    hour.refuses(
        "weights of a model of another size",
        lambda: train(hour, "images", out, "--stream.root", "photos", "--stream.tasks", "3",
                      "--backbone", "vim_nano", "--pretrained", str(weights)), absent=out,
    )  # fmt: skip
    shutil.rmtree(folders)


def kill_and_resume(hour: Hour) -> None:
    """SIGKILL at random moments; the same bits in the end as without."""
    moments = random.Random(hour.seed)
    steady, killed = hour.work / "runs" / "steady", hour.work / "runs" / "killed"
    words = ("images", "--stream.root", "photos", "--stream.tasks", "3", *TRAINED)
    done = hour.works("a run trains without a break", hour.mambacl("train", *words, "--out", steady))
    inside = sum(results(steady)["seconds"][phase] for phase in ("train", "covariance", "decomposition", "evaluate"))
    command = [*hour.command, "train", *words, "--out", str(killed)]
    for number in range(KILLS):
        after = moments.uniform(0, inside / (KILLS + 1))  # so that every kill comes before the end
        where = kill(hour, command, killed, after)
        status = results(killed).get("status")
        what = f"kill {number + 1}: {after:.1f} s into the training, in {where}"
        hour.need(what, status == "running", f"the status is {status} after {done.seconds:.0f} s")
        command = [*hour.command, "resume", str(killed)]
    hour.refuses("`learn` of an unfinished run", lambda: hour.mambacl("learn", killed, "--new", "more-photos"), killed)
    watched = hour.mambacl("watch", killed)
    said = ": killed\n" in watched.out and "mambacl resume" in watched.out and watched.code == 1
    hour.check("`watch` says that it was killed and how to continue, and exits with 1", said, watched.out)
    hour.works("`resume` finishes it", hour.mambacl("resume", killed))
    same = hour.script("same_run.py", steady, killed)
    hour.check("the result is the same, bit for bit", same.code == 0, same)
    hour.refuses("`resume` of what is no run", lambda: hour.mambacl("resume", "photos"), hour.photos)


def kill(hour: Hour, command: list[str], run: Path, after: float) -> str:
    """Kills a run some seconds after its training has begun. Returns where it was."""
    before = progress(run)
    process = subprocess.Popen(
        command, cwd=hour.work, env=hour.variables(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + LONGEST
        while (now := progress(run)) == before or not now.get("task"):
            if process.poll() is not None or time.monotonic() > end:
                return "nothing: it ended before it trained"
            time.sleep(0.01)
        time.sleep(after)
        place = progress(run)
        return f"task {place.get('task')}, {place.get('phase')}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def progress(run: Path) -> dict[str, object]:
    return read(run / "progress.json")


def results(run: Path) -> dict:  # type: ignore[type-arg]
    return read(run / "results.json")


def read(path: Path) -> dict:  # type: ignore[type-arg]
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def train(hour: Hour, preset: str, out: Path, *words: str):  # type: ignore[no-untyped-def]
    return hour.mambacl("train", preset, "--quiet", "--out", out, *words)
