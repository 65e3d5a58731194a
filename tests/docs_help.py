"""The code blocks of the README and of docs/, and the commands in them."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1]
PAGES = [SOURCE / "README.md", *sorted((SOURCE / "docs").glob("**/*.md"))]
PROGRAMS = ("mambacl", "make", "pip", "python", "curl", "find", "hf", "torchrun", ".venv/bin/pytest")
FENCE = re.compile(r"\s*```(\w*)$")


@dataclass(frozen=True)
class CodeBlock:
    page: str
    """README.md, or as learn.md for a page of docs/"""
    line: int
    language: str
    """as written; of an indented block, which names none, `sh`, `python` or `text`"""
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, without comments and prompts; a line that ends in a backslash goes on."""
        joined = self.text.replace("\\\n", " ")
        lines = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines())
        return [" ".join(line.removeprefix("$ ").split()) for line in lines if line]


def blocks(page: Path) -> Iterator[CodeBlock]:
    """All blocks of a page, fenced and indented."""
    name = page.name
    lines = [*page.read_text(encoding="utf-8").splitlines(), ""]
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        start = number
        if fence:
            number += 1
            while not FENCE.match(lines[number]):
                number += 1
            yield CodeBlock(name, start + 1, fence[1], "\n".join(lines[start + 1 : number]) + "\n")
        elif lines[number].startswith("    ") and not lines[number - 1].strip() and not _in_list(lines, number):
            while number + 1 < len(lines) and (lines[number + 1].startswith("    ") or not lines[number + 1].strip()):
                number += 1
            text = "\n".join(line[4:] for line in lines[start : number + 1]).strip() + "\n"
            yield CodeBlock(name, start + 1, _language(text), text)
        number += 1


def _in_list(lines: list[str], number: int) -> bool:
    before = next((line for line in reversed(lines[:number]) if line and not line.startswith(" ")), "")
    return bool(re.match(r"[-*] |\d+\. ", before))


def _language(text: str) -> str:
    if any(line.split()[:1] and line.split()[0] in PROGRAMS for line in text.splitlines()):
        return "sh"
    try:
        ast.parse(text)
    except SyntaxError:
        return "text"
    return "python" if "(" in text else "text"


BLOCKS = [block for page in PAGES for block in blocks(page)]


def code(page: str, language: str = "python") -> list[str]:
    """The blocks of a page in one language."""
    return [block.text for block in BLOCKS if block.page == page and block.language == language]


def commands() -> list[tuple[str, str]]:
    """Every line of every shell block, with its page."""
    return [(block.page, line) for block in BLOCKS if block.language in ("sh", "console") for line in block.commands]


def words(line: str) -> list[str]:
    """The words of a call of mambacl, after its name; of a pipe, the last part that calls it."""
    parts = [part.strip().partition("-m mambacl ") for part in line.split(" | ")]
    [call] = [after or before for before, _, after in parts if after or before.startswith("mambacl")][-1:]
    return shlex.split(call.removeprefix("mambacl "))
