"""What a run folder says, read and checked once: results, configuration, epochs, and the spectra of its null space.

A folder may be of a run that still goes on or broke off; whatever it has finished so far is a valid record.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mambacl.errors import UserError
from mambacl.evaluation import SCENARIOS
from mambacl.files import ALIAS

SCHEMA = 1
NULLSPACE_FILE = re.compile(r"task-(\d+)\.safetensors")

Floats = NDArray[np.float64]


class Spectrum(NamedTuple):
    """Descending eigenvalues of one protected part, and how many trailing directions count as null."""

    values: Floats
    rank: int


@dataclass(frozen=True)
class RunRecord:
    """One run folder as it was when it was read."""

    folder: Path
    results: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    stream: Mapping[str, Any] = field(default_factory=dict)
    epochs: tuple[Mapping[str, Any], ...] = ()
    """one entry an epoch, by task and epoch; of an epoch that was repeated after a resume, the later entry"""
    spectra: Mapping[str, Spectrum] = field(default_factory=dict)
    """by protected part, after the latest task that has a file; parts that share a feature share the array"""
    spectra_task: int | None = None
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """block, kind and feature of each protected part, as stored beside the spectra"""
    audit: Mapping[str, Any] = field(default_factory=dict)
    """what audit.json says, or nothing"""
    setting: Mapping[str, Any] = field(default_factory=dict)
    """the null-space setting stored beside the spectra, or else the configuration's"""

    @property
    def method(self) -> str:
        return str(self.results.get("method", "unknown method"))

    @property
    def backbone(self) -> str:
        return str(self.results.get("backbone", "unknown backbone"))

    @property
    def benchmark(self) -> str:
        """With the scenario, where it is not the usual one: figures of two scenarios do not compete."""
        name = str(self.results.get("benchmark", "unknown benchmark"))
        return name if self.scenario == "class" else f"{name}, {self.scenario}-incremental"

    @property
    def scenario(self) -> str:
        return str(self.results.get("scenario", "class"))

    @property
    def domains(self) -> list[str]:
        """Of each task, where the tasks are domains."""
        return [str(name) for name in self.results.get("domains") or []]

    @property
    def seed(self) -> Any:
        return self.results.get("seed", self.config.get("seed"))

    @property
    def status(self) -> str:
        return str(self.results.get("status", "unknown"))

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def tasks(self) -> list[list[Any]]:
        """The classes of each task, the tasks to come included."""
        return list(self.results["tasks"])

    @property
    def tasks_done(self) -> int:
        return len(self.results["correct"])

    @property
    def headline(self) -> str:
        """Whether the recipe's headline accuracy is a mean over "tasks" or over "images"."""
        training = self.config.get("training")
        return "images" if isinstance(training, Mapping) and training.get("headline") == "images" else "tasks"

    def accuracies(self) -> Floats:
        """R[t, j], the share right on task j after task t, as (tasks done, tasks done); NaN above the diagonal."""
        done = self.tasks_done
        matrix = np.full((done, done), np.nan)
        for t, row in enumerate(self.results["correct"]):
            for j, correct in enumerate(row):
                total = self.results["total"][j]
                matrix[t, j] = correct / total if total else np.nan
        return matrix

    def after_each_task(self, over: str) -> Floats:
        """Accuracy over all tasks seen after each task: a mean over "tasks", or over "images"."""
        if over == "images":
            totals = np.cumsum(self.results["total"][: self.tasks_done], dtype=np.float64)
            right = np.array([sum(row) for row in self.results["correct"]], dtype=np.float64)
            return np.divide(right, totals, out=np.full(len(right), np.nan), where=totals > 0)
        return np.array([_mean(row[: t + 1]) for t, row in enumerate(self.accuracies())])

    def forgetting_by_task(self) -> Floats:
        """For each task before the last one learned: best accuracy over the rows before the last, less the last."""
        matrix = self.accuracies()
        return np.array([np.max(matrix[j:-1, j]) - matrix[-1, j] for j in range(len(matrix) - 1)])

    def metric(self, name: str) -> float | None:
        """A figure of `results["metrics"]`, as a fraction of one; None where the run has none."""
        value = self.results.get("metrics", {}).get(name)
        return float(value) if isinstance(value, int | float) and np.isfinite(value) else None

    @property
    def skipped(self) -> list[str]:
        """Images left out because they could not be read: split, name, what was wrong."""
        found = self.results.get("skipped")
        images = found.get("images") if isinstance(found, Mapping) else None
        return [str(image) for image in images] if isinstance(images, list) else []

    def class_name(self, class_id: Any) -> str:
        names = self.results.get("class_names") or []
        known = isinstance(class_id, int) and 0 <= class_id < len(names)
        return str(names[class_id]) if known else f"class {class_id}"


def load_run(path: str | Path) -> RunRecord:
    """Reads a run folder; one that is missing, of another kind or damaged is a `UserError`."""
    folder = Path(path)
    if not folder.is_dir():
        what = "is a file, not a run folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}; give a folder that mambacl train wrote, such as runs/<preset>-<method>-0.")
    if not (folder / "results.json").is_file():
        raise UserError(
            f"{folder} is not a run folder, for it has no results.json; give a folder that mambacl train wrote, "
            "such as runs/<preset>-<method>-0."
        )
    results = _read_results(folder / "results.json")
    config_text = _read_text(folder / "config.yaml")
    stream = folder / "stream.json"
    config = _parse_config(folder / "config.yaml", config_text)
    spectra, spectra_task, setting, parts = _read_spectra(folder / "checkpoints")
    configured = config.get("nullspace")
    setting = setting or (configured if isinstance(configured, Mapping) else {})
    return RunRecord(
        folder=folder,
        results=results,
        config=config,
        config_text=config_text,
        stream=_mapping(stream, _parse_json(stream, _read_text(stream))) if stream.is_file() else {},
        epochs=_read_epochs(folder / "metrics.jsonl"),
        spectra=spectra,
        spectra_task=spectra_task,
        parts=parts,
        audit=_read_audit(folder / "audit.json"),
        setting=setting,
    )


