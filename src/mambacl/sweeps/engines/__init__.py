"""Where the runs of a sweep are computed: one file per engine."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mambacl.errors import UserError
from mambacl.options import read_yaml
from mambacl.sweeps.engines.base import Engine

EngineName = Literal["local", "ray", "slurm"]
NEEDS = {"ray": "ray", "slurm": "submitit"}  # the library of each, which the extra of the engine's name installs


def engine_options(engine: EngineName, given: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The options of an engine from words such as "num_gpus=1"; `given` has the words for each engine. Refuses a wrong
    one, and an engine whose library is missing. Imports nothing of it."""
    for name, words in given.items():
        if words and name != engine:
            raise UserError(f"--{name} is for the engine {name}: add --engine {name}, or remove it.")
    library = NEEDS.get(engine)
    if library is not None and find_spec(library) is None:
        raise UserError(f"--engine {engine} needs {library}: pip install 'mambacl[{engine}]'.")
    options: dict[str, Any] = {}
    for word in given.get(engine, ()):
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise UserError(f"--{engine} takes NAME=VALUE, got '{word}'.")
        options[name] = read_yaml(value)
    return options


def open_engine(name: EngineName, jobs: int | None, options: Mapping[str, Any], folder: Path, on_cpu: bool) -> Engine:
    """`jobs`: runs at the same time, None for the engine's own choice. `folder`: the sweep's. `on_cpu`: no run asks for
    a GPU."""
    module: Any = import_module(f"mambacl.sweeps.engines.{name}")
    return module.open_engine(jobs, dict(options), folder, on_cpu)
