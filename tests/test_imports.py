"""The folders follow the way of the data, and nothing imports backwards. Read from the source, without importing it:
imports inside functions and those for type checkers count as well."""

import ast
from pathlib import Path

import mambacl

PACKAGE = Path(mambacl.__file__).parent

# Each imports from itself and from those before it. A top-level module that is not named comes before all of them.
ORDER = (
    "ops",
    "backbones",
    "nullspace",
    "tuning",
    "classifiers",
    "methods",
    "meta",
    "data",
    "training.recipe",  # options only, which the configuration holds
    "config",
    "training",
    "pretraining",
    "reports",
    "deploy",
    "sweeps",
    "paper",
    "bench",
    "diagnosis",
    "mamba_ssm_compat",
    "timm",
    "lightning",
    "avalanche",
    "cli",
    "__main__",
    "__init__",  # the package's own: the names for users
)
SERVES_ANY_MODEL = ("ops", "backbones", "tuning", "nullspace", "classifiers", "methods", "mamba_ssm_compat")
NEVER = ("data", "config", "training")  # what these import, whatever the order says


def modules() -> dict[str, Path]:
    """By name without the package's: "ops", "ops.scan", "config"; "__init__" is the package itself."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def imports_of(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that a module names in an import, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full.removeprefix("mambacl.") in known else str(node.module))
    own = {full.removeprefix("mambacl.") for full in found if full.startswith("mambacl.")}
    return {module for module in own | ({"__init__"} if "mambacl" in found else set()) if module in known} - {name}


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports_of(name, path, known) for name, path in known.items()}


def part_of(name: str) -> str:
    """The entry of ORDER that a module belongs to, or its own first word."""
    return next((part for part in sorted(ORDER, key=len, reverse=True) if f"{name}.".startswith(f"{part}.")),
                name.partition(".")[0])  # fmt: skip


def place(name: str) -> int:
    part = part_of(name)
    return ORDER.index(part) if part in ORDER else -1


def test_every_folder_has_its_place() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert len(folders) > 10 and folders <= {part.partition(".")[0] for part in ORDER}


def test_nothing_imports_backwards() -> None:
    found = graph()
    assert len(found) > 80 and sum(map(len, found.values())) > 300
    backwards = [(name, other) for name, others in found.items() for other in others if place(other) > place(name)]
    assert not backwards, f"these import what comes after them: {backwards}"


def test_what_serves_any_model_knows_no_data_and_no_training() -> None:
    wrong = [
        (name, other)
        for name, others in graph().items()
        for other in others
        if part_of(name) in SERVES_ANY_MODEL and other.partition(".")[0] in NEVER
    ]
    assert not wrong, f"these must not know each other: {wrong}"


def test_metrics_know_only_counts() -> None:
    assert graph()["training.metrics"] <= {"registry"}
    assert "import torch" not in (PACKAGE / "training" / "metrics.py").read_text(encoding="utf-8")


def test_there_is_no_circle() -> None:
    found = graph()
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"a circle of imports: {' -> '.join((*way[way.index(name) :], name))}"
        if name not in done:
            for other in sorted(found[name]):
                visit(other, (*way, name))
            done.add(name)

    for name in sorted(found):
        visit(name, ())
