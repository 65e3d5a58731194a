"""The public data sets and users' own: counts, classes and layouts."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_help import LISTS, MEAN, SHARED, STD, Rows, make_tree, needs_lists, picture, write_images
from PIL import UnidentifiedImageError

from mambacl.cli import main
from mambacl.data import (
    DATASETS,
    SOURCES,
    DataSet,
    FileImages,
    Stream,
    TransformConfig,
    Transforms,
    domains_in_order,
    from_huggingface,
    open_dataset,
    prepare,
    sets,
    tasks_of,
)
from mambacl.data.sets import begin_to_open, forget_begun
from mambacl.data.sets import manifest as manifest_module
from mambacl.data.sets.split_lists import from_lists, parse_list
from mambacl.errors import UserError


def with_lists(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    (root / "lists").symlink_to(LISTS)
    return root


@needs_lists
@pytest.mark.parametrize("name", ["imagenet-r", "domainnet-s200"])
@pytest.mark.parametrize("tasks", [10, 20, 50, 100])
def test_the_counts_of_the_public_lists(tmp_path: Path, name: str, tasks: int) -> None:
    dataset = open_dataset(name, with_lists(tmp_path / "root"))
    counts = SOURCES[name].counts
    assert (len(dataset.class_names), len(dataset.train.labels), len(dataset.test.labels)) == counts
    stream = Stream(dataset, Transforms(TransformConfig(), 8, MEAN, STD), tasks, "mamba-cl")
    assert [len(task) for task in stream.tasks] == [200 // tasks] * tasks
    assert (200, sum(stream.train_count(t) for t in range(tasks)), sum(stream.test_counts())) == counts
    if name == "imagenet-r" and tasks == 100:
        assert min(stream.test_counts()) >= 20
        per_class = np.bincount(dataset.train.labels), np.bincount(dataset.test.labels)
        assert [(c.min(), c.max()) for c in per_class] == [(38, 354), (5, 81)]


@needs_lists
def test_classes_of_the_public_lists(tmp_path: Path) -> None:
    root = with_lists(tmp_path / "root")
    dataset = open_dataset("imagenet-r", root)
    assert dataset.class_names == sorted(dataset.class_names) and dataset.class_names[0] == "n01443537"
    dataset = open_dataset("domainnet-s200", root)
    assert dataset.class_names[:3] == ["pickup_truck", "sweater", "The_Eiffel_Tower"]
    assert dataset.class_names[199] == "parrot"
    assert isinstance(dataset.train, FileImages)
    domains = [dataset.train.files[int(np.argmax(dataset.train.labels == c))].parts[-3] for c in range(0, 200, 20)]
    expected = "real sketch painting quickdraw quickdraw painting real clipart sketch infograph"
    assert domains == expected.split()


@needs_lists
@pytest.mark.parametrize(("name", "folder"), [("imagenet-r", "imagenet-r"), ("domainnet-s200", "")])
def test_a_small_tree_made_from_the_real_list(tmp_path: Path, name: str, folder: str) -> None:
    root = with_lists(tmp_path / "root")
    (root / folder).mkdir(exist_ok=True)
    dataset = open_dataset(name, root).limited(1)
    stream = Stream(dataset, Transforms(TransformConfig(), 8, MEAN, STD), 100, "pilot")
    task = next(t for t in range(100) if stream.test_counts()[t] < 60)
    assert isinstance(dataset.train, FileImages) and isinstance(dataset.test, FileImages)
    write_images(dataset.train.files[i] for i in stream._train[task])
    write_images(dataset.test.files[i] for i in stream._test[task])
    images, labels = next(iter(stream.train_batches(task, 0, 10)))
    assert images.shape == (2, 3, 8, 8) and sorted(labels.tolist()) == [2 * task, 2 * task + 1]
    assert sum(len(part) for _, part in stream.test_batches(task, 10)) == stream.test_counts()[task]


@needs_lists
@pytest.mark.parametrize(
    ("name", "folder"),
    [("imagenet-r", "imagenet-r"), pytest.param("domainnet-s200", "", marks=pytest.mark.long)],
)
def test_a_whole_tree_made_from_the_real_list(
    tmp_path: Path, name: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prepared from the lists alone, checked, and counted task by task against what the lists say."""
    paths: dict[str, list[str]] = {}
    for split, wanted in zip(("train", "test"), SOURCES[name].lists, strict=True):
        lines = (LISTS / wanted.name).read_text().splitlines()
        paths[split] = [line.rpartition(" ")[0] if name != "imagenet-r" else line for line in lines]
    links = 20_000  # names of one file that every file system allows
    for number, path in enumerate([*paths["train"], *paths["test"]]):
        if number % links == 0:
            whole = tmp_path / f"{number}.png"
            picture(number).save(whole)
        place = tmp_path / "root" / folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        os.link(whole, place)
    words = ["--root", str(tmp_path / "root")]
    assert main(["data", "prepare", name, *words, "--lists", str(LISTS)]) == 0
    report = tmp_path / "report.json"
    options = ["--tasks", "20", "--order", "mamba-cl", "--json", str(report)]
    assert main(["data", "check", name, *words, *options]) == 0
    assert "All images can be read." in capsys.readouterr().out
    said = json.loads(report.read_text())
    for split in ("train", "test"):
        counted = Counter(path.split("/")[-2] for path in paths[split])
        assert dict(zip(said["class_names"], said[split], strict=True)) == dict(counted)
    assert [len(task) for task in said["tasks"]] == [10] * 20
    assert said["tasks"][0] == np.random.Generator(np.random.PCG64(2024)).permutation(200)[:10].tolist()


