"""The record of a run: its results, configuration and epochs, and the spectra of its null space.

The run can still be in progress, or have stopped early: what it has finished is a valid record.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mambacl.config import preset_names
from mambacl.errors import UserError
from mambacl.files import ALIAS
from mambacl.training import metrics
from mambacl.training.confusion import Confusion
from mambacl.training.folder import RunFolder
from mambacl.training.learned import History, read_history

if TYPE_CHECKING:
    from mambacl.data import DataSet

Floats = NDArray[np.float64]
OWN_IMAGES = ("folders", "domain-folders", "manifest")  # data sets that are the user's


class Spectrum(NamedTuple):
    """The eigenvalues of a protected part, in descending order, and how many trailing directions are null."""

    values: Floats
    rank: int


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder when it was read."""

    folder: Path
    results: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    stream: Mapping[str, Any] = field(default_factory=dict)
    epochs: tuple[Mapping[str, Any], ...] = ()
    """one entry per epoch, sorted by task and epoch; the later entry if an epoch was repeated after a resume"""
    spectra: Mapping[str, Spectrum] = field(default_factory=dict)
    """spectrum of each protected part, after the latest task with a file; parts that share a feature share the array"""
    spectra_task: int | None = None
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """block, kind and feature of each protected part, as stored with the spectra"""
    audit: Mapping[str, Any] = field(default_factory=dict)
    """contents of audit.json, or empty"""
    confusion: Confusion | None = None
    """after the last task; None if the run did not record it"""
    learned: History | None = None
    """tasks that `mambacl learn` has added; None if there are none"""
    setting: Mapping[str, Any] = field(default_factory=dict)
    """the null-space setting stored with the spectra, or the configuration's"""
    dataset: "DataSet | None" = None
    """the run's, if this process has it open"""

    @property
    def method(self) -> str:
        return str(self.results.get("method", "unknown method"))

    @property
    def backbone(self) -> str:
        return str(self.results.get("backbone", "unknown backbone"))

    @property
    def benchmark(self) -> str:
        """The benchmark's name, with the scenario if it is not "class": scenarios do not compare."""
        name = self._own_images() or str(self.results.get("benchmark", "unknown benchmark"))
        return name if self.scenario == "class" else f"{name}, {self.scenario}-incremental"

    def _own_images(self) -> str | None:
        """The name of the user's folder or manifest, if the run would otherwise have the name of a preset."""
        stream = self.config.get("stream")
        if not isinstance(stream, Mapping) or not stream.get("root") or stream.get("dataset") not in OWN_IMAGES:
            return None
        if self.results.get("benchmark") not in ("run", *preset_names()):
            return None
        root = Path(str(stream["root"]))
        return (root.stem if stream["dataset"] == "manifest" else root.name) or None

    @property
    def scenario(self) -> str:
        return str(self.results.get("scenario", "class"))

    @property
    def domains(self) -> list[str]:
        """The domain of each task, if tasks are domains."""
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
        """The classes of each task, including tasks to come."""
        return list(self.results["tasks"])

    @property
    def tasks_done(self) -> int:
        return len(self.results["correct"])

    @property
    def headline(self) -> str:
        """Whether the recipe averages accuracies over "tasks" or over "images"."""
        training = self.config.get("training")
        return "images" if isinstance(training, Mapping) and training.get("headline") == "images" else "tasks"

    def accuracies(self) -> Floats:
        """R[t, j], the accuracy on task j after task t, as (tasks done, tasks done); NaN above the diagonal."""
        matrix = np.full((self.tasks_done, self.tasks_done), np.nan)
        for t, row in enumerate(metrics.accuracy_matrix(*self._counts)):
            matrix[t, : t + 1] = row
        return matrix

    def after_each_task(self, over: str) -> Floats:
        """Accuracy over all tasks seen after each task: a mean over "tasks", or over "images"."""
        curve = metrics.accuracy_over_images if over == "images" else metrics.accuracy_over_tasks
        return np.array(curve(*self._counts))

    def forgetting_by_task(self) -> Floats:
        """For each task but the last one learned: best accuracy in the rows before the last, minus the last."""
        return np.array(metrics.forgetting_by_task(*self._counts))

    def metric(self, name: str) -> float | None:
        """A metric by name, as a fraction of one: as the run stored it, or computed from its counts; None if neither
        is possible."""
        value = self.results.get("metrics", {}).get(name)
        entry = metrics.METRICS.get(name)
        if value is None and self.tasks_done and (entry.needs == "R" or not self.imported):
            value = entry.function(*self._counts)
        return float(value) if isinstance(value, int | float) and np.isfinite(value) else None

    @property
    def _counts(self) -> tuple[metrics.Counts, metrics.Totals]:
        return self.results["correct"], self.results["total"]

    @property
    def stored_images(self) -> int | None:
        """Training images of earlier tasks that the method keeps; None for methods that keep none."""
        found = self.results.get("stored_images")
        return found if isinstance(found, int) else None

    @property
    def imported(self) -> str | None:
        """The tool that wrote the results; None for our runs."""
        return self.results.get("imported")

    @property
    def skipped(self) -> list[str]:
        """Images left out because they could not be read: split, name and problem."""
        found = self.results.get("skipped")
        images = found.get("images") if isinstance(found, Mapping) else None
        return [str(image) for image in images] if isinstance(images, list) else []

    def class_name(self, class_id: Any) -> str:
        names = self.results.get("class_names") or []
        known = isinstance(class_id, int) and 0 <= class_id < len(names)
        return str(names[class_id]) if known else f"class {class_id}"


