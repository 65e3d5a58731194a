"""Trains a Mamba to learn streams in its hidden state, and tests it on classes that it has never seen.

    python examples/meta_stream.py
    python examples/meta_stream.py --dataset cifar100 --root FOLDER --ways 10 --steps 4000

The features come from a frozen backbone. Streams of two thirds of the classes train the learner
(`mambacl.meta`); streams of the others test it, beside the nearest class mean and the nearest image of the same
streams. The first rows are synthetic streams. Prints JSON: accuracy in per cent.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import Tensor

import mambacl
from mambacl.data import TransformConfig, Transforms, open_dataset
from mambacl.meta import MetaLearner, Streams, accuracy, streams_of, synthetic_streams, train


@torch.no_grad()
def features_by_class(name: str, root: str | None, backbone: str, images: int) -> list[Tensor]:
    """Features of the first test images of each class, with mean 0 and length 1."""
    model = mambacl.create_model(backbone, pretrained=True, num_classes=0).eval()
    dataset = open_dataset(name, root)
    transforms = Transforms.of_model(TransformConfig(), model)
    found = []
    for c in range(len(dataset.class_names)):
        own = [int(i) for i in (dataset.test.labels == c).nonzero()[0][:images]]
        batch = torch.stack([transforms.evaluate(dataset.test.image(i)) for i in own])
        found.append(model(transforms.normalize(batch)))
    centre = torch.cat(found).mean(0)
    return [F.normalize(own - centre, dim=1) for own in found]


def nearest(streams: Streams, by_mean: bool) -> float:
    """The nearest class mean, or the nearest image, of each query's own stream."""
    points, labels = streams.features, streams.labels
    if by_mean:
        shots = int((labels[0] == labels[0, 0]).sum())
        points, labels = points.unflatten(1, (-1, shots)).mean(2), labels[:, ::shots]
    found = labels.gather(1, torch.cdist(streams.queries, points).argmin(-1))
    return float((found == streams.answers).double().mean())


def row(learner: MetaLearner, streams: Streams) -> dict[str, float]:
    ways = int(streams.labels[0].unique().numel())
    found = {"learner": accuracy(learner, streams), "nearest mean": nearest(streams, True)}
    found |= {"nearest image": nearest(streams, False), "chance": 1 / ways}
    return {name: round(100 * value, 1) for name, value in found.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="fashion-mnist-small")
    parser.add_argument("--root")
    parser.add_argument("--backbone", default="defocus_mamba_nano")
    parser.add_argument("--images", type=int, default=40, help="images per class")
    parser.add_argument("--ways", type=int, default=3, help="classes per stream")
    parser.add_argument("--shots", type=int, default=5, help="images of each in a stream")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=600, help="training steps, for each kind of stream")
    parser.add_argument("--weight", type=float, default=0.5, help="weight of the association regulariser")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)

    classes = features_by_class(given.dataset, given.root, given.backbone, given.images)
    known = classes[: 2 * len(classes) // 3]
    held_out = classes[len(known) :]
    size, ways, shots = classes[0].shape[1], given.ways, given.shots
    seen_later = torch.Generator().manual_seed(given.seed + 1)
    results = {}
    for kind in ("synthetic", given.dataset):
        torch.manual_seed(given.seed)
        learner = MetaLearner(size, slots=ways, width=given.width)

        def draw(generator: torch.Generator, batch: int = 16, pool: list[Tensor] = known, kind: str = kind) -> Streams:
            if kind == "synthetic":
                return synthetic_streams(generator, batch, ways, shots, size, queries=2)
            return streams_of(generator, batch, pool, ways, shots, queries=2)

        train(learner, draw, given.steps, lr=3e-3, weight=given.weight, seed=given.seed)
        results[f"{kind}, new streams"] = row(learner, draw(seen_later, 200))
        if kind != "synthetic":
            results[f"{kind}, held-out classes"] = row(learner, draw(seen_later, 200, held_out))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
