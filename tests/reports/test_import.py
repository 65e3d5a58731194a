"""Accuracy matrices of other tools: read as those tools write them, beside our runs; a sentence for a bad file."""

import json
import pickle
from pathlib import Path

import pytest

from mambacl.cli import main
from mambacl.errors import UserError
from mambacl.paper.comparison import compare_with_paper
from mambacl.reports import comparison_table, write_report
from mambacl.reports.importing import ImportedMatrix, import_records, read_matrices
from mambacl.reports.rendering import to_text

ROWS = ((0.9,), (0.6, 0.8), (0.8, 0.5, 0.9))
STAMP = "2024-05-01 10:00:00,000 [trainer.py] => "

PILOT = "\n".join(
    STAMP + line
    for line in (
        "prefix: reproduce", "dataset: cifar224", "model_name: ease", "seed: 1993", "All params: 1",
        "No NME accuracy.", "CNN: {'total': 90.0, '00-09': 90.0, 'old': 0, 'new': 90.0}", "CNN top1 curve: [90.0]",
        "CNN: {'total': np.float64(72.0), '00-09': np.float64(60.0), '10-19': np.float64(80.0), 'old': 1, 'new': 2}",
        "CNN top1 curve: [90.0, 72.0]",
        "CNN: {'total': 74.0, '00-09': 80.0, '10-19': 50.0, '20-29': 90.0, 'old': 65.0, 'new': 90.0}",
        "CNN top1 curve: [90.0, 72.0, 74.0]", "Forgetting (CNN): 20.0",
    )
)  # fmt: skip
MAMMOTH = (
    "{'dataset': 'seq-cifar100', 'model': 'der', 'lr': 0.03, 'seed': 7, 'device': device(type='cuda', index=0), "
    "'accmean_task1': 90.0, 'accuracy_1_task1': 90.0, 'accuracy_1_task2': np.float64(60.0), 'accuracy_2_task2': 80.0, "
    "'accuracy_1_task3': 80.0, 'accuracy_2_task3': 50.0, 'accuracy_3_task3': 90.0, 'forgetting': 20.0}\n"
)
AVALANCHE = "eval_exp,training_exp,eval_accuracy,eval_loss,forgetting\n" + "".join(
    f"{on},{after},{value:.4f},0.5,0\n"
    for after, row in enumerate(((0.9, 0.01, 0.0), (0.6, 0.8, 0.02), (0.8, 0.5, 0.9)))
    for on, value in enumerate(row)
)  # the whole test stream after each experience, as is usual


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def rows(matrix: ImportedMatrix) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(value, 9) for value in row) for row in matrix.rows)


@pytest.mark.parametrize(
    ("name", "text", "tool"),
    [
        ("reproduce_1993.log", PILOT, "PILOT"),
        ("logs.pyd", MAMMOTH, "Mammoth"),
        ("eval_results.csv", AVALANCHE, "Avalanche"),
        ("a.csv", "0.9\n0.6,0.8\n0.8,0.5,0.9\n", "CSV"),
        ("zeros.csv", "0.9,0,0\n0.6,0.8,0\n0.8,0.5,0.9\n", "CSV"),
        ("percent.csv", "90;;\n60;80;\n80;50;90\n", "CSV"),
        ("bom.csv", "\ufeff90 nan nan\n60 80 nan\n80 50 90\n", "CSV"),
        ("named.csv", "after,task 1,task 2,task 3\nfirst,0.9,,\nsecond,0.6,0.8,\nthird,0.8,0.5,0.9\n", "CSV"),
        ("pandas.csv", ",0,1,2\n0,0.9,,\n1,0.6,0.8,\n2,0.8,0.5,0.9\n", "CSV"),
        ("a.json", json.dumps(ROWS), "JSON"),
        ("b.json", json.dumps({"accuracy": [[90, None, None], [60, 80, None], [80, 50, 90]]}), "JSON"),
    ],
)
def test_each_format_gives_the_same_matrix(tmp_path: Path, name: str, text: str, tool: str) -> None:
    (matrix,) = read_matrices(write(tmp_path, name, text))
    assert rows(matrix) == ROWS and matrix.tool == tool


