"""Class-, task- and domain-incremental: what an answer is chosen from, and streams whose tasks are domains."""

import copy
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from data_help import MEAN, STD, Rows
from domains_help import CLASSES, DOMAINS, make_domains, write_manifest
from PIL import Image
from reports_help import make_run
from safetensors.torch import load_file
from small_run import CONFIG, backbone_for
from tolerance import assert_counts_alike
from training_help import assert_same_run, interrupted_after

import mambacl
from mambacl.cli import main
from mambacl.config import resolve
from mambacl.data import (
    ArrayImages,
    DataSet,
    Domains,
    FileImages,
    Stream,
    StreamConfig,
    TransformConfig,
    Transforms,
    from_huggingface,
    open_data,
    open_dataset,
    open_stream,
    tasks_of,
)
from mambacl.data.sets import split_lists
from mambacl.errors import UserError
from mambacl.methods import METHODS
from mambacl.paper.comparison import benchmark_of
from mambacl.reports import load_run, write_report
from mambacl.reports.tables import comparison_table
from mambacl.scenarios import SCENARIOS, Scenario, right


def domain_config(root: Path, **stream: Any) -> StreamConfig:
    return StreamConfig(**{"dataset": "domain-folders", "root": str(root), "scenario": "domain", **stream})


def opened(config: StreamConfig, seed: int = 0) -> Stream:
    return open_stream(config, 16, MEAN, STD, seed=seed, workers=0)


# What is right


def test_the_scenarios_are_named_once() -> None:
    assert list(SCENARIOS) == list(get_args(Scenario))
    assert StreamConfig().scenario == "class" and resolve("demo", {}).stream.scenario == "class"