def load_run(path: str | Path, dataset: "DataSet | None" = None) -> RunRecord:
    """Reads a run folder. Raises a `UserError` if it is missing, damaged or no run folder. `dataset`: see
    `RunRecord`."""
    folder = RunFolder.with_results(path)
    results, options = folder.results(), folder.options()
    spectra, configured = _read_spectra(folder), options.get("nullspace")
    if not spectra.get("setting"):
        spectra["setting"] = configured if isinstance(configured, Mapping) else {}
    epochs = {(event["task"], event["epoch"]): event for event in folder.events("epoch", "task", "epoch")}
    return RunRecord(
        folder=folder.path,
        results=results,
        config=options,
        config_text=folder.config_text(),
        stream=folder.stream() if folder.has_stream() else {},
        epochs=tuple(epochs[key] for key in sorted(epochs)),
        audit=folder.audit(),
        confusion=folder.confusion(len(results["correct"]) - 1),
        learned=history if (history := read_history(folder, len(results["correct"]))).tasks else None,
        dataset=dataset,
        **spectra,
    )


def _read_spectra(folder: RunFolder) -> dict[str, Any]:
    """Spectra and ranks of the latest null space, without its covariances and bases, which are large: the record's
    fields `spectra`, `spectra_task`, `setting` and `parts`."""
    files = folder.task_files()
    if not files:
        return {}
    path = files[max(files)]
    try:
        with safe_open(path, framework="np") as file:
            text = dict(file.metadata() or {})
            holders = {name: name for name in file.keys()}  # noqa: SIM118
            holders |= {key.removeprefix(ALIAS): name for key, name in text.items() if key.startswith(ALIAS)}
            loaded: dict[str, Floats] = {}
            spectra: dict[str, Spectrum] = {}
            for name in sorted(name for name in holders if name.endswith(".spectrum")):
                part, holder = name.removesuffix(".spectrum"), holders[name]
                if holder not in loaded:
                    loaded[holder] = np.asarray(file.get_tensor(holder), dtype=np.float64)
                rank, values = file.get_tensor(holders[f"{part}.rank"]), loaded[holder]
                # For a convolution, the mean over its groups.
                spectra[part] = Spectrum(values.reshape(-1, values.shape[-1]).mean(0), round(float(np.mean(rank))))
        stored = {key: json.loads(text.get(key, "{}")) for key in ("setting", "parts")}
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); move it away for a report without its spectra.") from None
    known = {key: value if isinstance(value, Mapping) else {} for key, value in stored.items()}
    return {"spectra": spectra, "spectra_task": max(files), **known}