def test_a_missing_or_changed_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data prepare imagenet-r"):
        open_dataset("imagenet-r", tmp_path)
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "imagenet_r_train.txt").write_text("n1/a.jpg\n")
    with pytest.raises(UserError, match=r"imagenet_r_train\.txt is not the public list"):
        open_dataset("imagenet-r", tmp_path)


def test_a_data_set_without_its_root() -> None:
    for name in set(SOURCES) - {"fashion-mnist-small"}:  # other tests add data sets without a source
        with pytest.raises(UserError, match=r"needs stream\.root"):
            open_dataset(name, None)


def test_a_data_set_that_is_opened_in_the_background(tmp_path: Path) -> None:
    begin_to_open("fashion-mnist-small", None)
    begun, again = (open_dataset("fashion-mnist-small", None) for _ in range(2))  # it is handed out once
    assert begun is not again and begun.fingerprint() == again.fingerprint()
    begin_to_open("fashion-mnist-small", None)
    forget_begun()
    assert not sets._begun
    begin_to_open("cifar100", tmp_path)
    with pytest.raises(UserError, match="has no CIFAR-100 file 'meta'"):
        open_dataset("cifar100", tmp_path)


def test_domainnet_in_full_merges_the_domains(tmp_path: Path) -> None:
    train = parse_list("clipart/axe/1.jpg 0\nreal/bear paw/x 2.jpg 1\n")
    test = parse_list("real/axe/2.jpg 0\nclipart/bear paw/y.jpg 1")
    dataset = from_lists("domainnet-345", tmp_path, train, test)
    assert dataset.class_names == ["axe", "bear paw"]
    assert isinstance(dataset.train, FileImages) and dataset.train.files[1] == tmp_path / "real/bear paw/x 2.jpg"
    assert len(SOURCES["domainnet-345"].lists) == 12 and len(SOURCES["domainnet-345"].downloads) == 6
    with pytest.raises(UserError, match="gaps"):
        from_lists("domainnet-345", tmp_path, parse_list("real/axe/1.jpg 3"), test)


def test_every_source_is_a_data_set_and_says_what_it_is() -> None:
    assert set(SOURCES) <= set(DATASETS.names())
    for source in SOURCES.values():
        for download in (*source.downloads, *source.lists):
            kind, _, digits = download.checksum.partition(":")
            assert kind == "sha256" and len(digits) == 64 and download.url.startswith("http")


# Tiny-ImageNet and Fashion-MNIST


