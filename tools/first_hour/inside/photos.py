"""Makes a user's folders of images from those in the package:  photos.py FOLDER

FOLDER/photos/train, FOLDER/photos/test   seven classes, JPEG and PNG of several sizes
FOLDER/more-photos                        three more
FOLDER/test-photos                        test images of all ten, of the model's size
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from mambacl.data.sets import open_dataset

OLD, TRAIN, TEST = 7, 60, 20
SIZE = 32  # the model's: other runtimes resize in their own ways
SIZES = ((32, 32), (40, 36), (64, 48))


def main() -> None:
    root = Path(sys.argv[1])
    data = open_dataset("fashion-mnist-small", None)
    for label, name in enumerate(data.class_names):
        folder = name.replace("/", " or ")
        for split, images, count in (("train", data.train, TRAIN), ("test", data.test, TEST)):
            chosen = np.flatnonzero(images.labels == label)[:count]
            for number, index in enumerate(chosen):
                picture = Image.fromarray(images.image(int(index))[0].numpy()).convert("RGB")
                if split == "test":
                    save(picture.resize((SIZE, SIZE)), root / "test-photos" / folder / f"{number:03}.png")
                place = root / "photos" / split / folder
                if label >= OLD:
                    place = root / "more-photos" / folder if split == "train" else None
                if place is not None:
                    suffix = ".jpg" if number % 3 == 0 else ".png"
                    save(picture.resize(SIZES[number % len(SIZES)]), place / f"{number:03}{suffix}")


def save(picture: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, quality=95) if path.suffix == ".jpg" else picture.save(path)


if __name__ == "__main__":
    main()
