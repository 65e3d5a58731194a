"""The wheel, a new environment, and `mambacl doctor`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hour import LONGEST_INSTALL, SOURCE, Hour

EXTRAS = "serve,onnx,openvino"
FROM_ELSEWHERE = (
    "import json, mambacl, sys; from mambacl.ops import cpu;"
    "print(json.dumps({'file': mambacl.__file__, 'kernel': cpu.built(), 'path': sys.path}))"
)


def install(hour: Hour, python: str, wheel: Path | None) -> None:
    if wheel is None:
        hour.works(
            "the wheel is built", hour.call(["make", "-C", SOURCE, "wheel", f"PYTHON={python}"], variables=os.environ)
        )
        [wheel] = (SOURCE / "dist").glob("*.whl")
    make = ["sh", SOURCE / "tools" / "make_venv.sh", python, hour.environment]
    hour.works("an environment is made", hour.call(make, variables=os.environ))
    pip = [hour.python, "-m", "pip", "--disable-pip-version-check"]
    named = f"{wheel.resolve()}[{EXTRAS}]"
    # pip with the user's own settings: some machines reach packages only through them
    variables = {**os.environ, "PYTHONNOUSERSITE": "1"}
    variables.pop("PYTHONPATH", None)
    done = hour.call([*pip, "install", "--quiet", named], variables=variables, longest=LONGEST_INSTALL)
    hour.works("the wheel is installed", done)
    hour.works("its requirements agree", hour.call([*pip, "check"], variables=variables))
    about = json.loads(hour.works("it can be imported", hour.call([hour.python, "-c", FROM_ELSEWHERE])).out)
    inside = Path(about["file"]).is_relative_to(hour.environment)
    hour.check("it comes from the environment, not from the repository", inside, about["file"])
    near = [entry for entry in about["path"] if entry.startswith(str(SOURCE / "src"))]
    hour.check("the repository is not on the path", not near, near)
    hour.check("it has the C++ scan", about["kernel"], "the wheel lacks it")


def doctor(hour: Hour) -> None:
    version = hour.works("`mambacl --version`", hour.mambacl("--version"))
    hour.check("the version has a number", version.out.startswith("mambacl 0."), version.out)
    first = hour.works("`mambacl` alone says how to begin", hour.mambacl())
    hour.check("it names doctor and the demo", "mambacl doctor" in first.out and "train demo" in first.out, first.out)
    found = json.loads(hour.works("doctor finds nothing broken", hour.mambacl("doctor", "--json")).out)
    broken = [finding["name"] for finding in found["findings"] if finding["status"] == "broken"]
    hour.check("doctor and its exit code agree", not broken, broken)
    hour.refuses("a mistyped command", lambda: hour.mambacl("docter"), mentions="doctor")
    hour.refuses("a mistyped option", lambda: hour.mambacl("doctor", "--jsn"), mentions="--json")