def test_what_the_tools_say_of_their_runs(tmp_path: Path) -> None:
    pilot, mammoth = import_records([write(tmp_path, "p.log", PILOT), write(tmp_path, "logs.pyd", MAMMOTH)])
    assert (pilot.method, pilot.benchmark, pilot.seed) == ("ease", "cifar100-3", 1993)
    assert (mammoth.method, mammoth.benchmark, mammoth.seed) == ("der", "cifar100-3", 7)
    assert mammoth.metric("final_accuracy_tasks") == pytest.approx(2.2 / 3)
    assert mammoth.metric("forgetting") == pytest.approx(0.2)
    assert mammoth.metric("final_accuracy_images") is None  # nobody says how many images a task has
    assert pilot.metric("final_accuracy_images") == pytest.approx(0.74)
    assert pilot.metric("average_incremental_accuracy") == pytest.approx((0.9 + 0.72 + 0.74) / 3)


def test_several_runs_in_one_file(tmp_path: Path) -> None:
    again = PILOT.replace("seed: 1993", "seed: 1994").replace("cifar224", "imagenetr")
    first, second = import_records([write(tmp_path, "two.log", f"{PILOT}\n{again}")])
    assert (first.benchmark, first.seed, second.seed) == ("cifar100-3", 1993, 1994)
    assert second.benchmark == "pilot-imagenetr-3"  # another split than the paper's
    assert len(read_matrices(write(tmp_path, "logs.pyd", MAMMOTH * 3))) == 3
    both = write(tmp_path, "both.json", json.dumps([{"accuracy": ROWS, "seed": 4}, {"accuracy": ROWS, "seed": 5}]))
    assert [record.seed for record in import_records([both], "x", "cifar100")] == [4, 5]


def test_groups_of_classes_from_a_hundred_on_are_in_their_order(tmp_path: Path) -> None:
    lines, values = [], {f"{20 * j:02}-{20 * j + 19:02}": 90.0 - j for j in range(7)}
    for t in range(7):
        seen = dict(sorted(list(values.items())[: t + 1]))  # as strings
        lines.append(f"{STAMP}CNN: { ({'total': 50.0} | seen)!r}")
    (matrix,) = read_matrices(write(tmp_path, "long.log", "\n".join(lines)))
    assert matrix.rows[-1] == pytest.approx([0.9, 0.89, 0.88, 0.87, 0.86, 0.85, 0.84])


def test_a_plain_file_can_say_all(tmp_path: Path) -> None:
    head = "# method: der\n# benchmark: mine\n# seed: 3\n# total: 10, 20, 30\n"
    (record,) = import_records([write(tmp_path, "a.csv", head + "90\n60,80\n80,50,90\n")])
    assert (record.method, record.benchmark, record.seed) == ("der", "mine", 3)
    assert record.metric("final_accuracy_images") == pytest.approx(0.75)
    small = write(tmp_path, "small.csv", "# unit: percent\n1\n0.5,1\n")
    assert read_matrices(small)[0].rows[1] == pytest.approx((0.005, 0.01))