def make_tiny(root: Path) -> Path:
    folder = root / "tiny-imagenet-200"
    write_images(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG" for wnid in ("n02", "n01") for i in range(3))
    write_images((folder / "val" / "images" / f"val_{i}.JPEG" for i in range(4)), start=50)
    rows = [f"val_{i}.JPEG\t{('n01', 'n02')[i % 2]}\t0\t0\t62\t62" for i in range(4)]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    return root


def test_tiny_imagenet_in_its_official_layout(tmp_path: Path) -> None:
    dataset = open_dataset("tiny-imagenet", make_tiny(tmp_path))
    assert dataset.class_names == ["n01", "n02"] and dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert isinstance(dataset.test, FileImages)
    assert [path.name for path in dataset.test.files] == ["val_0.JPEG", "val_2.JPEG", "val_1.JPEG", "val_3.JPEG"]
    dataset.check()
    (tmp_path / "tiny-imagenet-200" / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn03\t0\t0\t1\t1\n")
    with pytest.raises(UserError, match="'n03', which has no folder"):
        open_dataset("tiny-imagenet", tmp_path)
    (tmp_path / "tiny-imagenet-200" / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\n\nval_1.JPEG n02\n")
    with pytest.raises(UserError, match=r"the line 'val_1\.JPEG n02', not FILE, tab, CLASS"):
        open_dataset("tiny-imagenet", tmp_path)
    with pytest.raises(UserError, match="data prepare tiny-imagenet"):
        open_dataset("tiny-imagenet", tmp_path / "elsewhere")


@pytest.mark.skipif(not (SHARED / "tiny-imagenet-32").exists(), reason="the sheets of Tiny-ImageNet are not here")
def test_sheets_of_tiny_imagenet(tmp_path: Path) -> None:
    source = SHARED / "tiny-imagenet-32"
    for sheet in [*sorted(source.glob("train-*.webp"))[:10], source / "val-00.webp"]:
        (tmp_path / sheet.name).symlink_to(sheet)
    dataset = open_dataset("tiny-imagenet-32", tmp_path)
    assert len(dataset.class_names) == 10 and dataset.train.image(0).shape == (3, 32, 32)
    assert np.bincount(dataset.train.labels).tolist() == [500] * 10
    assert np.bincount(dataset.test.labels).tolist() == [50] * 10
    (tmp_path / "val-00.webp").unlink()
    with pytest.raises(UserError, match="val sheet for every 10 classes"):
        open_dataset("tiny-imagenet-32", tmp_path)
    picture(0).save(tmp_path / "val-00.webp")
    with pytest.raises(UserError, match=r"val-00\.webp is not a sheet"):
        open_dataset("tiny-imagenet-32", tmp_path)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def test_fashion_mnist_from_idx_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = {
        part: rng.integers(0, 256, (count, 28, 28), dtype=np.uint8) for part, count in (("train", 20), ("t10k", 10))
    }
    for part, images in pixels.items():
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(len(images), dtype=np.uint8) % 10))
    dataset = open_dataset("fashion-mnist", tmp_path)
    assert dataset.train.image(3)[2].tolist() == pixels["train"][3].tolist() and dataset.test.labels[7] == 7
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels["t10k"]))[:-40])
    with pytest.raises(UserError, match=r"t10k-images-idx3-ubyte\.gz is damaged"):
        open_dataset("fashion-mnist", tmp_path)
    with pytest.raises(UserError, match="data prepare fashion-mnist"):
        open_dataset("fashion-mnist", tmp_path / "elsewhere")


