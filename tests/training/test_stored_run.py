"""A run folder stored in the repository, as an earlier version wrote it: it resumes, evaluates and reports.

`interrupted` was stopped in the middle of the second of three tasks; `finished` has what the version that wrote it made
of it: results.json, metrics.jsonl, the final parameters, and the arithmetic of that machine.
`python tests/training/test_stored_run.py` made both.
"""

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import CONFIG
from tolerance import assert_counts_alike, assert_near
from training_help import final_parameters, interrupted_after

import mambacl
from mambacl.ops import cpu
from mambacl.reports import load_run, write_report

STORED = Path(__file__).parents[1] / "goldens" / "run_folder"
STEPS, BATCH, TOKENS = 32, 8, 16  # after the interruption; images of a step; patches of an image


def arithmetic() -> dict[str, Any]:
    """Where all of this is the same, so is every bit of a result."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    model = [line for line in lines if line.startswith(("cpu family", "model", "stepping"))]
    return {
        "cpu": [platform.machine(), *sorted({" ".join(line.split()) for line in model})],
        "torch": [torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
        "scan": cpu.instruction_set() if cpu.built() else "",
    }


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return shutil.copytree(STORED / "interrupted", tmp_path / "run")


def events(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_a_stored_run_resumes_to_the_results_it_had(stored: Path) -> None:
    run = mambacl.resume(stored)
    expected = json.loads((STORED / "finished" / "results.json").read_text())
    parameters = load_file(STORED / "finished" / "parameters.safetensors")
    found = final_parameters(stored)
    assert found.keys() == parameters.keys() and len(found) > 6
    for name, tensor in parameters.items():
        assert_near(found[name], tensor, STEPS * BATCH * TOKENS, name)
    for row, others in zip(run.results["correct"], expected["correct"], strict=True):
        assert_counts_alike(row, others)
    for key in ("schema", "status", "benchmark", "method", "backbone", "seed", "class_order", "tasks", "total"):
        assert run.results[key] == expected[key], key
    assert set(run.results) >= set(expected)
    if arithmetic() == json.loads((STORED / "finished" / "arithmetic.json").read_text()):
        assert run.results["correct"] == expected["correct"]
        assert expected["metrics"].items() <= run.metrics.items()  # there are new ones since
        assert all(torch.equal(found[name], tensor) for name, tensor in parameters.items())
        assert events(stored) == events(STORED / "finished")


def test_a_stored_run_resumes_twice_to_the_same_bits(tmp_path: Path) -> None:
    folders = [shutil.copytree(STORED / "interrupted", tmp_path / name) for name in ("one", "other")]
    for folder in folders:
        mambacl.resume(folder)
    one, other = map(final_parameters, folders)
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    assert events(folders[0]) == events(folders[1])


def test_a_stored_run_is_evaluated_and_audited(stored: Path) -> None:
    evaluation = mambacl.evaluate(stored)
    assert_counts_alike(evaluation.counted, evaluation.recorded)
    audit = mambacl.audit(stored)
    assert [entry["task"] for entry in audit["tasks"]] == [0]
    drift = [value for found in audit["tasks"][0]["drift"].values() for value in found.values()]
    assert max(drift) < 1e-5  # at the end of the task itself


def test_a_stored_run_is_reported(stored: Path) -> None:
    record = load_run(stored)
    assert (record.status, record.tasks_done, len(record.epochs)) == ("interrupted", 1, 5)
    assert len(record.spectra) == 10 and record.spectra_task == 0
    page = write_report(stored).read_text()
    assert "1 of 3 tasks are done" in page and "mambacl resume" in page


def store() -> None:
    """Writes the stored folders with the present code."""
    shutil.rmtree(STORED, ignore_errors=True)
    (STORED / "finished").mkdir(parents=True)
    small = {"intermediate_size": 32, "state_size": 4, "time_step_rank": 2, "group_norm_size": 8}
    overrides = {
        "backbone_options": {"embed_dim": 16, "mamba": small}, "stream": {"train_per_class": 20}, "audit_images": 1,
        "nullspace": {"rank": "energy:0.99"}, "training": {"lr": 1e-2, "head_lr": 1e-2},
    }  # fmt: skip
    folder = Path("run")  # where it is written is stored too
    shutil.rmtree(folder, ignore_errors=True)
    with interrupted_after(6):
        mambacl.train(CONFIG, out=str(folder), **overrides)
    shutil.copytree(folder, STORED / "interrupted", ignore=shutil.ignore_patterns(".lock"))
    mambacl.resume(folder)
    for name in ("results.json", "metrics.jsonl"):
        shutil.copy(folder / name, STORED / "finished")
    save_file(final_parameters(folder), STORED / "finished" / "parameters.safetensors")
    (STORED / "finished" / "arithmetic.json").write_text(json.dumps(arithmetic(), indent=1) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    store()
