"""Predictions, and files for other runtimes."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

from hour import LONGEST_INSTALL, SOURCE, Hour
from images import broken_image, large_png
from updating import answers, best

CLOSE = 1e-4  # probabilities; `predict` prints six digits
RUNTIMES = ("onnxruntime", "openvino", "numpy", "pillow")
FILES = {"onnx": "model.onnx", "openvino": "model.xml"}


def predict(hour: Hour) -> None:
    rows = answers(hour, "deployed", top=2)
    files = [row["file"] for row in rows]
    one = hour.works("one image, as a table", hour.mambacl("predict", "deployed", files[0]))
    hour.check("the table names the class", best(rows)[files[0]] in one.out and "%" in one.out, one.out)
    words = ("predict", "deployed", "-", "--top", "2")
    piped = hour.works("names from standard input", hour.mambacl(*words, "--json", stdin="\n".join(files)))
    hour.check("the answers are those for the folder", json.loads(piped.out) == rows, piped.out[:300])
    comma = hour.works("CSV", hour.mambacl("predict", "deployed", "test-photos", "--top", "2", "--csv"))
    read = list(csv.DictReader(io.StringIO(comma.out)))
    same = [(row["file"], row["class"], float(row["probability"]), row["class_2"]) for row in read] == [
        (row["file"], *row["predictions"][0].values(), row["predictions"][1]["class"]) for row in rows
    ]
    hour.check("the answers are those in JSON", same, comma.out[:300])
    hour.works("into a file", hour.mambacl("predict", "deployed", "test-photos", "--top", "2", "--out", "a.json"))
    written = json.loads((hour.work / "a.json").read_text(encoding="utf-8"))
    hour.check("it has the same answers", written == rows, written[:1])
    right = sum(Path(file).parent.name == name for file, name in best(rows).items())
    hour.check("most images of the seven classes that it knows are right", right > 0.4 * len(rows), right)
    bad_images(hour, files[0])


def bad_images(hour: Hour, good: str) -> None:
    folder = hour.work / "bad"
    (folder / "empty").mkdir(parents=True)
    for name, data in (("broken", broken_image(hour.photos)), ("text", b"hello"), ("large", large_png())):
        (folder / f"{name}.png").write_bytes(data)
        what = {"broken": "a broken image", "text": "text named .png", "large": "200 megapixels"}[name]
        hour.refuses(what, lambda name=name: hour.mambacl("predict", "deployed", f"bad/{name}.png"), hour.deployed)
    hour.refuses("an empty folder", lambda: hour.mambacl("predict", "deployed", "bad/empty"), hour.deployed)
    hour.refuses("an image that is missing", lambda: hour.mambacl("predict", "deployed", "nowhere.png"))
    hour.refuses("no image", lambda: hour.mambacl("predict", "deployed"))
    hour.refuses("empty standard input", lambda: hour.mambacl("predict", "deployed", "-"))
    hour.refuses("two formats", lambda: hour.mambacl("predict", "deployed", good, "--csv", "--json"))
    hour.refuses("a model that does not exist", lambda: hour.mambacl("predict", "deplyed", good))
    half = (hour.deployed / "checkpoints" / "backbone.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(half[: len(half) // 2])
    hour.refuses("half a model file", lambda: hour.mambacl("predict", "bad/model.safetensors", good))
    mixed = hour.mambacl("predict", "deployed", "bad/broken.png", good, "--json")
    rows = json.loads(mixed.out)
    fine = mixed.code == 1 and "error" in rows[0] and "predictions" in rows[1] and "Traceback" not in mixed.err
    hour.check("bad input: a broken image does not stop the others", fine, mixed)


def export(hour: Hour) -> None:
    runtime = runtime_environment(hour)
    expected = answers(hour, "deployed", top=7)
    for kind, name in FILES.items():
        words = ("export", "deployed", "--to", kind, "--out", name, "--preprocessing")
        done = hour.works(f"export to {kind}", hour.mambacl(*words))
        hour.check(f"{kind}: it states difference and speed", "Images per second" in done.out, done.out)
        script = hour.work / "scripts" / "runtimes.py"
        script.parent.mkdir(exist_ok=True)
        script.write_bytes((SOURCE / "tools" / "first_hour" / "inside" / "runtimes.py").read_bytes())
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        ran = hour.call([runtime / "bin" / "python", script, name, "test-photos"], variables=variables)
        hour.works(f"{kind}: it runs where there is no mambacl and no PyTorch", ran)
        theirs = json.loads(ran.out)
        worst, other = 0.0, []
        for row in expected:
            found = theirs[row["file"]]
            ours = {entry["class"]: entry["probability"] for entry in row["predictions"]}
            worst = max(worst, *(abs(found[name] - value) for name, value in ours.items()))
            other += [row["file"]] if max(found, key=lambda c: found[c]) != row["predictions"][0]["class"] else []
        hour.check(f"{kind}: all {len(expected)} answers are those of `predict`", not other, other)
        hour.check(f"{kind}: the probabilities are equal to {CLOSE:g}", worst < CLOSE, worst)
    bad_exports(hour)


def runtime_environment(hour: Hour) -> Path:
    folder = hour.work.parent / "runtimes"
    if not (folder / "bin" / "python").exists():
        version = hour.call([hour.python, "-c", "import sys; print(sys._base_executable)"]).out.strip()
        make = ["sh", SOURCE / "tools" / "make_venv.sh", version, folder]
        hour.works("an environment for the runtimes alone is made", hour.call(make, variables=os.environ))
        pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *RUNTIMES]
        done = hour.call(pip, variables=os.environ, longest=LONGEST_INSTALL)
        hour.works("ONNX Runtime and OpenVINO are installed", done)
    return folder


def bad_exports(hour: Hour) -> None:
    (hour.work / "empty").mkdir(exist_ok=True)
    (hour.work / "notes.onnx").write_text("mine", encoding="utf-8")
    for what, words in {
        "a folder that does not exist": ("--to", "onnx", "--out", "nowhere/model.onnx"),
        "a name that does not fit": ("--to", "onnx", "--out", "model.xml2"),
        "a file that is no exported model": ("--to", "onnx", "--out", "notes.onnx"),
        "a format that does not exist": ("--to", "tflite"),
        "an empty folder of images": ("--to", "onnx", "--out", "other.onnx", "--images", "empty"),
    }.items():
        hour.refuses(what, lambda words=words: hour.mambacl("export", "deployed", *words), hour.deployed)
    hour.check("bad input: the user's file is still there", (hour.work / "notes.onnx").read_text() == "mine")
