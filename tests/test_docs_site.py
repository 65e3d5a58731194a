"""The documentation as a site: its navigation, its figures, its reference, and that it builds."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_help import SOURCE

import mambacl

DOCS = SOURCE / "docs"
LINK = re.compile(r"\]\((?!\w+://)([^)#\s]*)(?:#([^)\s]*))?\)")  # file and anchor


def navigation() -> list[str]:
    """The pages that mkdocs.yml names, in order."""

    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        inner = entry.values() if isinstance(entry, dict) else entry
        return [page for part in inner for page in pages(part)]

    return pages(yaml.safe_load((SOURCE / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def test_the_navigation_names_every_page_once() -> None:
    assert sorted(navigation()) == sorted(str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md"))


def test_sections_are_in_the_order_of_what_readers_want() -> None:
    [*sections] = yaml.safe_load((SOURCE / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    names = ["Start", "Use a model", "Train and compare", "Choose", "Understand", "Extend", "Reference"]
    assert [name for section in sections for name in section] == names


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text(encoding="utf-8"), re.M)
    assert len(listed) == len(set(listed))
    missing = {f"mambacl.{name}" for name in mambacl.__all__} - set(listed)
    assert missing == {"mambacl.__version__"}
    for name in listed:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        assert found.__doc__, f"{name} has no docstring"


def test_markdown_that_only_some_programs_understand_is_not_used() -> None:
    """A list or a table needs an empty line before it; an inner list needs four spaces."""
    for page in DOCS.glob("**/*.md"):
        lines = without_code(page).splitlines()
        for before, line in itertools.pairwise(lines):
            item, table = re.match(r"([-*]|\d+\.) ", line), line.startswith("|")
            inside = re.match(r"([-*]|\d+\.) |\s", before) if item else before.startswith("|")
            comment = before.startswith("<!--")
            assert not (item or table) or inside or not before or comment, f"{page.name}: {line}"
            assert not re.match(r" {1,3}[-*] ", line), f"{page.name}: {line}"


def anchors(page: Path) -> set[str]:
    """Of the headings. mkdocs joins hyphens and code hosts do not; those that differ are left out."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.M)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", name) for name in plain} & {name.replace(" ", "-") for name in plain}


@pytest.mark.parametrize("page", [SOURCE / "README.md", *sorted(DOCS.glob("**/*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """A page of the site links to files of the site only: ../README.md is none."""
    within = SOURCE if page.name == "README.md" else DOCS
    for name, anchor in LINK.findall(without_code(page)):
        target = (page.parent / name).resolve() if name else page
        assert target.exists() and target.is_relative_to(within), f"{page.name}: {name}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {name}#{anchor}"


# Figures


def texts(svg: Path) -> list[str]:
    return sorted(re.findall(r"<text[^>]*>([^<]*\d\.\d[^<]*)</text>", svg.read_text(encoding="utf-8")))


def test_the_figures_show_what_was_recorded(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("draw_figures", SOURCE / "tools" / "draw_figures.py")
    assert spec is not None and spec.loader is not None
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    for made in drawing.draw(tmp_path):
        there = DOCS / "images" / made.name
        values = [text for text in texts(made) if not re.fullmatch(r"[\d.]+", text) or len(text) > 3]
        assert len(values) >= 3
        assert set(values) <= set(texts(there)), f"run python tools/draw_figures.py: {made.name}"
        assert there.stat().st_size < 100_000
        [described] = re.findall(rf"!\[([^\]]*)\]\(images/{made.name}\)", pages)
        numbers = set(re.findall(r"\d+\.\d+", described))
        shown = set(re.findall(r"\d+\.\d+", " ".join(texts(there))))
        assert numbers and numbers <= shown, f"{made.name}: {numbers - shown}"


@pytest.mark.slow
def test_the_spectrum_can_be_measured_again() -> None:
    spec = importlib.util.spec_from_file_location("spectrum", SOURCE / "examples" / "spectrum.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.measure(size=16, images=40)
    assert len(found["energy"]) == 384 and found["energy"] == sorted(found["energy"])
    cuts = [found["protected"][rule] for rule in ("corner", "energy:0.9", "energy:0.99", "energy:0.999")]
    assert cuts == sorted(cuts)


# The site


@pytest.mark.extras
@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=SOURCE, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for page in navigation():
        text = (tmp_path / "site" / page.replace(".md", ".html")).read_text(encoding="utf-8")
        assert "<h1" in text and ":::" not in re.sub(r"<code>[^<]*</code>", "", text), page
        elsewhere = re.findall(r'<(?!a\s)[^>]*\b(?:src|href)="https?://[^>]*>', text)
        assert not elsewhere, f"{page} asks another server: {elsewhere}"
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert 'id="mambacl.train"' in reference and 'id="mambacl.NullSpace.consolidate"' in reference
