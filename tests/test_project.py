"""Files of the project that repeat a fact say the same."""

import re
from pathlib import Path

import pytest
import yaml

SOURCE = Path(__file__).parents[1]
PROJECT = (SOURCE / "pyproject.toml").read_text(encoding="utf-8")
YAML = [
    ".pre-commit-config.yaml",
    "CITATION.cff",
    *(str(path.relative_to(SOURCE)) for path in SOURCE.glob(".github/*/*.yml")),
]


@pytest.mark.parametrize("name", YAML)
def test_yaml_can_be_read(name: str) -> None:
    assert isinstance(yaml.safe_load((SOURCE / name).read_text(encoding="utf-8")), dict)


def test_the_workflow_tests_the_oldest_versions() -> None:
    pinned = re.findall(r"^(\w+)==([\d.]+)\.\*$", (SOURCE / ".github/oldest.txt").read_text(encoding="utf-8"), re.M)
    assert dict(pinned) == dict(re.findall(r'"(torch|torchvision)>=([\d.]+)"', PROJECT)) and len(pinned) == 2
    [python] = re.findall(r'requires-python = ">=([\d.]+)"', PROJECT)
    jobs = yaml.safe_load((SOURCE / ".github/workflows/test.yml").read_text(encoding="utf-8"))["jobs"]
    oldest = [row for row in jobs["test"]["strategy"]["matrix"]["include"] if row["versions"] == "oldest"]
    assert [row["python"] for row in oldest] == [python]


def test_the_citation_is_of_this_package() -> None:
    citation = yaml.safe_load((SOURCE / "CITATION.cff").read_text(encoding="utf-8"))
    assert (
        f'license = "{citation["license"]}"' in PROJECT
        and f'description = "{citation["abstract"].rstrip(".")}"' in PROJECT
    )


def test_the_extras_are_documented() -> None:
    [section] = re.findall(r"\[project\.optional-dependencies\]\n(.*?)\n\[", PROJECT, re.S)
    needed = {  # a comment after the bracket, lists of several lines, versions
        name: set(re.findall(r'"([\w-]+)[^"]*"', listed))
        for name, listed in re.findall(r"^(\w+) = \[(.*?)\]$", section, re.M | re.S)
    }
    page = (SOURCE / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (.*?) ?\|$", page, re.M)
    documented = {name: set(packages.split(", ")) for name, packages in rows}
    assert documented.pop("extras") == {""} and needed.pop("extras") == {"mambacl"}
    assert documented == needed
    [all_extras] = re.findall(r'"mambacl\[(.+?)\]"', section)
    assert set(all_extras.split(",")) == set(needed) - {"dev"}


def test_no_two_test_files_have_the_same_name() -> None:
    """pytest imports them by their names, without the folder, and would collect none."""
    names = [path.name for path in (SOURCE / "tests").rglob("*.py")]
    assert sorted(names) == sorted(set(names))


def test_every_page_is_linked() -> None:
    """From the README or another page, or nobody would find it."""
    texts = {path: path.read_text(encoding="utf-8") for path in [*SOURCE.glob("*.md"), *SOURCE.glob("docs/*.md")]}
    for page in SOURCE.glob("docs/*.md"):
        assert any(f"{page.name})" in text for path, text in texts.items() if path != page), page.name
