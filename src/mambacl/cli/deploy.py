"""Commands that use a trained model: predict, compare, export."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from mambacl.config import Device
from mambacl.deploy.comparison import Limits, read_limits
from mambacl.deploy.hub_files import check_address, is_address
from mambacl.deploy.rows import as_numbers, as_row, as_sentence
from mambacl.errors import UserError
from mambacl.files import expanded, write_bytes, writing
from mambacl.options import Must, at_least, build
from mambacl.status import counted, erase, status, working

if TYPE_CHECKING:
    from mambacl.classifiers.calibration import Rates
    from mambacl.deploy import Prediction

STANDARD_INPUT = "-"
Model = Annotated[str, "a run folder, a file from `mambacl export`, or hf://OWNER/NAME"]
Answers = list[tuple[Path, "Prediction | UserError"]]
Share = Annotated[
    float | None,
    "call images unknown, about this share of those of known classes",
    Must("be at least 0 and below 1", lambda value: value is None or 0 <= value < 1),
]


def predict(
    run: Model,
    *image: Annotated[str, "image files, folders, or - to read file names from standard input"],
    top: Annotated[int, "classes per image", at_least(1)] = 1,
    json_: Annotated[bool, "print JSON"] = False,
    csv_: Annotated[bool, "print CSV"] = False,
    out: Annotated[Path | None, "write to this file; .json and .csv choose the format"] = None,
    unknown: Share = None,
    unknown_below: Annotated[
        float,
        "call an image unknown if its best class is less probable than this",
        Must("be between 0 and 1", lambda value: 0 <= value <= 1),
    ] = 0.0,
    batch_size: Annotated[int, "images per batch; affects only the speed", at_least(1)] = 64,
    device: Annotated[Device, "where to compute: auto, cpu, cuda, cuda:N"] = "auto",
) -> int:
    """classify images with a trained model: `mambacl predict RUN photo.jpg`

    Exits with 1 if an image cannot be read; the others are classified all the same."""
    if json_ and csv_:
        raise UserError("--json and --csv exclude each other: choose one.")
    if unknown is not None and unknown_below:
        raise UserError("--unknown and --unknown-below exclude each other: choose one.")
    check_model(run)
    if not image:
        raise UserError("Name the images: files, folders, or - to read file names from standard input.")
    if out is not None and not out.parent.is_dir():
        raise UserError(f"The folder {out.parent} for --out does not exist: create it, or choose another.")
    files = list(_files(image))
    with status("loading the model"):
        from mambacl.deploy import load

        model = load(run, device)
    if unknown is not None:
        unknown_below = model.rejecting(unknown).threshold
    if model.not_calibrated:
        print(f"mambacl: {model.not_calibrated}", file=sys.stderr)
    rates = model.calibration.rates(unknown_below) if model.calibration and unknown_below else None
    answers: Answers = []
    found = model.predict_each(files, top, batch_size, unknown_below)
    for file, answer in zip(files, counted(found, len(files)), strict=True):
        if isinstance(answer, UserError):
            erase()
            print(f"mambacl: {answer}", file=sys.stderr)
        answers.append((file, answer))
    suffix = "" if out is None else out.suffix
    if json_ or (suffix == ".json" and not csv_):
        text = _json(answers, not model.not_calibrated, rates)
    elif csv_ or suffix == ".csv":
        text = _csv(answers, not model.not_calibrated, rates)
    else:
        text = _table(answers) + ("" if rates is None else f"{as_sentence(rates)}\n")
    if out is None:
        print(text, end="")
    else:
        _write(out, text)
    failed = sum(isinstance(answer, UserError) for _, answer in answers)
    if failed > 1:
        print(f"mambacl: {failed} of {len(answers)} images could not be read.", file=sys.stderr)
    return 1 if failed else 0


def compare(
    old: Model,
    new: Model,
    *,
    test: Annotated[Path | None, "a folder with CLASS/* images, with the models' class names"] = None,
    own: Limits,
    limits: Annotated[Path | None, "a YAML file with these limits; the command line comes first"] = None,
    json_: Annotated[Path | None, "write all figures to this file"] = None,
    page: Annotated[Path | None, "write an HTML page to this file"] = None,
    batch_size: Annotated[int, "images per batch", at_least(1)] = 64,
    device: Annotated[Device, "where to compute: auto, cpu, cuda, cuda:N"] = "auto",
) -> int:
    """check an update before it is shipped: `mambacl compare OLD NEW --test FOLDER --max-negative-flips 0.01`

    Exits with 0 if NEW is within the limits, with 1 if it is past one, and with 2 after a mistake."""
    for model in (old, new):
        check_model(model)
    if test is None:
        raise UserError("Name the test images: --test FOLDER, a folder with one folder of images per class.")
    for option, file in (("--json", json_), ("--page", page)):
        if file is not None and not file.parent.is_dir():
            raise UserError(f"The folder {file.parent} for {option} does not exist: create it, or choose another.")
    bounds = chosen_limits(own, limits)
    with working("loading the models", "comparing them") as show:
        from mambacl.deploy import compare as compare_models

        found = compare_models(old, new, test, device=device, batch_size=batch_size, show=show)
    from mambacl.deploy.comparison_page import as_page, as_text

    for sentence in found.unreadable:
        print(f"mambacl: {sentence}", file=sys.stderr)
    broken = found.broken(bounds)
    limited = bounds != Limits()
    if json_ is not None:
        content = {**found.as_dict(), "limits": asdict(bounds), "broken": broken}
        _write(json_, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    if page is not None:
        _write(page, as_page(found, broken, limited))
    print(as_text(found))
    for sentence in broken:
        print(f"mambacl: {sentence}", file=sys.stderr)
    if limited and not broken:
        print("The new model is within the limits.")
    return 1 if broken else 0


def chosen_limits(own: Limits, file: Path | None) -> Limits:
    """The limits of the command line, and those of a file."""
    given = {name: value for name, value in asdict(own).items() if value is not None}
    return build(Limits, {**(read_limits(file) if file is not None else {}), **given})


def export(
    run: Model,
    *,
    to: Annotated[Literal["safetensors", "onnx", "openvino", "pt2"], "format of the file"] = "safetensors",
    out: Annotated[Path | None, "file to write; default: the run's name in this folder"] = None,
    preprocessing: Annotated[bool, "take uint8 images of any size, and prepare them (not for safetensors)"] = False,
    images: Annotated[Path | None, "images to compare on; default: test images of the run"] = None,
    form: Annotated[
        Literal["auto", "loop", "chunked", "unrolled"], "of the scan; auto: the faster one of loop and chunked"
    ] = "auto",
    batch_size: Annotated[
        int, "images that you will give to the model per call; auto and the speeds are for it", at_least(1)
    ] = 1,
    json_: Annotated[bool, "print JSON"] = False,
) -> None:
    """write a model to a file, to predict with: `mambacl export RUN --to onnx --out model.onnx`

    safetensors, which `mambacl predict` and `mambacl.load` read, takes a run. The other formats run without mambacl;
    they are written only if their scores of real images are the same, and their speed is printed beside ours. The form
    of the scan is what is fastest on this machine."""
    check_model(run)
    if to == "safetensors":
        if preprocessing or images is not None or form != "auto":
            raise UserError("--preprocessing, --images and --form need another format: add --to onnx, openvino or pt2.")
        if is_address(run):
            raise UserError(f"{run} is a safetensors file already: get it with `mambacl pull`.")
        place = expanded(run)
        if place.is_file():
            raise UserError(f"{run} is a file, and only a run can be exported to safetensors: give a run folder.")
        _export_safetensors(place, out or Path(f"{place.resolve().name}.{to}"), json_)
    else:
        _ship(run, to, out, preprocessing, images, form, batch_size, json_)


def _export_safetensors(run: Path, path: Path, as_json: bool) -> None:
    with status("loading the model"):
        from mambacl.deploy import load

        model = load(run, "cpu")
    model.save(path)
    size = path.stat().st_size
    if as_json:
        print(json.dumps({"files": [str(path)], "format": "safetensors", "bytes": size, "classes": len(model.classes)}))
    else:
        print(f"{path}: {size / 1e6:.1f} MB, {len(model.classes)} classes")


def _ship(
    run: str,
    to: str,
    out: Path | None,
    preprocessing: bool,
    folder: Path | None,
    form: str,
    batch: int,
    as_json: bool,
) -> None:
    if folder is None and (is_address(run) or expanded(run).is_file()):
        raise UserError(f"{run} is a file without images: name some to compare on with --images FOLDER.")
    with status("loading the model"):
        from mambacl.deploy import load
        from mambacl.deploy.foreign import FORMATS
        from mambacl.deploy.shipping import checked, folder_images, run_images, ship

        path = out or Path(f"{_name(run)}{FORMATS[to].suffix}")
        checked(to, path, form)
        model = load(run, "cpu")
        images = run_images(expanded(run)) if folder is None else folder_images(folder)
    source = "test images of the run" if folder is None else str(folder)
    with status(f"exporting to {to}, which can take some minutes"):
        done = ship(model, path, to, images, source, preprocessing=preprocessing, form=form, batch=batch)
    if as_json:
        print(json.dumps(done.as_dict(), ensure_ascii=False, indent=1))
        return
    print(f"{' and '.join(done.files)}: {done.bytes / 1e6:.1f} MB, {done.classes} classes")
    print(
        f"Compared in {done.runtime} on {done.images} images ({done.source}): scores differ by at most "
        f"{done.difference:.2g} (rounding allows {done.allowed:.2g}), {done.same_answers} answers are the same."
    )
    if done.resized_difference is not None:
        print(
            f"If the model resizes the images, scores differ by at most {done.resized_difference:.2g} (one grey level "
            f"allows {done.resized_allowed:.2g})."
        )
    speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in done.images_per_second_by_form.items())
    print(
        f"Images per second on this CPU, {done.batch} per call: {done.our_images_per_second:.0f} in mambacl; in "
        f"{done.runtime}, by the form of the scan: {speeds}. The file has the form {done.form}."
    )
    if model.description.config.precision == "bf16":
        print("The run used bf16; the exported model computes in float32.")


def _name(model: str) -> str:
    """For a file made from it."""
    if is_address(model):
        return check_address(model)
    place = expanded(model)
    return place.stem if place.is_file() else place.resolve().name


def _write(path: Path, text: str) -> None:
    with writing(path):
        write_bytes(path, text.encode(errors="backslashreplace"))  # as on a terminal


def check_model(model: str) -> None:
    """Refuses a mistyped path or address before PyTorch is imported."""
    if is_address(model):
        check_address(model)
        return
    path = expanded(model)
    if not path.exists():
        raise UserError(
            f"{model} does not exist: give a run folder, a file from `mambacl export RUN`, or hf://OWNER/NAME."
        )
    if path.is_dir():
        from mambacl.training.folder import RunFolder

        RunFolder.existing(path)


def _files(words: Iterable[str]) -> Iterator[Path]:
    """The files that these words name. A folder stands for the images in it and below."""
    from mambacl.data.sets.folders import images_under

    for word in words:
        if word == STANDARD_INPUT:
            lines = [os.fsdecode(line) for line in sys.stdin.buffer.read().splitlines() if line.strip()]
            if not lines:
                raise UserError("Standard input has no file names: write one per line.")
            yield from map(Path, lines)
        elif (path := Path(word)).is_dir():
            found = images_under(path)
            if not found:
                raise UserError(f"The folder {path} has no images, nor have its subfolders.")
            yield from found
        else:
            yield path


def _json(answers: Answers, calibrated: bool, rates: Rates | None) -> str:
    rows = [as_row(str(file), answer, calibrated, rates) for file, answer in answers]
    return json.dumps(rows, ensure_ascii=False, indent=1) + "\n"


def _csv(answers: Answers, calibrated: bool, rates: Rates | None) -> str:
    from mambacl.reports.rendering import csv_text

    classes = max((len(answer.classes) for _, answer in answers if not isinstance(answer, UserError)), default=1)
    head = ["file", "class", "probability", "unknown", "error"]
    head += [f"{word}_{place}" for place in range(2, classes + 1) for word in ("class", "probability")]
    same = {"calibrated": str(calibrated).lower()}
    same |= {} if rates is None else {name: f"{value:.6f}" for name, value in as_numbers(rates).items()}
    rows = [[*head, *same]]
    for file, answer in answers:
        if isinstance(answer, UserError):
            rows.append([str(file), "", "", "", str(answer), *[""] * (2 * classes - 2 + len(same))])
            continue
        pairs = [[name, f"{value:.6f}"] for name, value in zip(answer.classes, answer.probabilities, strict=True)]
        more = [word for pair in pairs[1:] for word in pair]
        rows.append([str(file), *pairs[0], str(answer.unknown).lower(), "", *more, *same.values()])
    return csv_text(rows)


def _table(answers: Answers) -> str:
    """One line per image and class; an unknown image is marked."""
    from mambacl.reports.rendering import columns_of, pad

    good = [(file, answer) for file, answer in answers if not isinstance(answer, UserError)]
    wide = max((columns_of(str(file)) for file, _ in good), default=0)
    long = max((columns_of(name) for _, answer in good for name in answer.classes), default=0)
    lines = []
    for file, answer in good:
        for place, (name, value) in enumerate(zip(answer.classes, answer.probabilities, strict=True)):
            note = "  unknown" if answer.unknown and place == 0 else ""
            shown = pad("" if place else str(file), wide)
            lines.append(f"{shown}  {pad(name, long)}  {value:6.1%}{note}")
    return "".join(f"{line}\n" for line in lines)