def test_digits_are_no_fashion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of MNIST have the same names, sizes and counts: only their checksums tell."""
    for part in ("train", "t10k"):
        images, labels = np.zeros((10, 28, 28), dtype=np.uint8), np.arange(10, dtype=np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    monkeypatch.setitem(SOURCES, "fashion-mnist", replace(SOURCES["fashion-mnist"], counts=(10, 10, 10)))
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz is not .*move it away"):
        prepare("fashion-mnist", tmp_path)
    assert main(["data", "check", "fashion-mnist", "--root", str(tmp_path)]) == 1
    assert "4 files differ from the public data set" in capsys.readouterr().out
    public = SOURCES["fashion-mnist"].downloads
    held = [gzip.decompress((tmp_path / one.name).read_bytes()) for one in public]
    downloads = tuple(  # compressed otherwise than the public files, or not at all, the content counts
        replace(one, content=f"sha256:{hashlib.sha256(data).hexdigest()}")
        for one, data in zip(public, held, strict=True)
    )
    monkeypatch.setitem(SOURCES, "fashion-mnist", replace(SOURCES["fashion-mnist"], downloads=downloads))
    plain = tmp_path / "train-images-idx3-ubyte"
    plain.write_bytes(gzip.decompress((tmp_path / "train-images-idx3-ubyte.gz").read_bytes()))
    (tmp_path / "train-images-idx3-ubyte.gz").unlink()
    assert len(prepare("fashion-mnist", tmp_path).train.labels) == 10
    plain.write_bytes(plain.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="train-images-idx3-ubyte is not"):
        prepare("fashion-mnist", tmp_path)


# Manifests


def make_manifest(root: Path, text: str) -> Path:
    file = root / "my list.csv"
    file.write_text(text, encoding="utf-8")
    return file


ROWS = """path,label,split,task
train/ant/0.png,ant,train,b
train/bee/0.png,bee,train,a
"test/ant/0.png",ant,test,
test/bee/1.png,bee,test,a
"""


def test_a_manifest(tmp_path: Path) -> None:
    make_tree(tmp_path)
    dataset = open_dataset("manifest", make_manifest(tmp_path, "\ufeff" + ROWS))
    assert dataset.class_names == ["ant", "bee"] and dataset.tasks == [[1], [0]]
    assert tasks_of(dataset, "own") == ([1, 0], [[1], [0]])
    with pytest.raises(UserError, match="Each class of my list comes from only one domain"):
        domains_in_order(dataset)
    dataset.check()
    numbered = ROWS.replace("ant,t", "10,t").replace("bee,t", "9,t").replace(",task", "")
    dataset = open_dataset("manifest", make_manifest(tmp_path, numbered))
    assert dataset.class_names == ["9", "10"] and dataset.tasks is None  # numbers in their order
    with pytest.raises(UserError, match="defines no tasks: set"):
        tasks_of(dataset, "own")
    with pytest.raises(UserError, match="have a fixed order"):
        tasks_of(open_dataset("manifest", make_manifest(tmp_path, ROWS)), "own", "pilot")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("ant,test,", "ant,valid,"), "line 4: the split is 'valid'"),
        (("ant,train,b", "ant,train,b\n0.png,ant,train,a\n1.png,ant,train,"), "line 4: the class 'ant' is in several"),
        (("bee,test,a", ",test,a"), "line 5: the label is empty"),
        (("path,label", "file,label"), "no column 'path'"),
        (("bee,test,a", "ant,test,b"), "'bee' of manifest has no test images"),
        (("train/bee/0.png,bee,train,a\n", ""), "'bee' of manifest has no training images"),  # only in the test set
    ],
)
def test_wrong_manifests(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        open_dataset("manifest", make_manifest(tmp_path, ROWS.replace(*change)))


def test_manifests_that_are_none(tmp_path: Path) -> None:
    for root, sentence in ((tmp_path, "CSV or Parquet"), (tmp_path / "x.csv", "does not exist")):
        with pytest.raises(UserError, match=sentence):
            open_dataset("manifest", root)
    with pytest.raises(UserError, match="lists no images"):
        open_dataset("manifest", make_manifest(tmp_path, "path,label,split\n"))
    (tmp_path / "a.csv").write_bytes(b"path,label,split\n\xff\xfe,a,train\n")
    with pytest.raises(UserError, match="UTF-8"):
        open_dataset("manifest", tmp_path / "a.csv")


def test_a_library_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "list.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install pyarrow"):
        open_dataset("manifest", tmp_path / "list.parquet")
    with pytest.raises(UserError, match="pip install datasets"):
        open_dataset("huggingface", tmp_path)


def test_numbers_in_a_manifest_keep_their_order(tmp_path: Path) -> None:
    """Also where gaps made floats of them."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"path": "x.png", "label": float(c), "split": split, "task": {2: 10.0, 9: 9.0, 10: float("nan")}[c]}
        for c in (10, 9, 2)
        for split in ("train", "test")
    ]
    rows[0]["task"] = 1.0
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "list.parquet")
    dataset = open_dataset("manifest", tmp_path / "list.parquet")
    assert dataset.class_names == ["2", "9", "10"] and dataset.tasks == [[2], [1], [0]]
    assert manifest_module.in_order({"10", "-1", "2.5", "1e1"}) == ["-1", "2.5", "10", "1e1"]
    assert manifest_module.in_order({"10", "nan", "9"}) == ["10", "9", "nan"]


