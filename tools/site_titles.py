"""A hook of mkdocs: a link that shows a file name, such as [learn.md](learn.md), shows the page's title
in the navigation. On a code host the file name is what readers look for."""

import re
from typing import Any

LINK = re.compile(r"\[([\w-]+\.md)\]\(\1(#[^)]*)?\)")


def titles(entry: Any) -> dict[str, str]:
    """Page to title, from the navigation of mkdocs.yml."""
    found = {}
    for part in entry:
        for title, inner in part.items():
            found |= {inner: title} if isinstance(inner, str) else titles(inner)
    return found


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    known = titles(config["nav"])
    return LINK.sub(lambda match: f"[{known[match[1]]}]({match[1]}{match[2] or ''})", markdown)
