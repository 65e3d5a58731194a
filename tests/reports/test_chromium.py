"""Pages in headless Chromium: nothing to complain about, nothing asked for, readable on a phone, numbers on hover."""

from pathlib import Path

import pytest
from chromium_help import CHROMIUM, Tab, chromium
from reports_help import make_run

from mambacl.reports import write_report
from mambacl.training.confusion import Confusion
from mambacl.training.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]
COUNTS = [[90], [80, 45], [70, 44, 20]]


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    folders = []
    for method, less in (("mamba-cl", 0), ("a method with a rather long name, and options", 7)):
        for seed in range(3):
            rows = [[count - less - seed * (1 + j) for j, count in enumerate(row)] for row in COUNTS]
            folder = make_run(root / f"{less}-{seed}", rows, [100, 50, 25], seed=seed, method=method, epochs=2)
            folders.append(folder)
    pairs = {(c, c): 20 for c in range(6)} | {(0, 3): 5, (4, 1): 2}
    RunFolder(folders[0]).write_confusion(2, Confusion(pairs, {(0, 3): [(0, 1)]}))
    return {"run": write_report(folders[:1]), "comparison": write_report(folders, root / "all")}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("page", ["run", "comparison"])
def test_a_page(tab: Tab, pages, page, width, dark):
    tab.open(pages[page], width, dark=dark)
    assert tab.complaints() == []
    assert tab.value("document.documentElement.scrollWidth") <= width
    captions = "Math.max(...[...document.querySelectorAll('caption')].map(e => e.getBoundingClientRect().right))"
    assert tab.value(captions) <= width  # wide tables scroll, their captions do not
    ground = tab.value("getComputedStyle(document.body).backgroundColor").strip("rgb()").split(",")
    assert (sum(map(int, ground)) < 3 * 100) == dark
    ink = tab.value("getComputedStyle(document.querySelector('.drawing text')).fill").strip("rgb()").split(",")
    assert (sum(map(int, ink)) > 3 * 150) == dark
    assert tab.value("[...document.querySelectorAll('.drawing svg')].every(e => e.getBoundingClientRect().width > 200)")


def test_hovering_over_a_point_shows_its_number(tab: Tab, pages):
    tab.open(pages["run"])
    assert tab.value("document.getElementById('tip').hidden")
    tab.value("document.querySelector('.drawing').scrollIntoView({behavior: 'instant', block: 'center'})")
    tab.value(
        "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )  # scrolling hides the tip
    x, y = tab.value(
        "(() => { const d = document.querySelector('.drawing'), s = d.querySelector('svg'),"
        " m = JSON.parse(d.dataset.marks).find(m => m[4].startsWith('all tasks seen, after task 2')),"
        " b = s.getBoundingClientRect(), k = b.width / s.viewBox.baseVal.width;"
        " return [b.left + m[0] * k, b.top + m[1] * k]; })()"
    )
    tab.move(x + 2, y - 2)
    assert not tab.value("document.getElementById('tip').hidden")
    assert tab.value("document.getElementById('tip').textContent") == "all tasks seen, after task 2: 85.00"
    tab.move(1, 1)
    assert tab.value("document.getElementById('tip').hidden")
    tab.value("document.querySelector('.drawing').focus()")
    for kind in ("keyDown", "keyUp"):
        tab("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight")
    assert tab.value("document.getElementById('tip').textContent") == "all tasks seen, after task 3: 79.33"
    assert tab.complaints() == []


def test_a_script_in_the_page_would_not_run(tab: Tab, pages, tmp_path):
    """The security policy allows only the page's own script."""
    html = pages["run"].read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(html.replace("</main>", "<script>window.bad = 1</script></main>"))
    tab.open(tmp_path / "page.html")
    assert tab.value("window.bad") is None and any("Content Security Policy" in words for words in tab.complaints())


def test_printing(tab: Tab, pages):
    tab.open(pages["run"], dark=True)
    assert tab.pdf().startswith(b"%PDF-")
    tab("Emulation.setEmulatedMedia", media="print")
    shown = "[...document.querySelectorAll('.drawing svg')].every(e => e.getBoundingClientRect().width > 200)"
    assert tab.value(shown)
    assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
