"""Small images of several domains: the class is the colour of the square, the domain is what is around it."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES, DOMAINS = ("ant", "bee", "cow"), ("night", "noon", "rust")
GROUNDS = ((10, 10, 30), (150, 150, 140), (80, 50, 30))


def pixels(label: int, domain: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([label, domain, seed])
    image = np.full((16, 16, 3), GROUNDS[domain], dtype=np.int64) + rng.integers(-10, 30, (16, 16, 3))
    top, left = rng.integers(0, 6, 2)
    image[top : top + 10, left : left + 10] = rng.integers(0, 40, (10, 10, 3))
    image[top : top + 10, left : left + 10, label] += 200
    return np.clip(image, 0, 255).astype(np.uint8)


def make_domains(root: Path, train: int = 8, test: int = 4, left_out: tuple[str, ...] = ()) -> Path:
    """ROOT/SPLIT/DOMAIN/CLASS/*.png, without what is left out, such as "train/noon/bee"."""
    for split, count in (("train", train), ("test", test)):
        for d, domain in enumerate(DOMAINS):
            for c, name in enumerate(CLASSES):
                folder = root / split / domain / name
                if folder.relative_to(root).as_posix() in left_out:
                    continue
                folder.mkdir(parents=True)
                for number in range(count):
                    Image.fromarray(pixels(c, d, number + 1000 * (split == "test"))).save(folder / f"{number}.png")
    return root


def write_manifest(root: Path) -> Path:
    """A manifest of such a tree, whose tasks are the domains."""
    rows = ["path,label,split,task"]
    for path in sorted(root.glob("*/*/*/*.png")):
        split, domain, name, _ = path.relative_to(root).parts
        rows.append(f"{path.relative_to(root).as_posix()},{name},{split},{domain}")
    (root / "list.csv").write_text("\n".join(rows))
    return root / "list.csv"
