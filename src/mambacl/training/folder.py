"""A run's folder on disk. Files are replaced whole; `results.json` is valid at any moment."""

import dataclasses
import json
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mambacl.config import RunConfig, from_dict, parse_yaml
from mambacl.data.tasks import ORDERS, is_file
from mambacl.errors import UserError
from mambacl.files import locked, write_bytes
from mambacl.nullspace.shelf import PREFIX


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def existing(cls, path: str | Path) -> "RunFolder":
        folder = cls(Path(path))
        if not (folder.path / "config.yaml").is_file():
            raise UserError(f"{path} is no run folder (it has no config.yaml); runs are in runs/ unless --out says so.")
        return folder

    def exists(self) -> bool:
        return (self.path / "config.yaml").is_file()

    def create(self, config: RunConfig, stream: dict[str, Any]) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.write_json("stream.json", stream)
        write_bytes(self.path / "config.yaml", config.as_yaml().encode())

    def clear(self) -> None:
        """Removes what a run writes, checkpoints first and config.yaml last, and nothing else that may lie there."""
        for path in self.checkpoints.glob("*.safetensors"):
            path.unlink()
        self.clear_covariances()
        for path in (self.path / "figures").glob("*.png") if self.exists() else ():
            path.unlink()
        files = "metrics.jsonl results.json audit.json error.log report.html table.md table.tex table.csv"
        for name in (*files.split(), "stream.json", "config.yaml"):
            (self.path / name).unlink(missing_ok=True)

    def clear_covariances(self) -> None:
        """What a process that was killed left on disk of its covariances; the checkpoints have their own copy."""
        for path in self.checkpoints.glob(f"{PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)

    def config(self) -> RunConfig:
        path = self.path / "config.yaml"
        config = from_dict(parse_yaml(path.read_text(encoding="utf-8"), str(path)))
        order = config.stream.order
        if isinstance(order, str) and order not in ORDERS and not is_file(order) and not config.stream.by_domain:
            kept = self.stream()["class_order"]  # its file is gone, but the run has the order itself
            config = dataclasses.replace(config, stream=dataclasses.replace(config.stream, order=kept))
        return config

    def stream(self) -> dict[str, Any]:
        return self.read_json("stream.json")

    def results(self) -> dict[str, Any]:
        return self.read_json("results.json") if (self.path / "results.json").exists() else {}

    def read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"{path} is missing: the run cannot be continued; start it again with --overwrite."
            ) from None
        except (ValueError, OSError) as error:
            raise UserError(f"{path} is damaged ({error}): start the run again with --overwrite.") from None

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        write_bytes(self.path / name, (json.dumps(content, indent=1) + "\n").encode())

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Of what is done after the run itself."""
        results = self.results()
        known = results.setdefault("seconds", {})
        known[phase] = known.get(phase, 0.0) + seconds
        self.write_json("results.json", results)

    def append_metrics(self, line: dict[str, Any]) -> None:
        with open(self.metrics, "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")

    def metrics_length(self) -> int:
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def truncate_metrics(self, length: int) -> None:
        """Forgets lines written after the checkpoint that a run resumes from."""
        if self.metrics_length() > length:
            os.truncate(self.metrics, length)

    def locked(self) -> AbstractContextManager[None]:
        """One process at a time."""
        self.path.mkdir(parents=True, exist_ok=True)
        return locked(self.path / ".lock", f"Another process is training {self.path}: wait for it, or choose --out.")