def test_a_parquet_manifest_of_pyarrow(tmp_path: Path) -> None:
    """With the library itself."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    make_tree(tmp_path)
    rows = [
        {"path": f"{split}/{name}/{i}.png", "label": name, "split": split, "task": task}
        for split in ("train", "test")
        for name, task in (("ant", 10.0), ("bee", 2.0))
        for i in range(2)
    ]
    file = tmp_path / "list.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), file)
    dataset = open_dataset("manifest", file)
    assert dataset.class_names == ["ant", "bee"] and dataset.tasks == [[1], [0]]
    dataset.check()
    table = arrow.Table.from_pylist([{**row, "label": ["ant", "bee"].index(row["label"])} for row in rows])
    parquet.write_table(table.drop_columns(["task"]), file)
    assert open_dataset("manifest", file).class_names == ["0", "1"]
    parquet.write_table(table.drop_columns(["split"]), file)
    with pytest.raises(UserError, match="no column 'split'"):
        open_dataset("manifest", file)
    for content in (b"", b"words", file.read_bytes()[:-20]):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"list\.parquet cannot be read as Parquet"):
            open_dataset("manifest", file)


# Hugging Face


@pytest.mark.parametrize(("labels", "names"), [([0, 1, 1], ["cat", "dog"]), (["cat", "dog", "dog"], None)])
def test_rows_of_hugging_face(labels: list[Any], names: list[str] | None) -> None:
    splits = {"train": Rows(labels, names), "test": Rows(labels[:2], names)}
    dataset = from_huggingface(splits)
    assert dataset.class_names == ["cat", "dog"] and dataset.train.labels.tolist() == [0, 1, 1]
    assert dataset.train.subset(np.array([2])).image(0).permute(1, 2, 0).tolist() == np.asarray(picture(2)).tolist()
    dataset.check()
    assert isinstance(dataset, DataSet) and dataset.limited(1).fingerprint() != dataset.fingerprint()
    with pytest.raises(UserError, match=r"no split 'validation'\. Known: train, test"):
        from_huggingface(splits, test="validation")
    with pytest.raises(UserError, match="no column 'img'"):
        from_huggingface(splits, image="img")
    splits["train"].labels = [*labels, None]
    with pytest.raises(UserError, match="label None, which is not a class"):
        from_huggingface(splits)


def test_rows_without_an_image_are_named_and_left_out_if_asked() -> None:
    class Bad(Rows):
        def __getitem__(self, key: Any) -> Any:
            if key == 1:
                raise UnidentifiedImageError("cannot identify image file <_io.BytesIO object at 0x7fa1>")
            return {"image": None, "label": 0} if key == 3 else super().__getitem__(key)

    splits = {"train": Bad([0, 0, 1, 0, 1], ["a", "b"]), "test": Rows([0, 1], ["a", "b"])}
    whole = from_huggingface(splits)
    with pytest.raises(UserError, match=r"^Row 1 has no readable image \(unknown image format\): remove"):
        whole.check()
    dataset = whole.without_bad()
    assert dataset.train.labels.tolist() == [0, 1, 1] and len(dataset.skipped) == 2
    assert dataset.skipped[0] == "train: row 1 has no readable image (unknown image format)"
    dataset.check()


def test_a_data_set_of_the_library_itself(tmp_path: Path) -> None:
    library = pytest.importorskip("datasets")
    names = ["cat", "dog"]
    features = library.Features({"image": library.Image(), "label": library.ClassLabel(names=names)})

    def rows(count: int, start: int) -> Any:
        images = [picture(start + i, (9, 7)) for i in range(count)]
        return library.Dataset.from_dict({"image": images, "label": [i % 2 for i in range(count)]}, features=features)

    splits = library.DatasetDict({"train": rows(6, 0), "test": rows(4, 50)})
    splits.save_to_disk(str(tmp_path / "saved"))
    for dataset in (from_huggingface(splits), open_dataset("huggingface", tmp_path / "saved")):
        assert dataset.class_names == names and dataset.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
        assert dataset.train.image(3).permute(1, 2, 0).tolist() == np.asarray(picture(3, (9, 7))).tolist()
        dataset.check()
    again = open_dataset("huggingface", tmp_path / "saved")
    assert again.fingerprint() == open_dataset("huggingface", tmp_path / "saved").fingerprint()
    (tmp_path / "empty").mkdir()
    splits["train"].save_to_disk(str(tmp_path / "one"))
    for folder, sentence in (("empty", "not written by `save_to_disk`"), ("one", "this is a single split")):
        with pytest.raises(UserError, match=sentence):
            open_dataset("huggingface", tmp_path / folder)
    streams = library.IterableDatasetDict({key: part.to_iterable_dataset() for key, part in splits.items()})
    with pytest.raises(UserError, match="without streaming"):
        from_huggingface(streams)
    bad = library.Dataset.from_dict({"image": [{"bytes": b"words", "path": None}], "label": [0]}, features=features)
    mixed = {"train": library.concatenate_datasets([splits["train"], bad]), "test": splits["test"]}
    found = from_huggingface(mixed).without_bad()
    assert found.skipped == ("train: row 6 has no readable image (unknown image format)",)


def test_names_are_known_without_pytorch() -> None:
    """So that a wrong one is refused at once."""
    code = """
import sys
import mambacl.data
from mambacl.errors import UserError
assert mambacl.data.list_datasets() == sorted(mambacl.data.SOURCES)
try:
    mambacl.data.DATASETS.check("cifar10")
except UserError as error:
    print(error, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("There is no data set 'cifar10'. Did you mean 'cifar100'?")
    assert done.stdout.endswith("False\n")
