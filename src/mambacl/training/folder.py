"""The only reader and writer of a run's folder. Files are replaced atomically; `results.json` is valid at any moment.

    config.yaml      the resolved configuration
    stream.json      class order, tasks, fingerprint of the data
    metrics.jsonl    events: one per epoch and task
    results.json     counts, metrics, seconds
    progress.json    what the process that trains is doing, replaced every second; see `training.progress`
    tracking.json    the run's names in trackers; see `training.tracking`
    audit.json       the findings of the audit
    confusion.json   which classes were taken for which, after the last two tasks; see `training.confusion`
    checkpoints/     tensors; see `training.checkpoints`
    launch.txt       the launch of torchrun that began the run; missing without torchrun
    learned.json     tasks learned since the run finished, in learned/; see `training.learned`

The run can still be in progress, or have stopped early; everything that it has finished can be read.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import yaml

from mambacl import processes
from mambacl.config import RunConfig, from_dict, parse_yaml
from mambacl.data.tasks import ORDERS, is_file
from mambacl.errors import UserError
from mambacl.files import locked, remove_unfinished, replacing, sync_file, sync_folder, write_bytes, write_json
from mambacl.scenarios import SCENARIOS
from mambacl.training import confusion
from mambacl.training.confusion import Confusion

SCHEMA = 1
CONFIG, STREAM, EVENTS, RESULTS, AUDIT = "config.yaml", "stream.json", "metrics.jsonl", "results.json", "audit.json"
BACKBONE, TASK_END = "backbone.safetensors", "task-end.safetensors"
LAST, PREVIOUS = "last.safetensors", "previous.safetensors"
LEARNED, CONFUSION, LAUNCH = "learned.json", "confusion.json", "launch.txt"
PROGRESS, TRACKING = "progress.json", "tracking.json"
PRETRAINING, PRETRAINING_RESULTS = "pretraining.yaml", "pretraining.json"  # of `mambacl pretrain`
LOGS = ("error.log", "lost.log")
REPORT = ("report.html", "table.md", "table.tex", "table.csv")
BEFORE_TAGS = {"defocus_mamba_nano": "tin32-39ep", "defocus_mamba_large_22k": "in22k"}
"""what `pretrained: true` means in a run from before weights had tags; `in1k` for other models"""
FROM_TRAIN = "give a folder that mambacl train wrote, such as runs/<preset>-<method>-0."


def task_file(task: int) -> str:
    """The file with a method's state at the end of a task."""
    return f"task-{task:02d}.safetensors"