def test_files_without_seeds_are_counted(tmp_path: Path) -> None:
    files = [write(tmp_path, f"{name}.csv", "90\n80,90\n") for name in "abc"]
    records = import_records(files, "der", "cifar100")
    assert [(record.seed, record.benchmark) for record in records] == [(s, "cifar100-2") for s in range(3)]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.csv", "", "has no accuracies"),
        ("a.csv", "0.9\n0.8,x\n", "line 2: 'x' is not a number"),
        ("a.csv", "0.9\n0.8\n", "lacks the accuracy on task 2 after task 2"),
        ("a.csv", "90\n80,190\n", "190 after task 2 is not an accuracy between 0 and 100"),
        ("a.csv", "0.9\n-0.8,0.9\n", "-0.8 after task 2 is not an accuracy"),
        ("a.csv", "0.9,0.6,0.8\n0,0.8,0.5\n0,0,0.9\n", "seems to be transposed"),
        ("a.csv", "# unit: points\n1\n", "the unit must be percent or fraction, got 'points'"),
        ("a.csv", "# seed: one\n1\n", "the seed must be a whole number"),
        ("a.csv", "# total: 5\n1\n1,1\n", "total must be the number of test images of each of the 2 tasks"),
        ("a.json", "[[0.9], [0.8", "is not valid JSON"),
        ("a.json", "{}", "has no matrix"),
        ("a.json", '[[0.9], ["high", 0.9]]', "row 2: 'high' is not a number"),
        ("eval_results.csv", AVALANCHE.replace("0.8000,0.5", "tensor,0.5"), "after '1' is not a result"),
        ("logs.pyd", MAMMOTH.replace("'accuracy_2_task3': 50.0, ", ""), "lacks the accuracy on task 2 after task 3"),
        ("p.log", PILOT.replace("'10-19': 50.0, ", ""), "PILOT reports 2 groups of classes after task 3"),
        ("p.log", PILOT.replace("'00-09': 90.0, ", ""), "PILOT reports 0 groups of classes after task 1"),
        ("a.npy", "", "may contain a pickle, which is never opened"),
    ],
)
def test_a_bad_file_gets_one_sentence(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        import_records([write(tmp_path, name, text)], benchmark="x")
    assert sentence in str(error.value) and "\n" not in str(error.value) and str(tmp_path / name) in str(error.value)


def test_nothing_is_unpickled_or_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "trapped",)  # type: ignore[return-value]

    for name in ("a.pkl", "logs.pyd", "a.csv"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
        with pytest.raises(UserError, match=r"is not text|never opened"):
            read_matrices(tmp_path / name)
    code = f"__import__('pathlib').Path({str(tmp_path / 'trapped')!r}).touch()"
    (matrix,) = read_matrices(write(tmp_path, "logs.pyd", MAMMOTH.replace("'lr': 0.03", f"'lr': {code}")))
    assert rows(matrix) == ROWS and not (tmp_path / "trapped").exists()


def test_where_and_of_what(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "90\n80,90\n")
    with pytest.raises(UserError, match=r"does not name its benchmark; add --import-benchmark, e\.g\. cifar100-2"):
        import_records([path])
    with pytest.raises(UserError, match="has 2 tasks, but cifar100-10 has 10"):
        import_records([path], benchmark="cifar100-10")
    with pytest.raises(UserError, match="does not exist"):
        import_records([tmp_path / "none.csv"])
    (tmp_path / "task-il").mkdir()
    with pytest.raises(UserError, match="task-incremental evaluation"):
        import_records([write(tmp_path / "task-il", "logs.pyd", MAMMOTH)])
    with pytest.raises(UserError, match="cannot be read"):
        import_records([tmp_path])


def test_beside_the_papers_rows(tmp_path: Path) -> None:
    matrix = [[90.0] * (t + 1) for t in range(10)]
    text = json.dumps({"accuracy": matrix, "method": "coda_prompt", "benchmark": "cifar100"})
    records = import_records([write(tmp_path, "a.json", text)])
    (found,) = (line for line in compare_with_paper("main", records).lines if line.ours)
    assert found.name == "CODA-Prompt" and found.state == "imported: JSON, seeds 0"
    assert found.difference(("cifar100-10", "accuracy")) == pytest.approx(90 - 86.25)


def test_in_the_comparison_and_its_page(tmp_path: Path) -> None:
    records = import_records([write(tmp_path, "p.log", PILOT), write(tmp_path, "logs.pyd", MAMMOTH)])
    text = to_text(comparison_table(records))
    assert "imported (PILOT)" in text and "73.3" in text and "imported from PILOT, Mammoth" in text
    assert "same number of images" not in text
    page = write_report([], None, records)
    assert page == tmp_path / "comparison" / "report.html" and "imported (PILOT)" in page.read_text(encoding="utf-8")


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write(tmp_path, f"{s}.csv", f"{90 + s}\n{80 + s},{90 + s}\n")) for s in range(2)]
    files = [word for path in paths for word in ("--import", path)]
    names = ["--import-method", "DER", "--import-benchmark", "mine"]
    assert main(["report", *files, *names, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "DER" in printed and "0, 1" in printed and "85.5 ± 0.7" in printed
    assert main(["report", "--table", "main", *files, *names, "--out", str(tmp_path / "out")]) == 0
    assert "85.50 ± 0.71" in capsys.readouterr().out and (tmp_path / "out" / "paper-main.html").is_file()
    assert main(["report", *files]) == 2
    assert "does not name its benchmark" in capsys.readouterr().err
