"""Charts of pages: a matplotlib figure as SVG, the places to hover over, and its numbers as a table and as CSV.

Why matplotlib and a script of 3 kB, instead of a plotting library for browsers: a page must be one file that works
offline, so each page would carry that library. Plotly's is 4.5 MB, those of Bokeh and Vega-Lite about 1 MB, and both
need packages of 6 to 40 MB besides. Matplotlib is installed anyway (its licence allows any use), a chart is 20 to 40
kB, and it prints and shows without a script. Its colours are the page's, so they follow light and dark, and its texts
are texts, in the fonts of the browser.
"""

import functools
import io
import multiprocessing
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import findSystemFonts, fontManager
from matplotlib.text import Text

from mambacl.log import logger
from mambacl.reports import figures
from mambacl.reports.marks import placed_marks
from mambacl.reports.rendering import csv_address
from mambacl.reports.tables import Table

ROWS_SHOWN = 200  # of a chart's numbers on the page; the CSV has all
WORKERS = 4  # processes that draw
PATIENCE = 30.0  # seconds; drawing all charts of a page one after another takes one or two
VARIABLES = {  # colours of figures -> those of style.css
    figures.INK: "--ink",
    figures.QUIET: "--quiet",
    figures.FAINT: "--line",
    figures.TINT: "--code",
    figures.NULL_TINT: "--null-ground",
    figures.NULL_INK: "--null-ink",
    figures.COLOURS[-1]: "--grey",
    "#ffffff": "--card",
}
WIDE_FONTS = (  # with Chinese, Japanese and Korean signs, on Linux, macOS and Windows
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans CJK TC", "Source Han Sans SC",
    "Source Han Sans", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback", "PingFang SC",
    "Hiragino Sans GB", "Hiragino Sans", "Apple SD Gothic Neo", "Arial Unicode MS", "Microsoft YaHei", "SimHei",
    "Yu Gothic", "MS Gothic", "Malgun Gothic", "NanumGothic", "IPAexGothic", "IPAGothic", "Noto Serif CJK SC",
)  # fmt: skip
WIDE_FILES = re.compile(
    r"SansCJK.*Regular|SourceHanSans.*Regular|wqy|DroidSansFallback|PingFang|Hiragino|AppleSDGothic|msyh\.|simhei|"
    r"YuGothR|msgothic|malgun\.|NanumGothic\.|ipag|SerifCJK.*Regular"
)


@dataclass(frozen=True)
class Drawing:
    svg: str
    png: bytes
    marks: str
    """what to show at which place, as JSON: [x, y, width, height, words] in the SVG's units, for the page's script"""


@dataclass(frozen=True)
class Chart:
    """A figure: on the page as SVG, in `figures/` as PNG."""

    name: str
    """of its files, without an ending"""
    figure: Figure
    numbers: Table

    @cached_property
    def drawing(self) -> Drawing:
        with warnings.catch_warnings():
            # Without such a font the PNG has boxes; the page has not, because the browser finds one.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            png, svg = figures.png(self.figure), _svg(self.name, self.figure)
        return Drawing(svg, png, placed_marks(self.figure))

    @property
    def width(self) -> int:
        """In CSS pixels."""
        return round(96 * self.figure.get_figwidth())

    @property
    def shown(self) -> Table:
        """The numbers, without rows past the first few hundred."""
        rows, total = self.numbers.rows[:ROWS_SHOWN], len(self.numbers.rows)
        notes = self.numbers.notes
        if len(rows) < total:
            notes = (*notes, f"the first {len(rows)} of {total:,} rows; the CSV file has all")
        return Table(self.numbers.caption, self.numbers.columns, rows, notes)

    @property
    def csv(self) -> str:
        """The numbers as the address of a file to download."""
        return csv_address(self.numbers)


def chart(name: str, figure: Figure, numbers: Table) -> Chart:
    _use_wide_fonts(figure)
    return Chart(name, figure, numbers)


def draw(charts: Sequence[Chart]) -> None:
    """Draws several charts, on Linux in processes of their own: one thread alone can draw at a time, and a run's page
    has a dozen. They are forks, which have the figures already. If they fail, each chart is drawn when it is needed."""
    workers = min(WORKERS, os.cpu_count() or 1, len(charts) // 3)
    if workers < 2 or sys.platform != "linux" or multiprocessing.current_process().daemon:  # which may not fork
        return
    context = multiprocessing.get_context("fork")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads; the forks only draw
            with context.Pool(workers, initializer=_begin, initargs=(charts,)) as pool:
                drawn = pool.map_async(_drawn, range(len(charts)), chunksize=1).get(PATIENCE)
    except (OSError, multiprocessing.TimeoutError):
        return
    for one, drawing in zip(charts, drawn, strict=True):
        vars(one)["drawing"] = drawing  # as `cached_property` keeps it


_waiting: list[Chart] = []  # of a fork


def _begin(charts: Sequence[Chart]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with which the pool ends its forks
    _waiting.extend(charts)


def _drawn(number: int) -> Drawing:
    return _waiting[number].drawing


def _svg(name: str, figure: Figure) -> str:
    """The figure as an element of a page: ids are unique, colours and fonts are those of the page."""
    out = io.StringIO()
    with figures.style():
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "mambacl"})
        FigureCanvasSVG(figure).print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', svg)
    svg = svg.replace("xlink:href", "href").replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda found: _variable(found[0]), svg)
    # Releases of matplotlib write `font: 10px 'DejaVu Sans', ...` or `font-size: 10px; font-family: ...`.
    svg = re.sub(r"(font-family:|font: [^;\"]*?px) [^;\"]*", r"\1 var(--font)", svg)
    width, height = 72 * figure.get_size_inches()
    svg = re.sub(r"<svg[^>]*>", f'<svg viewBox="0 0 {width:g} {height:g}" aria-hidden="true">', svg, count=1)
    return re.sub(r"\s+", " ", svg).replace("> <", "><").strip()


def _variable(colour: str) -> str:
    found = next((name for known, name in VARIABLES.items() if known.lower() == colour), None)
    return colour if found is None else f"var({found})"


def _use_wide_fonts(figure: Figure) -> None:
    """Gives texts in Chinese, Japanese or Korean an installed font that has their signs, for the PNG."""
    texts: list[Any] = figure.findobj(Text)
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):  # whose labels get their texts only when they are drawn
            if any(map(_is_wide, getattr(axis.get_major_formatter(), "seq", ()))):
                texts += axis.get_ticklabels()
    for text in texts:
        if _is_wide(text.get_text()):
            text.set_fontfamily(["DejaVu Sans", *_wide_fonts()])


def _is_wide(text: str) -> bool:
    return any(sign >= "\u2e80" or "\u1100" <= sign <= "\u11ff" for sign in text)


@functools.cache
def _wide_fonts() -> list[str]:
    """The names of such fonts. Matplotlib's list of fonts can be older than the fonts, so their files are looked up."""
    found = [name for name in WIDE_FONTS if name in {font.name for font in fontManager.ttflist}]
    if not found:
        before = len(fontManager.ttflist)
        for path in sorted(findSystemFonts()):
            if WIDE_FILES.search(Path(path).name) and len(fontManager.ttflist) < before + 3:
                fontManager.addfont(path)
        found = [font.name for font in fontManager.ttflist[before:]]
    if not found:
        logger.warning(
            "No font on this machine has Chinese, Japanese or Korean signs, so the PNG files of figures show boxes: "
            "install one, such as Noto Sans CJK. The page itself shows them wherever the reader has such a font."
        )
    return list(dict.fromkeys(found))[:3]