@pytest.mark.parametrize("seed", range(20))
def test_to_know_the_task_never_hurts(seed: int) -> None:
    """Of the same logits, each image that is right among all classes is right among those of its task."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, 4).tolist()
    logits = torch.from_numpy(rng.normal(size=(50, sum(sizes)))).round(decimals=int(seed % 2))  # with ties, too
    for task in range(4):
        labels = torch.from_numpy(rng.integers(sum(sizes[:task]), sum(sizes[: task + 1]), 50))
        among_all = right(logits, labels, "class", sizes, task)
        among_own = right(logits, labels, "task", sizes, task)
        assert (among_own >= among_all).all()
        masked = torch.full_like(logits, -torch.inf)
        own = slice(sum(sizes[:task]), sum(sizes[: task + 1]))
        masked[:, own] = logits[:, own]
        assert torch.equal(among_own, masked.argmax(1) == labels)


@pytest.mark.parametrize("seed", range(5))
def test_of_domains_the_largest_logit_of_a_class_speaks_for_it(seed: int) -> None:
    torch.manual_seed(seed)
    logits, classes = torch.randn(40, 3, 4), torch.randint(0, 4, (40,))
    expected = logits.max(dim=1).values.argmax(dim=1) == classes
    for task in range(3):
        found = right(logits.flatten(1), classes + 4 * task, "domain", [4, 4, 4], task)
        assert torch.equal(found, expected)


# Streams


@pytest.mark.parametrize("engine", ["torchvision", "batched"])
def test_every_domain_is_a_task_with_all_classes(tmp_path: Path, engine: str) -> None:
    make_domains(tmp_path, left_out=("train/noon/bee",))
    stream = opened(domain_config(tmp_path, transforms=TransformConfig(engine=engine)))  # type: ignore[arg-type]
    assert stream.tasks == [[0, 1, 2]] * 3 and stream.class_order == [0, 1, 2]
    said = stream.describe()
    assert said["scenario"] == "domain" and said["domains"] == list(DOMAINS)
    assert said["train"] == [24, 16, 24] and said["test"] == [12] * 3
    train, test = stream.dataset.train, stream.dataset.test
    assert isinstance(train, FileImages) and isinstance(test, FileImages)
    for task in range(3):
        assert stream.first_label(task) == 3 * task
        for batches, images, numbers in (
            (stream.plain_batches(task, 5), train, stream._train[task]),
            (stream.test_batches(task, 5), test, stream._test[task]),
        ):
            labels = [label for _, part in batches for label in part.tolist()]
            expected = [3 * task + CLASSES.index(images.files[i].parts[-2]) for i in numbers]
            assert labels == expected and {images.files[i].parts[-3] for i in numbers} == {DOMAINS[task]}
        shuffled = [label for _, part in stream.train_batches(task, 0, 5) for label in part.tolist()]
        assert len(shuffled) == said["train"][task] and {label // 3 for label in shuffled} == {task}


def test_domains_in_another_order(tmp_path: Path) -> None:
    make_domains(tmp_path / "data", train=2, test=1)
    natural = opened(domain_config(tmp_path / "data"))
    for order in ([2, 0, 1], str(tmp_path / "order.txt")):
        (tmp_path / "order.txt").write_text("rust\nnight\nnoon\n")
        stream = opened(domain_config(tmp_path / "data", order=order))
        assert stream.describe()["domains"] == ["rust", "night", "noon"]
        files = stream.dataset.test.files  # type: ignore[attr-defined]
        assert {files[i].parts[-3] for i in stream._test[0]} == {"rust"}
        assert stream.describe()["fingerprint"] != natural.describe()["fingerprint"]
    assert sorted(opened(domain_config(tmp_path / "data", order="pilot")).describe()["domains"]) == list(DOMAINS)


def test_images_are_limited_and_held_back_in_each_domain(tmp_path: Path) -> None:
    make_domains(tmp_path, train=10, test=1, left_out=("train/noon/bee",))
    stream = opened(domain_config(tmp_path, train_per_class=2, validation=0.3))
    assert stream.describe()["train"] == [6, 4, 6] and stream.describe()["test"] == [9, 6, 9]
    assert all("train" in path.parts for path in stream.dataset.test.files)  # type: ignore[attr-defined]
    plain = open_data(StreamConfig(dataset="domain-folders", root=str(tmp_path), train_per_class=2))
    assert np.bincount(plain.train.labels).tolist() == [2, 2, 2]  # without domains, of each class
    assert plain.domains is not None and len(plain.domains.train) == 6


def test_files_that_cannot_be_read_leave_their_domain(tmp_path: Path) -> None:
    make_domains(tmp_path, train=3, test=2)
    (tmp_path / "train" / "night" / "ant" / "1.png").write_bytes(b"")
    (tmp_path / "test" / "rust" / "cow" / "0.png").write_bytes(b"")
    stream = opened(domain_config(tmp_path, skip_bad=True))
    assert stream.describe()["train"] == [8, 9, 9] and stream.describe()["test"] == [6, 6, 5]
    assert len(stream.describe()["skipped"]) == 2


def test_a_manifest_whose_tasks_share_classes(tmp_path: Path) -> None:
    file = write_manifest(make_domains(tmp_path, train=3, test=2))
    config = domain_config(file, dataset="manifest")
    stream = opened(config)
    folders = opened(domain_config(tmp_path))
    for key in ("tasks", "domains", "train", "test", "class_names"):
        assert stream.describe()[key] == folders.describe()[key]
    before = stream.describe()["fingerprint"]
    rows = file.read_text().splitlines()
    swapped = [row[: -len("night")] + "noon" if row.startswith("train/night/ant/0") else row for row in rows]
    swapped = [row[: -len("noon")] + "night" if row.startswith("train/noon/ant/0") else row for row in swapped]
    file.write_text("\n".join(swapped))
    again = opened(config).describe()
    assert again["train"] == stream.describe()["train"] and again["fingerprint"] != before
    assert open_data(StreamConfig(dataset="manifest", root=str(file), tasks=3)).tasks is None  # the column is not used
    with pytest.raises(UserError, match=r"'ant' of list is in the tasks 'night' and 'noon': .*stream\.scenario"):
        opened(StreamConfig(dataset="manifest", root=str(file), own_tasks=True))


def test_the_domains_of_domainnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {
        f"{domain}_{split}.txt": [
            (f"{domain}/{name}/{domain}_{i}.jpg", label)
            for label, name in enumerate(("aircraft", "t-shirt"))
            for i in range(2)
            if (domain, split, name) != ("painting", "train", "t-shirt")  # as in the public list
        ]
        for domain in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
        for split in ("train", "test")
    }
    monkeypatch.setattr(split_lists, "read_list", lambda root, part, name: lists[part.name])
    dataset = open_dataset("domainnet-345", tmp_path)
    stream = Stream(dataset, Transforms(TransformConfig(), 8, MEAN, STD), 5, scenario="domain")
    assert stream.domains is not None and stream.domains.names[:3] == ["clipart", "infograph", "painting"]
    assert [stream.train_count(t) for t in range(6)] == [4, 4, 2, 4, 4, 4] and stream.test_counts() == [4] * 6
    assert len(Stream(dataset, Transforms(TransformConfig(), 8, MEAN, STD), 2).tasks) == 2  # as without domains


def test_domains_of_hugging_face() -> None:
    class WithDomains(Rows):
        def __init__(self, labels: list[int], domains: list[Any]) -> None:
            super().__init__(labels, ["cat", "dog"])
            self.domains = domains
            self.features["domain"] = object()

        def __getitem__(self, key: Any) -> Any:
            return self.domains if key == "domain" else super().__getitem__(key)

    splits = {"train": WithDomains([0, 1, 0], ["b", "a", "a"]), "test": WithDomains([0, 1], ["a", "b"])}
    domains = from_huggingface(splits).domains
    assert domains is not None and domains.names == ["a", "b"] and domains.train.tolist() == [1, 0, 0]
    splits["test"].domains[0] = None
    assert from_huggingface(splits).domains is None
    assert from_huggingface({"train": Rows([0, 1], None), "test": Rows([0, 1], None)}).domains is None


# Mistakes


def arrays(labels: list[int], domains: list[int] | None) -> DataSet:
    images = ArrayImages(np.zeros((len(labels), 4, 4), dtype=np.uint8), np.array(labels))
    own = None if domains is None else Domains(["x", "y"], np.array(domains), np.array(domains))
    return DataSet("mine", ["a", "b"], images, images, domains=own)


@pytest.mark.parametrize(
    ("labels", "domains", "sentence"),
    [
        ([0, 1], None, "mine defines no domains: use domainnet-345"),
        ([0, 1], [0, 1], "Each class of mine comes from only one domain"),
        ([0, 1], [1, 1], "The domain 'x' of mine has no training images"),
    ],
)
def test_data_without_usable_domains(labels: list[int], domains: list[int] | None, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Stream(arrays(labels, domains), Transforms(TransformConfig(), 4, MEAN, STD), 2, scenario="domain")
    with pytest.raises(UserError, match="mine defines no tasks: set"):
        tasks_of(arrays(labels, domains), "own")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"scenario": "tasks"}, "one of class, task, domain, few-shot, got 'tasks'"),
        ({"scenario": "domain", "first_task": 2}, r"remove (stream\.)?first_task and sizes in (stream\.)?tasks"),
        ({"scenario": "domain", "tasks": [2, 8]}, r"remove (stream\.)?first_task and sizes in (stream\.)?tasks"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        StreamConfig(**options)
    with pytest.raises(UserError):
        resolve("demo", {"stream": options})


def test_wrong_orders_of_domains_speak_of_domains(tmp_path: Path) -> None:
    make_domains(tmp_path / "data", train=1, test=1)
    (tmp_path / "order.txt").write_text("night\nmoon\nrust\n")
    for order, sentence in (
        ([0, 1], "A domain order must list each of the 3 domains, 0 to 2"),
        ("alphabet", "no domain order 'alphabet'"),
        (str(tmp_path / "order.txt"), "has 'moon', which is not a domain. Did you mean 'noon'"),
    ):
        with pytest.raises(UserError, match=sentence):
            opened(domain_config(tmp_path / "data", order=order))


def test_wrong_domain_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"folder .*train does not exist; the root must hold train/DOMAIN/CLASS"):
        open_dataset("domain-folders", tmp_path)
    for split in ("train", "test"):
        (tmp_path / split / "noon").mkdir(parents=True)
    with pytest.raises(UserError, match="has no class folders"):
        open_dataset("domain-folders", tmp_path)
    make_domains(tmp_path / "data", train=1, test=1, left_out=tuple(f"test/rust/{name}" for name in CLASSES))
    with pytest.raises(UserError, match="'rust' of data has no test images"):
        opened(domain_config(tmp_path / "data"))
    make_domains(tmp_path / "more", train=1, test=1, left_out=tuple(f"test/{domain}/bee" for domain in DOMAINS))
    with pytest.raises(UserError, match="'bee' of domain-folders has no test images"):
        opened(domain_config(tmp_path / "more"))


# Runs


def run_config(root: Path, **stream: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    own = {"dataset": "domain-folders", "root": str(root), "scenario": "domain", "transforms": {"image_size": 16}}
    return {**config, "name": "places", "stream": {**own, **stream}}


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "checkpoints" / "last.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("method.")}


SOME = ("analytic", "coda-prompt", "ease", "ewc", "icarl", "inflora", "lae", "mamba-cl", "sequential")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_domains(tmp_path_factory.mktemp("places"), left_out=("train/noon/bee",))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in SOME else pytest.mark.long) for name in METHODS.names()]
)
def test_a_run_over_domains_resumes_as_if_uninterrupted(method: str, places: Path, tmp_path: Path) -> None:
    config, kind = {**run_config(places), **backbone_for(method)}, METHODS.get(method)
    trains = kind.trains and not kind.first_task_only
    config |= {"classifier_options": {"width": 100}} if kind.own_classifier == "ridge" else {}
    whole = mambacl.train(config, method=method, out=str(tmp_path / "whole"))
    assert whole.results["scenario"] == "domain" and whole.results["domains"] == list(DOMAINS)
    assert whole.results["tasks"] == [[0, 1, 2]] * 3 and whole.results["total"] == [12] * 3
    with interrupted_after(6 if trains else 2):
        mambacl.train(config, method=method, out=str(tmp_path / "broken"))
    mambacl.resume(tmp_path / "broken")
    assert_same_run(whole.folder, tmp_path / "broken")
    evaluation = mambacl.evaluate(whole.folder, batch_size=7)
    assert_counts_alike(evaluation.counted, evaluation.recorded)
    assert evaluation.scenario == "domain"


@pytest.mark.slow
def test_domains_are_learned(places: Path, tmp_path: Path) -> None:
    """Far above the third that guessing has, with the domain known or not."""
    config = run_config(places)
    run = mambacl.train(config, out=str(tmp_path / "run"), training={"passes": 12, "decay_after": [8]})
    assert run.metrics["final_accuracy_tasks"] > 0.6
    known = mambacl.evaluate(run.folder, scenario="task")
    assert sum(known.counted) > 0.6 * 36 and known.recorded == run.results["correct"][-1]
    with pytest.raises(UserError, match="with the scenarios task and domain, not 'class'"):
        mambacl.evaluate(run.folder, scenario="class")


@pytest.mark.slow
def test_the_scenario_task_trains_the_same_and_counts_at_least_as_many(tmp_path: Path, capsys: Any) -> None:
    by_class = mambacl.train(CONFIG, out=str(tmp_path / "class"))
    by_task = mambacl.train(CONFIG, out=str(tmp_path / "task"), stream={"scenario": "task"})
    one, other = parameters(by_class.folder), parameters(by_task.folder)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert by_task.results["tasks"] == by_class.results["tasks"]
    rows = list(zip(by_class.results["correct"], by_task.results["correct"], strict=True))
    assert all(low <= high for row in rows for low, high in zip(*row, strict=True))
    assert sum(rows[-1][1]) > sum(rows[-1][0])
    assert by_task.results["scenario"] == "task" and by_class.results["scenario"] == "class"
    assert json.loads((by_task.folder / "stream.json").read_text())["scenario"] == "task"
    assert "scenario" not in json.loads((by_class.folder / "stream.json").read_text())  # as before there were others
    for run, other_run, scenario in ((by_class, by_task, "task"), (by_task, by_class, "class")):
        again = mambacl.evaluate(run.folder, scenario=scenario)  # type: ignore[arg-type]
        assert again.counted == other_run.results["correct"][-1] and again.recorded == run.results["correct"][-1]
    with pytest.raises(UserError, match=r"train another run with --stream\.scenario domain"):
        mambacl.evaluate(by_class.folder, scenario="domain")
    with pytest.raises(UserError, match=r"differs in stream\.scenario"):
        mambacl.train(CONFIG, out=str(by_class.folder), stream={"scenario": "task"})
    assert main(["evaluate", str(by_class.folder), "--scenario", "task"]) == 0
    printed = capsys.readouterr().out
    assert "These counts are task-incremental; the run recorded" in printed and "class-incremental" in printed
    assert main(["evaluate", str(by_class.folder), "--scenario", "tusk"]) == 2
    check_reports(by_class.folder, by_task.folder, tmp_path)


def check_reports(by_class: Path, by_task: Path, tmp_path: Path) -> None:
    page = write_report([by_task]).read_text()
    assert "task-incremental" in page and "is told the task of each image" in page
    usual = write_report([by_class]).read_text()
    assert "class-incremental" in usual and "chooses among all classes seen" in usual
    records = [load_run(by_class), load_run(by_task)]
    assert [record.benchmark for record in records] == ["small", "small, task-incremental"]
    table = comparison_table(records)
    assert table.columns[1].title == "benchmark" and not any(column.best for column in table.columns)
    assert any(note.startswith("task-incremental: the model is told") for note in table.notes)
    compared = write_report([by_class, by_task], tmp_path / "compared").read_text()
    assert "Highest final accuracy" not in compared  # figures of two scenarios do not compete


def test_beside_the_paper_another_scenario_has_a_column_of_its_own(tmp_path: Path) -> None:
    config = {"stream": {"dataset": "cifar100", "scenario": "task"}}
    path = make_run(tmp_path / "run", [[90], [80, 45]], [100, 50], config=config, scenario="task")
    assert benchmark_of(load_run(path)).endswith(", task-incremental")
    for changes, sentence in (
        ({"scenario": "x"}, "'scenario' is not one of"),
        ({"domains": ["a"]}, "'domains' does not"),
    ):
        damaged = make_run(tmp_path / sentence[1:5], [[90], [80, 45]], [100, 50], **changes)
        with pytest.raises(UserError, match=sentence):
            load_run(damaged)


def test_the_page_of_a_run_over_domains(places: Path, tmp_path: Path) -> None:
    run = mambacl.train(run_config(places), method="frozen", out=str(tmp_path / "run"))
    page = write_report([run.folder]).read_text()
    assert "Domains by task" in page and "domain-incremental" in page and "<li>noon</li>" in page
    assert "classes <b>3</b>" in page and "Classes, which all tasks share" in page
    stream = json.loads((run.folder / "stream.json").read_text())
    assert stream["domains"] == list(DOMAINS) and stream["scenario"] == "domain"


def test_changed_domains_are_noticed(places: Path, tmp_path: Path) -> None:
    file = write_manifest(make_domains(tmp_path / "data", train=2, test=1))
    config = run_config(file, dataset="manifest")
    run = mambacl.train(config, method="frozen", out=str(tmp_path / "run"))
    text = file.read_text().replace("train/rust/ant/0.png,ant,train,rust", "train/rust/ant/0.png,ant,train,noon")
    file.write_text(text.replace("train/noon/ant/0.png,ant,train,noon", "train/noon/ant/0.png,ant,train,rust"))
    with pytest.raises(UserError, match="differs in fingerprint"):
        mambacl.evaluate(run.folder)


def test_domains_are_shown_and_checked(places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tasks.png"
    assert main(["data", "show", "demo", "--scenario", "domain"]) == 2
    assert "defines no domains" in capsys.readouterr().err
    options = ["domain-folders", "--root", str(places), "--scenario", "domain", "--order", "pilot"]
    assert main(["data", "show", *options, "--out", str(out), "--images", "3"]) == 0
    printed = capsys.readouterr().out
    assert "3 classes in each of 3 domains" in printed and "noon: 2 classes, 16 + 8 images" in printed
    assert "domain-incremental: the model chooses among the classes" in printed
    with Image.open(out) as image:
        assert image.size[1] > 3 * 64
    assert main(["data", "check", "domain-folders", "--root", str(places)]) == 0
    printed = capsys.readouterr().out
    assert "domain 0:      24 training and      12 test images of night" in printed and "task" not in printed
    assert main(["data", "check", *options, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["domains"]
    assert set(found) == set(DOMAINS) and found["noon"] == [16, 12]


def test_a_run_is_called_after_the_folder_of_its_images(tmp_path: Path) -> None:
    stream = {"dataset": "domain-folders", "root": str(tmp_path / "places"), "scenario": "domain"}
    assert resolve(None, {"stream": stream}).name == "places"
