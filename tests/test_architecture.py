"""docs/architecture.md names functions, files and folders that exist, and the folders in the order of their imports."""

import ast
import re
from pathlib import Path

import pytest
from test_imports import ORDER

import mambacl

PACKAGE = Path(mambacl.__file__).parent
ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
WRITTEN = ("results.json",)  # by a run
FILES = [word for word in QUOTED if "/" in word or re.search(r"\.(py|html|yaml|json|md)$", word) if word not in WRITTEN]
FUNCTIONS = [word for word in QUOTED if re.fullmatch(r"\w+(\.\w+)+", word) and word not in (*FILES, *WRITTEN)]


def defines(name: str) -> bool:
    """Whether a module of the package defines a function or class itself. Read from the source: kernels import only
    where there is Triton."""
    words = name.split(".")
    for count in range(len(words) - 1, 0, -1):
        folder = PACKAGE.joinpath(*words[:count])
        path = next((p for p in (folder.with_suffix(".py"), folder / "__init__.py") if p.is_file()), None)
        if path is not None:
            body = ast.parse(path.read_text(encoding="utf-8")).body
            for word in words[count:]:
                found = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == word]
                if not found:
                    return False
                body = found[0].body
            return True
    return False


def test_the_page_names_functions() -> None:
    assert len(FUNCTIONS) > 50 and len(FILES) > 15


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_exists(name: str) -> None:
    assert defines(name), f"mambacl.{name} is not defined there"


@pytest.mark.parametrize("name", FILES)
def test_every_file_exists(name: str) -> None:
    assert (PACKAGE / name).exists() or (ROOT / name).exists()


def test_the_folders_stand_in_the_order_of_their_imports() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", TEXT, re.M)
    places = [part for part in ORDER if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()]
    assert listed == [part for part in places if not part.startswith("__")]
    top = {path.name for path in PACKAGE.glob("*.py")} - {f"{name}.py" for name in (*listed, "__init__", "__main__")}
    assert top <= set(FILES), "modules above the folders that the page does not name"


def test_what_does_not_exist_is_found() -> None:
    assert not defines("ops.scan.selective_scam") and not defines("ops.missing.scan") and not defines("ops.scan.F")
