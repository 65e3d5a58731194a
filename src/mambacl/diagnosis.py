"""What works on this machine, what is slow, and what to do: the findings of `mambacl doctor`.

Each check has two parts. A pure function turns facts into findings; a thin one looks up the facts. PyTorch is imported
by the checks that need it, so that a broken one becomes a finding.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from mambacl.errors import UserError

Status = Literal["ok", "slow", "missing", "broken"]
Version = tuple[int, ...]

FOR_DEVELOPERS = ("dev", "docs", "extras")  # the extras of those who change mambacl
LITTLE_DISK = 5e9  # bytes; a run of the nano model with checkpoints and report takes less than 1 GB
LITTLE_MEMORY = 2e9  # bytes free on a GPU
WORTH = 1.3  # times as fast in bf16: below, a run gains little
MOST_DIFFERENCE = 1e-4  # between a kernel and its plain twin, of values of size 1 in float32


@dataclass(frozen=True)
class Finding:
    group: str
    name: str
    status: Status
    words: str
    remedy: str = ""
    """what to do; empty only if the status is ok"""


def findings() -> Iterator[Finding]:
    """All findings, group by group, as they are made: some take seconds."""
    without_torch = False
    for group, check in CHECKS.items():
        if without_torch and group in NEED_TORCH:
            continue
        try:
            for finding in check():
                without_torch |= finding.name == "torch" and finding.status == "broken"
                yield finding
        except Exception as error:  # a check must not stop the others
            words = f"the check failed ({type(error).__name__}: {first_line(error)})"
            yield Finding(group, "check", "broken", words, "report this with the output of `mambacl doctor --json`")


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


# Python and the packages that mambacl needs


def version_of(text: str) -> Version:
    """The leading numbers of a version: 2.15.0+cu132 is (2, 15, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


@dataclass(frozen=True)
class Requirement:
    """A line of the package's metadata: `datasets>=3; extra == "huggingface"`."""

    name: str
    least: str = ""
    extra: str = ""

    @classmethod
    def parse(cls, line: str) -> Requirement:
        name = re.match(r"[\w.-]+", line)
        assert name is not None, line
        least, extra = re.search(r">=\s*([\w.]+)", line), re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", line)
        return cls(name[0], least[1] if least else "", extra[1] if extra else "")

    def __str__(self) -> str:
        return f"{self.name}>={self.least}" if self.least else self.name

    def met_by(self, version: str | None) -> bool:
        return version is not None and version_of(version) >= version_of(self.least)


def python_finding(version: Version, needed: str, prefix: str) -> Finding:
    text = ".".join(map(str, version))
    if version < version_of(needed):
        return Finding("Python", "version", "broken", f"{text}, but mambacl needs {needed}", f"install Python {needed}")
    return Finding("Python", "version", "ok", f"{text} in {prefix}")


def package_findings(needed: Iterable[Requirement], versions: Mapping[str, str | None]) -> Finding:
    """The packages that every run needs. `versions` are those installed."""
    lacking = [requirement for requirement in needed if not requirement.met_by(versions.get(requirement.name))]
    if lacking:
        words = "missing or too old: " + ", ".join(map(str, lacking))
        return Finding("Python", "packages", "broken", words, f"pip install {quoted(lacking)}")
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Finding("Python", "packages", "ok", shown)


def quoted(needed: Iterable[Requirement]) -> str:
    return " ".join(f"'{requirement}'" for requirement in needed)


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> list[Requirement] | None:
    """None if the package is not installed, only on the path."""
    try:
        return [Requirement.parse(line) for line in metadata.requires("mambacl") or []]
    except metadata.PackageNotFoundError:
        return None


def check_python() -> Iterator[Finding]:
    known = requirements()
    if known is None:
        words = "mambacl is on the path, but not installed: its requirements are not known"
        yield python_finding(tuple(sys.version_info[:3]), "3.10", sys.prefix)
        yield Finding("Python", "packages", "missing", words, "pip install . in its folder")
        return
    least = (metadata.metadata("mambacl")["Requires-Python"] or "").lstrip(">= ")
    yield python_finding(tuple(sys.version_info[:3]), least, sys.prefix)
    always = [requirement for requirement in known if not requirement.extra]
    yield package_findings(always, {requirement.name: installed_version(requirement.name) for requirement in always})


# PyTorch


def thread_finding(threads: int, cores: int) -> Finding:
    """`cores`: those that this process may use."""
    words = f"{threads} on {cores} {'core' if cores == 1 else 'cores'}"
    if threads > cores:
        remedy = f"set OMP_NUM_THREADS={cores}: more threads than cores wait for each other"
        return Finding("PyTorch", "threads", "slow", words, remedy)
    if threads <= cores // 4:
        remedy = f"unset OMP_NUM_THREADS, or set it to {cores // 2} to {cores}"
        return Finding("PyTorch", "threads", "slow", words, remedy)
    return Finding("PyTorch", "threads", "ok", words)


def load_finding(load: float, cores: int) -> Finding:
    """`load`: programs that want a core at the same time."""
    words = f"{load:.1f} on {cores} {'core' if cores == 1 else 'cores'}"
    if load > cores:
        return Finding("PyTorch", "load", "slow", words, "wait for other programs, or stop them (`top` lists them)")
    return Finding("PyTorch", "load", "ok", words)


def bf16_finding(gain: float) -> Finding:
    """`gain`: how many times as fast as in float32 the CPU multiplies matrices."""
    if gain < WORTH:
        return Finding("PyTorch", "bf16", "ok", "no faster than float32 on this CPU")
    words = f"matrix products {gain:.1f} times as fast as in float32 on this CPU; `--precision bf16` uses that"
    return Finding("PyTorch", "bf16", "ok", words)


def usable_cores(quota: str | None = None) -> int:
    """The cores that this process may use: of the machine, of its affinity, of its container. `quota` is the text of
    a container's limit, "200000 100000" for two cores; read from the system if not given."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if quota is None:
        try:
            quota = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii")
        except (OSError, UnicodeError):
            quota = ""
    limit = re.match(r"(\d+) (\d+)", quota)
    return max(1, min(cores, int(limit[1]) // int(limit[2]))) if limit else cores


def check_torch() -> Iterator[Finding]:
    for name in ("torch", "torchvision"):
        version = installed_version(name)
        try:
            module = import_module(name)
        except Exception as error:  # a build for another PyTorch raises what it likes
            words = f"{name} {version or ''} cannot be imported ({first_line(error)})"
            yield Finding("PyTorch", name, "broken", words, "pip install --upgrade --force-reinstall torch torchvision")
        else:
            yield Finding("PyTorch", name, "ok", module.__version__)
    if "torch" in sys.modules:
        import torch

        from mambacl.ops.precision import bf16_gain

        yield thread_finding(torch.get_num_threads(), usable_cores())
        if hasattr(os, "getloadavg"):
            yield load_finding(os.getloadavg()[0], usable_cores())
        yield bf16_finding(bf16_gain())


# GPU


@dataclass(frozen=True)
class Gpu:
    name: str
    total: int  # bytes
    free: int  # bytes
    bf16: bool
    driver: str = ""


def gpu_findings(index: int, gpu: Gpu, error: str = "") -> Iterator[Finding]:
    """`error`: what a small product of matrices raised on it."""
    name = f"cuda:{index}"
    driver = f", driver {gpu.driver}" if gpu.driver else ""
    if error:
        remedy = "update the driver, or install a PyTorch for this driver and GPU; `--device cpu` works without it"
        yield Finding("GPU", name, "broken", f"{gpu.name}{driver} does not compute ({error})", remedy)
        return
    words = f"{gpu.name}, {gpu.total / 1e9:.0f} GB, {gpu.free / 1e9:.0f} GB free{driver}"
    if gpu.free < LITTLE_MEMORY:
        remedy = "stop other programs on it (`nvidia-smi` lists them), or choose another with --device"
        yield Finding("GPU", name, "slow", words, remedy)
    else:
        yield Finding("GPU", name, "ok", words)
    if gpu.bf16:
        yield Finding("GPU", f"{name} bf16", "ok", "supported, the default precision")
    else:
        remedy = "nothing to set: runs use float32; a GPU from Ampere on (compute capability 8.0) is faster"
        yield Finding("GPU", f"{name} bf16", "slow", "not supported", remedy)


def no_gpu_finding(driver: str, built_for: str | None, visible: str | None = None, reason: str = "") -> Finding:
    """`driver`: version of the NVIDIA driver, empty if there is none. `built_for`: PyTorch's CUDA or HIP version.
    `visible`: the environment's CUDA_VISIBLE_DEVICES. `reason`: what PyTorch says."""
    if driver and built_for is None:
        words = f"there is an NVIDIA driver {driver}, but this PyTorch is built for CPUs only"
        return Finding("GPU", "device", "slow", words, "install a PyTorch with CUDA, then run `mambacl doctor` again")
    if driver and visible is not None:
        words = f"CUDA_VISIBLE_DEVICES='{visible}' hides the GPU"
        return Finding("GPU", "device", "slow", words, "unset CUDA_VISIBLE_DEVICES")
    if driver:
        words = f"there is an NVIDIA driver {driver}, but PyTorch for {built_for} finds no GPU"
        words += f" ({reason})" if reason else ""
        remedy = (
            "run `nvidia-smi`; update the driver if it is older than PyTorch's CUDA; `--device cpu` works without it"
        )
        return Finding("GPU", "device", "broken", words, remedy)
    remedy = "none is needed for the demo and the nano models; use an NVIDIA GPU for the larger ones"
    return Finding("GPU", "device", "missing", "no NVIDIA GPU", remedy)


def nvidia_driver() -> str:
    """The version of the driver; empty if there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else ""


def check_gpu() -> Iterator[Finding]:
    import torch

    driver = nvidia_driver()
    with warnings.catch_warnings(record=True) as caught:  # says why there is none
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        built_for, visible = torch.version.cuda or torch.version.hip, os.environ.get("CUDA_VISIBLE_DEVICES")
        yield no_gpu_finding(driver, built_for, visible, str(caught[0].message) if caught else "")
        return
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            free, total = torch.cuda.mem_get_info()
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            error = ""
            try:
                ones = torch.ones(64, 64, device="cuda")
                if (ones @ ones).sum().item() != 64**3:
                    error = "a product of matrices is wrong"
            except RuntimeError as raised:
                error = first_line(raised)
        yield from gpu_findings(index, Gpu(torch.cuda.get_device_name(index), total, free, bf16, driver), error)


# Triton


def triton_finding(version: str | None, on_gpu: bool, plain: bool, error: str = "") -> Finding:
    """`plain`: whether the kernels are switched off. `error`: what happened when one was compiled and run."""
    if not on_gpu:
        return Finding("Triton", "kernels", "ok", f"{version or 'not installed'}; used only on an NVIDIA GPU")
    if version is None:
        words = "not installed: plain PyTorch does the work, several times slower"
        return Finding("Triton", "kernels", "slow", words, "pip install triton")
    if plain:
        words = f"{version}, but MAMBACL_PLAIN switches the kernels off"
        return Finding("Triton", "kernels", "slow", words, "unset MAMBACL_PLAIN")
    if error:
        remedy = (
            "install a C compiler and Python's headers (gcc, python3-dev), which Triton needs; until then "
            "MAMBACL_PLAIN=1 uses plain PyTorch"
        )
        return Finding("Triton", "kernels", "broken", f"{version}: a small kernel fails ({error})", remedy)
    return Finding("Triton", "kernels", "ok", f"{version}: a small kernel compiles and agrees with plain PyTorch")


def kernel_error(device: str) -> str:
    """Compiles and runs a small kernel on the device and compares it with its plain twin; empty if all is well."""
    import torch

    from mambacl.ops.norm import rms_norm, rms_norm_plain

    x = torch.linspace(-1, 1, 4 * 64, device=device).view(4, 64)
    weight = torch.linspace(0.5, 1.5, 64, device=device)
    try:
        difference = (rms_norm(x, weight, 1e-5, backend="triton") - rms_norm_plain(x, weight, 1e-5)).abs().max().item()
    except Exception as error:  # Triton, the compiler and the driver raise what they like
        return f"{type(error).__name__}: {first_line(error)}"
    return "" if difference <= MOST_DIFFERENCE else f"it differs from plain PyTorch by {difference:.1e}"


def check_triton() -> Iterator[Finding]:
    import torch

    from mambacl.ops import switch

    on_gpu = torch.cuda.is_available() and torch.version.hip is None
    version = installed_version("triton") or ("installed" if find_spec("triton") is not None else None)
    tried = on_gpu and version is not None and switch.enabled()
    yield triton_finding(version, on_gpu, not switch.enabled(), kernel_error("cuda") if tried else "")


# The C++ scan

MEANING = {
    "avx512": "AVX-512, the fastest",
    "avx2": "AVX2, close to AVX-512",
    "neon": "NEON, the fastest on ARM",
    "baseline": "plain code, several times slower than AVX2",
}


def scan_finding(built: bool, chosen: str = "", available: Sequence[str] = (), error: str = "") -> Finding:
    """`chosen`: the instruction set in use, of those `available`, fastest first. `error`: what went wrong when it was
    chosen, or when a small scan ran."""
    if not built:
        words = "not built: PyTorch does the scan on a CPU, many times slower"
        remedy = (
            "install a C++ compiler (g++ or clang++), then mambacl again: pip install --force-reinstall --no-deps ."
        )
        return Finding("C++ scan", "library", "slow", words, remedy)
    if error:
        remedy = "unset MAMBACL_CPU; if that does not help, reinstall mambacl, or set MAMBACL_SCAN=torch"
        return Finding("C++ scan", "library", "broken", error, remedy)
    words = f"built; uses {MEANING.get(chosen, chosen)}"
    if available and chosen != available[0]:
        return Finding("C++ scan", "library", "slow", f"{words}, but {available[0]} runs here", "unset MAMBACL_CPU")
    if chosen == "baseline":
        remedy = "use a processor with AVX2, or build mambacl with GCC or Clang"
        return Finding("C++ scan", "library", "slow", words, remedy)
    return Finding("C++ scan", "library", "ok", words)


def backend_finding(forced: str) -> Finding:
    """`forced`: the environment's choice, empty or auto if it has none."""
    if forced in ("", "auto"):
        return Finding("C++ scan", "backend", "ok", "chosen by device")
    return Finding("C++ scan", "backend", "slow", f"MAMBACL_SCAN forces '{forced}' everywhere", "unset MAMBACL_SCAN")


def scan_error() -> str:
    """Runs a small scan with the library and compares it with the reference; empty if all is well."""
    import torch

    from mambacl.ops import selective_scan

    u = torch.linspace(-1, 1, 2 * 8 * 20).view(2, 8, 20)
    delta, A = torch.full_like(u, 0.1), -torch.arange(1.0, 5).repeat(8, 1)
    B = torch.linspace(1, -1, 2 * 4 * 20).view(2, 4, 20)
    try:
        found, expected = (selective_scan(u, delta, A, B, B, backend=name) for name in ("native", "reference"))
        difference = (found - expected).abs().max().item()  # type: ignore[operator]
    except (RuntimeError, UserError) as error:
        return first_line(error)
    return "" if difference <= MOST_DIFFERENCE else f"a small scan differs from the reference by {difference:.1e}"


def check_scan() -> Iterator[Finding]:
    from mambacl.ops import cpu
    from mambacl.ops.scan import ENVIRONMENT_VARIABLE

    if not cpu.built():
        yield scan_finding(False)
    elif error := scan_error():
        yield scan_finding(True, error=error)
    else:
        yield scan_finding(True, cpu.instruction_set(), cpu.instruction_sets())
    yield backend_finding(os.environ.get(ENVIRONMENT_VARIABLE, ""))


# Extras


def extra_findings(known: Iterable[Requirement], versions: Mapping[str, str | None]) -> Iterator[Finding]:
    """One finding per extra of the package, in the metadata's order. `versions` are those installed."""
    by_extra: dict[str, list[Requirement]] = {}
    for requirement in known:
        if requirement.extra and requirement.extra not in FOR_DEVELOPERS:
            by_extra.setdefault(requirement.extra, []).append(requirement)
    for extra, needed in by_extra.items():
        lacking = [requirement for requirement in needed if not requirement.met_by(versions.get(requirement.name))]
        if lacking:
            words = "missing or too old: " + ", ".join(map(str, lacking))
            yield Finding("Extras", extra, "missing", words, f"pip install 'mambacl[{extra}]'")
        else:
            yield Finding("Extras", extra, "ok", ", ".join(f"{r.name} {versions[r.name]}" for r in needed))


def check_extras() -> Iterator[Finding]:
    known = requirements()
    if known is None:
        words = "mambacl is on the path, but not installed: its extras are not known"
        yield Finding("Extras", "packages", "missing", words, "pip install . in its folder")
        return
    yield from extra_findings(known, {requirement.name: installed_version(requirement.name) for requirement in known})


# Folders


def folder_finding(group: str, name: str, path: Path, writable: bool, free: int, remedy: str) -> Finding:
    """`remedy`: how to choose another folder."""
    if not writable:
        return Finding(group, name, "broken", f"{path} cannot be written", remedy)
    words = f"{path}, {free / 1e9:.1f} GB free"
    if free < LITTLE_DISK:
        return Finding(group, name, "slow", f"{words}, which is little", f"free some space, or {remedy}")
    return Finding(group, name, "ok", words)


def existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def can_write(folder: Path) -> bool:
    """Tries it: permissions alone do not show a read-only disk."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def look(group: str, name: str, path: Path, remedy: str) -> Finding:
    above = existing(path.absolute())
    writable = above.is_dir() and can_write(above)
    return folder_finding(group, name, path.absolute(), writable, shutil.disk_usage(above).free, remedy)


def check_data() -> Iterator[Finding]:
    yield look("Data", "runs", Path("runs"), "go to another folder, or choose one with --out")
    yield look("Data", "data sets", Path(), "choose a folder with --root, for `mambacl data prepare` and training")
    yield look("Data", "temporary", Path(tempfile.gettempdir()), "set TMPDIR to another folder")


def check_cache() -> Iterator[Finding]:
    from mambacl.backbones.loading import cache_folder

    yield look("Cache", "weights", cache_folder(), "set MAMBACL_CACHE to another folder")
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    yield look("Cache", "kernels", triton, "set TRITON_CACHE_DIR to another folder")


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Python": check_python,
    "PyTorch": check_torch,
    "GPU": check_gpu,
    "Triton": check_triton,
    "C++ scan": check_scan,
    "Extras": check_extras,
    "Data": check_data,
    "Cache": check_cache,
}
NEED_TORCH = ("GPU", "Triton", "C++ scan", "Cache")


def system() -> str:
    """The machine in a line."""
    return f"mambacl {installed_version('mambacl') or ''} on {platform.platform()}"
