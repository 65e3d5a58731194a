"""What the doctor finds: from made-up facts, and on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernels_help import DEVICE, gpu, kernels

from mambacl import diagnosis
from mambacl.diagnosis import (
    CHECKS,
    NEED_TORCH,
    Finding,
    Gpu,
    Requirement,
    backend_finding,
    bf16_finding,
    can_write,
    check_extras,
    check_gpu,
    check_scan,
    check_triton,
    existing,
    extra_findings,
    findings,
    folder_finding,
    gpu_findings,
    kernel_error,
    load_finding,
    look,
    no_gpu_finding,
    package_findings,
    python_finding,
    requirements,
    scan_error,
    scan_finding,
    thread_finding,
    triton_finding,
    usable_cores,
    version_of,
)
from mambacl.ops import cpu
from mambacl.ops.precision import bf16_gain

MADE_UP = Gpu("Made-up 9000", 80_000_000_000, 70_000_000_000, True, "580.1")
without_scan = pytest.mark.skipif(not cpu.built(), reason="the C++ scan is not built")


def statuses(found: Iterator[Finding] | list[Finding]) -> dict[str, str]:
    return {finding.name: finding.status for finding in found}


# From facts


def test_versions_are_compared_as_numbers() -> None:
    assert version_of("2.15.0+cu132") == (2, 15, 0) and version_of("3.10rc1") == (3, 10) and version_of("x") == ()
    assert Requirement("torch", "2.9").met_by("2.11.0") and not Requirement("torch", "2.11").met_by("2.9.1")
    assert Requirement("torch").met_by("0.1") and not Requirement("torch").met_by(None)


def test_requirements_are_read_from_lines_of_the_metadata() -> None:
    parse = Requirement.parse
    assert parse("torch>=2.11") == Requirement("torch", "2.11")
    assert parse('datasets>=3; extra == "huggingface"') == Requirement("datasets", "3", "huggingface")
    assert parse("rich; extra == 'a-b'") == Requirement("rich", "", "a-b")
    assert parse('uvicorn[standard]>=0.30,<1 ; python_version > "3" and extra == "serve"') == Requirement(
        "uvicorn", "0.30", "serve"
    )
    assert str(parse("torch>=2.11")) == "torch>=2.11" and str(parse("rich")) == "rich"


def test_python_and_packages() -> None:
    assert python_finding((3, 11, 7), "3.10", "/env").status == "ok"
    old = python_finding((3, 9, 1), "3.10", "/env")
    assert old.status == "broken" and old.remedy == "install Python 3.10"
    needed = [Requirement("torch", "2.11"), Requirement("rich", "13")]
    assert package_findings(needed, {"torch": "2.12", "rich": "13.1"}).words == "torch 2.12, rich 13.1"
    lacking = package_findings(needed, {"torch": "2.10", "rich": None})
    assert lacking.status == "broken" and lacking.remedy == "pip install 'torch>=2.11' 'rich>=13'"


def test_threads_and_load() -> None:
    assert thread_finding(4, 4).status == thread_finding(4, 8).status == thread_finding(1, 1).status == "ok"
    many, few = thread_finding(8, 2), thread_finding(1, 16)
    assert many.status == few.status == "slow"
    assert "OMP_NUM_THREADS=2" in many.remedy and "unset OMP_NUM_THREADS" in few.remedy
    assert load_finding(1.5, 2).status == "ok" and load_finding(7.0, 2).status == "slow"
    assert "2.5 times" in bf16_finding(2.54).words and "--precision bf16" in bf16_finding(2.54).words
    assert "no faster" in bf16_finding(1.1).words


def test_the_gain_of_bf16_is_a_ratio_of_times() -> None:
    assert 0 < bf16_gain(size=64, rounds=1) < 1e3


def test_a_container_limits_the_cores() -> None:
    mine = usable_cores("max 100000")
    assert mine == usable_cores("") == len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else mine
    assert usable_cores("100000 100000") == 1 and usable_cores("50000 100000") == 1
    assert usable_cores("100000000 100000") == mine  # more than the machine has


def test_a_gpu() -> None:
    assert statuses(gpu_findings(0, MADE_UP)) == {"cuda:0": "ok", "cuda:0 bf16": "ok"}
    first = next(iter(gpu_findings(0, MADE_UP)))
    assert first.words == "Made-up 9000, 80 GB, 70 GB free, driver 580.1"
    full_and_old = Gpu("Old", 8_000_000_000, 100_000_000, False)
    assert statuses(gpu_findings(1, full_and_old)) == {"cuda:1": "slow", "cuda:1 bf16": "slow"}
    (broken,) = gpu_findings(0, MADE_UP, "no kernel image is available")
    assert broken.status == "broken" and "no kernel image" in broken.words and "--device cpu" in broken.remedy


def test_no_gpu() -> None:
    assert no_gpu_finding("", "13.2").status == no_gpu_finding("", None).status == "missing"
    for_cpus, blind = no_gpu_finding("580.1", None), no_gpu_finding("580.1", "13.2")
    assert for_cpus.status == "slow" and "PyTorch with CUDA" in for_cpus.remedy  # it works, on the CPU
    assert blind.status == "broken" and "nvidia-smi" in blind.remedy
    assert "(the driver is too old)" in no_gpu_finding("470.1", "13.2", reason="the driver is too old").words
    hidden = no_gpu_finding("580.1", "13.2", "")
    assert hidden.status == "slow" and hidden.remedy == "unset CUDA_VISIBLE_DEVICES"


def test_triton() -> None:
    assert triton_finding(None, on_gpu=False, plain=False).status == "ok"
    assert triton_finding("3.9", on_gpu=True, plain=False).status == "ok"
    assert triton_finding(None, on_gpu=True, plain=False).remedy == "pip install triton"
    assert triton_finding("3.9", on_gpu=True, plain=True).remedy == "unset MAMBACL_PLAIN"
    failed = triton_finding("3.9", on_gpu=True, plain=False, error="RuntimeError: Failed to find C compiler")
    assert failed.status == "broken" and "C compiler" in failed.words and "MAMBACL_PLAIN=1" in failed.remedy


def test_the_scan() -> None:
    assert scan_finding(True, "avx512", ["avx512", "avx2", "baseline"]).status == "ok"
    assert (
        scan_finding(True, "avx2", ["avx2", "baseline"]).status == scan_finding(True, "neon", ["neon"]).status == "ok"
    )
    assert scan_finding(False).status == scan_finding(True, "baseline", ["baseline"]).status == "slow"
    assert scan_finding(True, "avx2", ["avx512", "avx2"]).remedy == "unset MAMBACL_CPU"
    assert scan_finding(True, error="it differs").status == "broken"
    assert backend_finding("").status == backend_finding("auto").status == "ok"
    assert backend_finding("torch").remedy == "unset MAMBACL_SCAN"


def test_extras() -> None:
    known = [Requirement.parse(line) for line in ("a>=1", 'b>=2; extra == "x"', 'c; extra == "y"', 'c; extra == "x"')]
    known.append(Requirement("pytest", "8", "dev"))
    some = list(extra_findings(known, {"a": "1", "b": "1.9", "c": "5"}))
    assert statuses(some) == {"x": "missing", "y": "ok"}  # dev is for developers
    assert some[0].words == "missing or too old: b>=2" and some[0].remedy == "pip install 'mambacl[x]'"
    assert statuses(extra_findings(known, {"b": "2", "c": "5"})) == {"x": "ok", "y": "ok"}


def test_folders() -> None:
    def found(writable: bool, free: float) -> Finding:
        return folder_finding("Data", "runs", Path("runs"), writable, int(free), "choose another")

    assert (
        found(True, 1e12).status == "ok" and found(True, 1e9).status == "slow" and found(False, 1e12).status == "broken"
    )
    assert found(True, 1e9).remedy == "free some space, or choose another"


# On this machine


def test_every_check_runs_here_and_says_what_to_do() -> None:
    found = list(findings())
    assert list(dict.fromkeys(finding.group for finding in found)) == list(CHECKS)
    assert all(bool(finding.remedy) == (finding.status != "ok") and finding.words for finding in found)
    assert not any(finding.name == "check" for finding in found)  # no check failed
    by_name = {(finding.group, finding.name): finding for finding in found}
    assert by_name["PyTorch", "torch"].words == torch.__version__ and by_name["Python", "version"].status == "ok"
    assert ("GPU", "device") in by_name or ("GPU", "cuda:0") in by_name


def test_extras_are_those_of_the_metadata() -> None:
    known = requirements()
    assert known is not None and "torch" in {requirement.name for requirement in known if not requirement.extra}
    extras = {requirement.extra for requirement in known} - {"", "dev", "docs", "extras"}
    assert {"huggingface", "parquet"} <= extras == {finding.name for finding in check_extras()}


@without_scan
def test_the_scan_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (cpu.ENVIRONMENT_VARIABLE, "MAMBACL_SCAN"):
        monkeypatch.delenv(variable, raising=False)
    sets = cpu.instruction_sets()
    assert statuses(check_scan()) == {"library": "ok" if sets[0] != "baseline" else "slow", "backend": "ok"}
    for name in sets:
        monkeypatch.setenv(cpu.ENVIRONMENT_VARIABLE, name)
        assert scan_error() == ""
    assert statuses(check_scan())["library"] == "slow"  # the slowest
    monkeypatch.setenv(cpu.ENVIRONMENT_VARIABLE, "altivec")
    monkeypatch.setenv("MAMBACL_SCAN", "torch")
    library, backend = check_scan()
    assert library.status == "broken" and "MAMBACL_CPU=altivec" in library.words and backend.status == "slow"


@kernels
def test_a_small_kernel_runs_here() -> None:
    assert kernel_error(DEVICE) == ""


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_a_kernel_that_cannot_run_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernel_error("cpu").startswith("UserError: ")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_the_gpu_here(device: str) -> None:
    assert all(finding.status in ("ok", "slow") for finding in [*check_gpu(), *check_triton()])
    assert next(iter(check_gpu())).words.startswith(torch.cuda.get_device_name(0))


def test_folders_here(tmp_path: Path) -> None:
    assert existing(tmp_path / "a" / "b") == tmp_path and can_write(tmp_path)
    assert look("Data", "runs", tmp_path / "runs", "choose another").words.startswith(str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists() and not list(tmp_path.iterdir())  # it leaves nothing behind
    (tmp_path / "file").touch()
    assert look("Data", "runs", tmp_path / "file" / "runs", "choose another").status == "broken"
    assert not can_write(Path("/proc")) or not Path("/proc").exists()


def test_a_check_that_fails_is_a_finding_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Iterator[Finding]:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(diagnosis, "CHECKS", {"First": fails, "Extras": check_extras})
    first, *others = findings()
    assert first.status == "broken" and "RuntimeError: out of luck)" in first.words and others == list(check_extras())


def test_a_broken_pytorch_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    code = """
from mambacl.diagnosis import findings
for finding in findings():
    print(finding.group, finding.name, finding.status, finding.words, sep="|")
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    found = [line.split("|") for line in done.stdout.splitlines()]
    (torch_line,) = [
        words for group, name, status, words in found if (group, name, status) == ("PyTorch", "torch", "broken")
    ]
    assert "libcudart.so.13" in torch_line
    assert not {group for group, *_ in found} & set(NEED_TORCH) and "Extras" in {group for group, *_ in found}
