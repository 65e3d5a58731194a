"""The places of a figure that a reader can hover over, and what is shown there."""

import json
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

Mark = tuple[Any, float, float, float, float, str]  # transform, x, y, width, height, words
_marks: "WeakKeyDictionary[Figure, list[Mark]]" = WeakKeyDictionary()


def mark(
    axes: Any, x: ArrayLike, y: ArrayLike, words: Sequence[str], size: tuple[float, float] = (0.0, 0.0),
    transform: Any = None,
) -> None:  # fmt: skip
    """What a reader sees on hovering over these points. `size`: width and height of cells around them, in the units of
    the axes. `transform` replaces the data coordinates."""
    places = zip(np.asarray(x, dtype=float).ravel(), np.asarray(y, dtype=float).ravel(), words, strict=True)
    found = _marks.setdefault(axes if isinstance(axes, Figure) else axes.figure, [])
    found += [(transform or axes.transData, a, b, *size, text) for a, b, text in places if np.isfinite(a + b)]


def placed_marks(figure: Figure) -> str:
    """As JSON: [x, y, width, height, words] in the units of the figure's SVG, points from its upper left corner."""
    scale, height = 72 / figure.dpi, figure.dpi * figure.get_figheight()
    out = []
    for transform, x, y, w, h, words in _marks.get(figure, []):
        (left, low), (right, top) = transform.transform([(x - w / 2, y - h / 2), (x + w / 2, y + h / 2)])
        box = min(left, right), height - max(low, top), abs(right - left), abs(top - low)
        out.append([*(round(float(value) * scale, 1) for value in box), words])
    return json.dumps(out, ensure_ascii=False, separators=(",", ":"))
