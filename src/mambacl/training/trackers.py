"""Adapters of experiment trackers, one class per library. Each library is imported when a run asks for it.

They work offline unless the library's own environment variables say otherwise: WANDB_MODE, MLFLOW_TRACKING_URI,
TRACKIO_SERVER_URL and the like.
"""

import io
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

from mambacl.config import RunConfig
from mambacl.log import logger
from mambacl.training.identity import flatten

PROJECT = "mambacl"
LONGEST = 500  # characters of an option's value; MLflow refuses long ones


def new_name(folder: Path) -> str:
    """A name for a run that no other run has, even after --overwrite."""
    return f"{folder.name}-{secrets.token_hex(3)}"


class TensorBoard:
    """Scalars and the options as text, in the run's folder `tensorboard`."""

    name, keeps_files = "tensorboard", False

    def __init__(self, config: RunConfig, folder: Path, identity: Mapping[str, str] | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.identity = {"folder": "tensorboard"}
        self.writer = SummaryWriter(str(folder / "tensorboard"))
        if identity is None:
            self.writer.add_text("options", "".join(f"    {line}\n" for line in config.as_yaml().splitlines()))
        logger.info("`tensorboard --logdir %s` shows the run.", folder.parent)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # a killed run keeps what it has logged

    def summary(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(f"final/{name}", value, 0)

    def attach(self, path: Path) -> None:
        """TensorBoard keeps no files."""

    def close(self, status: str) -> None:
        self.writer.close()


class WandB:
    """Offline in the run's folder unless WANDB_MODE is set; the project is `mambacl` unless WANDB_PROJECT is set."""

    name, keeps_files = "wandb", True

    def __init__(self, config: RunConfig, folder: Path, identity: Mapping[str, str] | None) -> None:
        import wandb

        self.identity = dict(identity or {"id": new_name(folder)})
        self.wandb: Any = wandb
        self.run: Any = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.identity["id"],
            name=folder.name,
            group=config.name,
            config=config.as_dict(),
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
        )
        if identity is None and self.run.settings.mode == "offline":
            logger.info("`wandb sync %s` uploads the run.", folder / "wandb" / "offline-run-*")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def summary(self, metrics: Mapping[str, float]) -> None:
        self.run.summary.update({f"final/{name}": value for name, value in metrics.items()})

    def attach(self, path: Path) -> None:
        artifact = self.wandb.Artifact(f"report-{self.identity['id']}", "report")
        artifact.add_file(str(path))
        self.run.log_artifact(artifact)

    def close(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "finished" else 1)


class MLflow:
    """A run in the experiment that has the run's name. Without MLFLOW_TRACKING_URI, MLflow keeps a local database."""

    name, keeps_files = "mlflow", True
    ENDS: ClassVar[dict[str, str]] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
    AT_ONCE = 100  # options that MLflow takes in one call

    def __init__(self, config: RunConfig, folder: Path, identity: Mapping[str, str] | None) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self.metric: Any = Metric
        uri = mlflow.get_tracking_uri() if identity is None else identity["uri"]
        self.client = mlflow.MlflowClient(tracking_uri=uri)
        if identity is not None:
            self.identity = dict(identity)
            self.client.update_run(self.identity["run"], status="RUNNING")
            return
        found = self.client.get_experiment_by_name(config.name)
        experiment = self.client.create_experiment(config.name) if found is None else found.experiment_id
        run = self.client.create_run(experiment, run_name=folder.name).info.run_id
        self.identity = {"uri": uri, "run": run}
        options = [Param(key, str(value)[:LONGEST]) for key, value in flatten(config.as_dict()).items()]
        for start in range(0, len(options), self.AT_ONCE):
            self.client.log_batch(run, params=options[start : start + self.AT_ONCE])
        logger.info("`mlflow ui --backend-store-uri %s` shows the run.", uri)

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self.metric(name, float(value), now, step) for name, value in values.items()]
        self.client.log_batch(self.identity["run"], metrics=metrics)

    def summary(self, metrics: Mapping[str, float]) -> None:
        self.log({f"final/{name}": value for name, value in metrics.items()}, 0)

    def attach(self, path: Path) -> None:
        self.client.log_artifact(self.identity["run"], str(path))

    def close(self, status: str) -> None:
        self.client.set_terminated(self.identity["run"], self.ENDS.get(status, "FAILED"))


class Trackio:
    """A run in the local project `mambacl`; the folder is trackio's own, or TRACKIO_DIR."""

    name, keeps_files = "trackio", True

    def __init__(self, config: RunConfig, folder: Path, identity: Mapping[str, str] | None) -> None:
        import trackio

        self.identity = dict(identity or {"name": new_name(folder)})
        self.trackio: Any = trackio
        with redirect_stdout(io.StringIO()):  # it prints how to open its page, several lines each time
            self.run: Any = trackio.init(
                project=PROJECT,
                name=self.identity["name"],
                group=config.name,
                config={key: str(value)[:LONGEST] for key, value in flatten(config.as_dict()).items()},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        if identity is None:
            logger.info("`trackio show --project %s` shows the run.", PROJECT)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def summary(self, metrics: Mapping[str, float]) -> None:
        self.run.log({f"final/{name}": value for name, value in metrics.items()})

    def attach(self, path: Path) -> None:
        artifact = self.trackio.Artifact(f"report-{self.identity['name']}", "report")
        artifact.add_file(str(path))
        with redirect_stdout(io.StringIO()):
            self.run.log_artifact(artifact)

    def close(self, status: str) -> None:
        with redirect_stdout(io.StringIO()):
            self.trackio.finish()  # run.finish() would leave it to be finished again, with a message, at exit


KINDS: dict[str, Any] = {kind.name: kind for kind in (TensorBoard, WandB, MLflow, Trackio)}