def audit_file(task: int) -> str:
    """The file with a task's images for the audit, and the model's outputs for them."""
    return f"audit-{task:02d}.safetensors"


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.learned_states = self.path / "learned"
        self.under_way = self.learned_states / "under-way"  # a task that is being learned

    @classmethod
    def existing(cls, path: str | Path) -> "RunFolder":
        """A folder to continue, evaluate or audit: it needs config.yaml."""
        folder = cls(path)
        if not folder.exists():
            raise UserError(
                f"{path} is not a run folder (it has no config.yaml); runs are in runs/ unless --out is set."
            )
        return folder

    @classmethod
    def of_weights(cls, pretrained: bool | str) -> "RunFolder | None":
        """The run that `pretrained` names by its folder or by one of its checkpoints; None if it names other weights.
        The initial backbone in a run's checkpoints is a file of weights like any other."""
        if isinstance(pretrained, bool):
            return None
        path = Path(pretrained)
        inside = path.parent.name == "checkpoints" and path.name != BACKBONE
        folder = cls(path.parent.parent if inside else path)
        return folder if folder.exists() else None

    @classmethod
    def with_results(cls, path: str | Path) -> "RunFolder":
        """A folder to report: it needs only results.json."""
        folder = cls(path)
        if not folder.path.is_dir():
            what = "is a file, not a run folder" if folder.path.exists() else "does not exist"
            raise UserError(f"{path} {what}; {FROM_TRAIN}")
        if not folder.has_results():
            raise UserError(f"{path} is not a run folder (it has no results.json); {FROM_TRAIN}")
        return folder

    def exists(self) -> bool:
        return (self.path / CONFIG).is_file()

    def has_results(self) -> bool:
        return (self.path / RESULTS).is_file()

    def of_this_launch(self) -> bool:
        """Whether the processes that torchrun has started, or those that died before them, began this run. In doubt,
        it says so."""
        return self.exists() and self._text(LAUNCH) == processes.launch()

    def finished(self) -> bool:
        return self.results().get("status") == "finished"

    def create(self, config: RunConfig, stream: Mapping[str, Any]) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # a folder that may not be read
            sync_folder(self.path.parent)
        if launch := processes.launch():
            write_bytes(self.path / LAUNCH, launch.encode())
        write_json(self.path / STREAM, stream)
        write_bytes(self.path / CONFIG, config.as_yaml().encode())

    def clear(self) -> None:
        """Removes only the files that a run writes. At any moment what is left is a run that `resume` can train to its
        end, or none: results.json goes first, so that it is not finished any more; its checkpoints follow from the
        last one on, and config.yaml goes when the rest of a run is gone."""
        for name in (RESULTS, LEARNED):
            (self.path / name).unlink(missing_ok=True)
        for name in (LAST, PREVIOUS, TASK_END):
            (self.checkpoints / name).unlink(missing_ok=True)
        for path in (*self.checkpoints.glob("*.safetensors"), *self.learned_states.glob("*.safetensors")):
            path.unlink()
        self._clear_parts()
        self.clear_under_way()
        self.clear_left_over()
        for path in (self.path / "figures").glob("*.png") if self.exists() else ():
            path.unlink()
        for name in (EVENTS, PROGRESS, TRACKING, AUDIT, CONFUSION, *LOGS, *REPORT, CONFIG, STREAM, LAUNCH):
            (self.path / name).unlink(missing_ok=True)

    def clear_checkpoints(self) -> None:
        """Leaves only what reports and tables of a finished run read, which is small. Nothing can continue it then."""
        self.clear_left_over()
        for path in self.checkpoints.glob("*.safetensors"):
            path.unlink()
        self._clear_parts()

    def _clear_parts(self) -> None:
        for path in self.checkpoints.glob("parts-*"):  # see `training.parts`
            shutil.rmtree(path, ignore_errors=True)

    def clear_left_over(self) -> None:
        """Removes what a killed process left: unfinished files, and covariances on disk, which the checkpoints have,
        too. Only the process that holds the lock may do this."""
        from mambacl.nullspace.memory import COVARIANCE_FOLDER  # late, because it imports PyTorch

        for path in self.checkpoints.glob(f"{COVARIANCE_FOLDER}*"):
            shutil.rmtree(path, ignore_errors=True)
        remove_unfinished(self.checkpoints)
        for name in ("*.safetensors", LAUNCH, CONFIG, STREAM, RESULTS, PROGRESS, CONFUSION, LEARNED):
            remove_unfinished(self.path, name)

    def clear_under_way(self) -> None:
        """Removes the checkpoints of a task that is being learned."""
        shutil.rmtree(self.under_way, ignore_errors=True)

    def locked(self, remedy: str = "wait for it, or choose --out") -> AbstractContextManager[None]:
        """Locks the folder: one process at a time can change the run. The error for another one names the first."""
        self.path.mkdir(parents=True, exist_ok=True)
        return locked(self.path / ".lock", f"is training {self.path}: {remedy}.")

    # The configuration

    def config(self) -> RunConfig:
        """The configuration, checked, to continue the run."""
        config = from_dict({"precision": "float32", **self.options()})  # the default before `auto` existed
        order = config.stream.order
        if isinstance(order, str) and order not in ORDERS and not is_file(order) and not config.stream.by_domain:
            kept = self.stream()["class_order"]  # the order's file is gone, but the run has a copy
            config = dataclasses.replace(config, stream=dataclasses.replace(config.stream, order=kept))
        return config

    def options(self) -> dict[str, Any]:
        """The configuration as written by any version, unchecked; empty if the file is missing."""
        options = parse_yaml(self.config_text(), str(self.path / CONFIG))
        if options.get("pretrained") is True:
            options["pretrained"] = BEFORE_TAGS.get(options.get("backbone", RunConfig.backbone), "in1k")
        return options

    def config_text(self) -> str:
        return self._text(CONFIG)

    def set_root(self, root: str | None) -> None:
        """Changes the place of the data in config.yaml."""
        options = parse_yaml(self.config_text(), str(self.path / CONFIG))
        options["stream"] = {**options.get("stream", {}), "root": root}
        write_bytes(self.path / CONFIG, yaml.safe_dump(options, sort_keys=False).encode())

    # The stream, the results, the audit

    def has_stream(self) -> bool:
        return (self.path / STREAM).is_file()

    def stream(self) -> dict[str, Any]:
        if not self.has_stream():
            raise UserError(f"{self.path / STREAM} is missing: restore it, or start the run again with --overwrite.")
        return self._json(STREAM)

    def made_from_checkpoint(self) -> bool:
        """Whether `mambacl learn` made it of a checkpoint that was trained elsewhere: it has no data set."""
        return "adopted" in self.stream()

    def results(self) -> dict[str, Any]:
        """The results, checked, because every table and figure relies on the counts; empty if not written yet."""
        path, results = self.path / RESULTS, self._json(RESULTS)
        if not results and not path.exists():
            return {}
        if results.get("schema") != SCHEMA:
            raise UserError(
                f"{path} has the schema {results.get('schema')!r}, but this version of mambacl reads schema {SCHEMA}: "
                "use the version that wrote the run."
            )
        if problem := _problem(results):
            raise UserError(f"{path} is damaged ({problem}); restore it, or train the run again with --overwrite.")
        return results

    def write_results(self, results: Mapping[str, Any]) -> None:
        write_json(self.path / RESULTS, results)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Adds the seconds of a phase after the run itself, unless another process has begun to train it again."""
        with suppress(UserError), self.locked():
            results = self.results()
            known = results.setdefault("seconds", {})
            known[phase] = known.get(phase, 0.0) + seconds
            self.write_results(results)

    def audit(self) -> dict[str, Any]:
        """The audit; empty if the file is missing."""
        path, audit = self.path / AUDIT, self._json(AUDIT)
        known = audit.get("schema") == SCHEMA and all(isinstance(audit.get(key), list) for key in ("tasks", "updates"))
        if path.exists() and not known:
            raise UserError(
                f"{path} is not an audit that this version reads; write it again with `mambacl audit {self.path}`."
            )
        return audit

    def write_audit(self, audit: Mapping[str, Any]) -> None:
        write_json(self.path / AUDIT, {"schema": SCHEMA, **audit})

    def confusion(self, task: int) -> Confusion | None:
        """After this task; None in a run that did not record it."""
        content = self._json(CONFUSION).get("after", {})
        try:
            return confusion.from_json(content[str(task)]) if str(task) in content else None
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{self.path / CONFUSION} is damaged; remove it for a report without confusion between classes."
            ) from None

    def write_confusion(self, task: int, found: Confusion) -> None:
        """Keeps the entry of the task before: results.json can be one task behind."""
        before = self._json(CONFUSION).get("after", {}).get(str(task - 1))
        kept = {} if before is None else {str(task - 1): before}
        content = {"schema": SCHEMA, "after": {**kept, str(task): confusion.to_json(found)}}
        write_bytes(self.path / CONFUSION, json.dumps(content, separators=(",", ":")).encode())

    # Progress and trackers

    def progress(self) -> dict[str, Any]:
        """What the last process to train the run has said; empty if it has not begun. Never an error: it is news."""
        try:
            return self._json(PROGRESS)
        except UserError:
            return {}

    def write_progress(self, state: Mapping[str, Any]) -> None:
        with replacing(self.path / PROGRESS, sync=False) as temporary:  # losing it to a power failure is no loss
            temporary.write_text(json.dumps(state) + "\n", encoding="utf-8")

    def tracking(self) -> dict[str, Any]:
        return self._json(TRACKING)

    def write_tracking(self, content: Mapping[str, Any]) -> None:
        write_json(self.path / TRACKING, content)

    # Tasks learned since the run finished

    def learned(self) -> dict[str, Any]:
        """What learned.json says; empty if the file is missing."""
        return self._json(LEARNED)

    def write_learned(self, content: Mapping[str, Any]) -> None:
        write_json(self.path / LEARNED, content)

    # Events, one per line

    def append_event(self, event: Mapping[str, Any]) -> None:
        with open(self.path / EVENTS, "a", encoding="utf-8") as out:
            out.write(json.dumps(event) + "\n")

    def events_length(self) -> int:
        path = self.path / EVENTS
        return path.stat().st_size if path.exists() else 0

    def sync_events(self) -> None:
        """Flushes the events to disk, before a checkpoint counts on them."""
        if (self.path / EVENTS).exists():
            sync_file(self.path / EVENTS)

    def truncate_events(self, length: int) -> None:
        """Removes lines written after the checkpoint that the run resumes from."""
        if self.events_length() > length:
            os.truncate(self.path / EVENTS, length)

    def events(self, kind: str, *needed: str) -> list[dict[str, Any]]:
        """The events of one kind. `needed` are keys that must hold an integer in each. A last line cut off by a crash
        is skipped; a damaged line before it is an error."""
        path, found = self.path / EVENTS, []
        lines = self._text(EVENTS).split("\n")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                event = json.loads(line)
            except ValueError:
                if number == len(lines):
                    break
                raise UserError(f"{path} is damaged in line {number}; remove that line to continue.") from None
            if isinstance(event, dict) and event.get("event") == kind:
                if not all(isinstance(event.get(key), int) for key in needed):
                    words = " and ".join(needed)
                    raise UserError(f"{path}: line {number} is an event '{kind}' without {words}; remove it.")
                found.append(event)
        return found

    # Tensor files by task

    def task_files(self) -> dict[int, Path]:
        return self._by_task("task")

    def audit_files(self) -> dict[int, Path]:
        return self._by_task("audit")

    def _by_task(self, word: str) -> dict[int, Path]:
        numbers = [
            (re.fullmatch(rf"{word}-(\d+)\.safetensors", path.name), path) for path in self.checkpoints.glob("*")
        ]
        return dict(sorted((int(number[1]), path) for number, path in numbers if number))

    # Reading and writing

    def _text(self, name: str) -> str:
        """The text of a file; empty if the file is missing."""
        path = self.path / name
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        except UnicodeDecodeError:
            raise UserError(f"{path} is not UTF-8 text; restore the file.") from None
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions.") from None

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not path.exists():
            return {}
        try:
            value = json.loads(self._text(name))
        except ValueError as error:
            raise UserError(
                f"{path} is not valid JSON ({error}): restore it, or start the run again with --overwrite."
            ) from None
        if not isinstance(value, dict):
            raise UserError(f"{path} must hold a mapping, but holds a {type(value).__name__}; restore the file.")
        return value


def _problem(results: Mapping[str, Any]) -> str | None:
    """What is wrong with the results, in words; None if nothing is."""
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
        return "'total' holds values that are not counts"
    for t, row in enumerate(correct):
        if not isinstance(row, list) or len(row) != t + 1:
            return f"row {t} of 'correct' does not have {t + 1} counts"
        if not all(_is_count(value) and value <= total[j] for j, value in enumerate(row)):
            return f"row {t} of 'correct' holds values that are not counts up to 'total'"
    for name in ("metrics", "seconds", "versions"):
        if not isinstance(results.get(name, {}), Mapping):
            return f"'{name}' is not a mapping"
    if str(results.get("scenario", "class")) not in SCENARIOS:
        return f"'scenario' is not one of {', '.join(SCENARIOS)}"
    domains = results.get("domains")
    if domains is not None and (not isinstance(domains, list) or len(domains) != len(tasks)):
        return "'domains' does not name one domain per task"
    for name in ("class_names", "class_order"):
        if not isinstance(results.get(name) or [], list):
            return f"'{name}' is not a list"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