def _read_audit(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    audit = _mapping(path, _parse_json(path, _read_text(path)))
    if audit.get("schema") != SCHEMA or not all(isinstance(audit.get(key), list) for key in ("tasks", "updates")):
        raise UserError(f"{path} is no audit that this version reads; make it again with mambacl audit {path.parent}.")
    return audit


def _read_results(path: Path) -> Mapping[str, Any]:
    results = _mapping(path, _parse_json(path, _read_text(path)))
    if results.get("schema") != SCHEMA:
        raise UserError(
            f"{path} has the schema {results.get('schema')!r}, and this version of mambacl reads schema {SCHEMA}: "
            "make the report with the version that wrote the run."
        )
    problem = _problem(results)
    if problem:
        raise UserError(f"{path} is damaged ({problem}); restore it, or train the run again with --overwrite.")
    return results


def _problem(results: Mapping[str, Any]) -> str | None:
    """What is wrong with the counts, in words; every table and figure relies on them."""
    tasks, correct, total = (results.get(name) for name in ("tasks", "correct", "total"))
    for name, value in (("tasks", tasks), ("correct", correct), ("total", total)):
        if not isinstance(value, list):
            return f"'{name}' is not a list"
    assert isinstance(tasks, list) and isinstance(correct, list) and isinstance(total, list)
    if not all(isinstance(task, list) for task in tasks):
        return "'tasks' is not a list of lists of classes"
    if len(correct) > len(total) or len(correct) > len(tasks):
        return f"{len(correct)} rows of counts for {min(len(total), len(tasks))} tasks"
    if not all(_is_count(value) for value in total):
        return "'total' holds something else than counts"
    for t, row in enumerate(correct):
        if not isinstance(row, list) or len(row) != t + 1:
            return f"row {t} of 'correct' does not have {t + 1} counts"
        if not all(_is_count(value) and value <= total[j] for j, value in enumerate(row)):
            return f"row {t} of 'correct' holds something else than counts up to 'total'"
    for name in ("metrics", "seconds", "versions"):
        if not isinstance(results.get(name, {}), Mapping):
            return f"'{name}' is not a mapping"
    if str(results.get("scenario", "class")) not in SCENARIOS:
        return f"'scenario' is none of {', '.join(SCENARIOS)}"
    domains = results.get("domains")
    if domains is not None and (not isinstance(domains, list) or len(domains) != len(tasks)):
        return "'domains' does not name one for each task"
    for name in ("class_names", "class_order"):
        if not isinstance(results.get(name) or [], list):
            return f"'{name}' is not a list"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_epochs(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The epoch events. A last line cut off by a crash is left out; a broken line before it is an error."""
    lines = _read_text(path).split("\n")
    last: dict[tuple[int, int], Mapping[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise UserError(f"{path} is damaged in line {number}; remove that line to go on without it.") from None
        if isinstance(event, Mapping) and event.get("event") == "epoch":
            try:
                last[int(event["task"]), int(event["epoch"])] = event
            except (KeyError, TypeError, ValueError):
                raise UserError(f"{path}: line {number} is an epoch without task and epoch; remove it.") from None
    return tuple(last[key] for key in sorted(last))


def _read_spectra(
    folder: Path,
) -> tuple[dict[str, Spectrum], int | None, Mapping[str, Any], Mapping[str, Mapping[str, str]]]:
    """Spectra and ranks of the latest null space. Covariances and bases, which are large, stay on disk."""
    files = {int(match[1]): path for path in folder.glob("*") if (match := NULLSPACE_FILE.fullmatch(path.name))}
    if not files:
        return {}, None, {}, {}
    path = files[max(files)]
    try:
        with safe_open(path, framework="np") as file:
            text = dict(file.metadata() or {})
            own = set(file.keys())
            holders = {name: name for name in own}
            holders |= {key.removeprefix(ALIAS): name for key, name in text.items() if key.startswith(ALIAS)}
            loaded: dict[str, Floats] = {}
            spectra: dict[str, Spectrum] = {}
            for name in sorted(name for name in holders if name.endswith(".spectrum")):
                part, holder = name.removesuffix(".spectrum"), holders[name]
                if holder not in loaded:
                    loaded[holder] = np.asarray(file.get_tensor(holder), dtype=np.float64)
                rank, values = file.get_tensor(holders[f"{part}.rank"]), loaded[holder]
                # Of a convolution, the mean over its groups.
                spectra[part] = Spectrum(values.reshape(-1, values.shape[-1]).mean(0), round(float(np.mean(rank))))
        setting, parts = (json.loads(text.get(key, "{}")) for key in ("setting", "parts"))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); move it away to make the report without its spectra.") from None
    setting, parts = (value if isinstance(value, Mapping) else {} for value in (setting, parts))
    return spectra, max(files), setting, parts


def _parse_config(path: Path, text: str) -> Mapping[str, Any]:
    try:
        return _mapping(path, yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML ({_one_line(error)}); restore the file.") from None


def _parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); restore the file.") from None


def _mapping(path: Path, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{path} holds a {type(value).__name__} where a mapping belongs; restore the file.")
    return value


def _read_text(path: Path) -> str:
    """The text of a file, empty if there is none: only results.json is needed for a report."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; restore the file.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions.") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _mean(values: Floats) -> float:
    """Mean without tasks that have no test image (NaN)."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")
