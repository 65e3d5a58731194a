"""Which classes a run takes for which: counts by hand, and what a real run records."""

import json

import numpy as np
import pytest
from small_run import CONFIG

import mambacl
from mambacl.errors import UserError
from mambacl.training.confusion import Confusion, count_confusion, from_json, to_json
from mambacl.training.folder import RunFolder


def arrays(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int64) for row in rows]


def test_counts_and_examples_by_hand():
    # Labels 0 to 3 are the classes 7, 5, 9, 2: two tasks of two classes.
    first, second = arrays([0, 0, 1, 1, 1], [0, 2, 2, 2, 1]), arrays([2, 3], [2, 0])
    found = count_confusion([(first[0], first[1]), (second[0], second[1])], [7, 5, 9, 2])
    assert found.counts == {(2, 7): 1, (5, 5): 1, (5, 9): 2, (7, 7): 1, (7, 9): 1, (9, 9): 1}
    assert found.mistakes() == [((5, 9), 2), ((2, 7), 1), ((7, 9), 1)]
    assert found.examples == {(5, 9): [(0, 2), (0, 3)], (2, 7): [(1, 1)], (7, 9): [(0, 1)]}
    assert found.by_class() == {2: (0, 1), 5: (1, 3), 7: (1, 2), 9: (1, 1)}
    assert found.between_tasks([[7, 5], [9, 2]]).tolist() == [[2, 3], [1, 1]]
    assert from_json(json.loads(json.dumps(to_json(found)))) == found


@pytest.mark.usefixtures("few_test_images")
def test_a_run_records_what_its_counts_say(tmp_path):
    run = mambacl.train(CONFIG, method="analytic", classifier_options={"width": 50}, out=str(tmp_path / "run"))
    folder, results = RunFolder(run.folder), run.results
    last = len(results["tasks"]) - 1
    for after in (last - 1, last):
        found = folder.confusion(after)
        assert found is not None
        for j, classes in enumerate(results["tasks"][: after + 1]):
            right, images = np.array([found.by_class()[c] for c in classes]).sum(0)
            assert (right, images) == (results["correct"][after][j], results["total"][j])
    assert folder.confusion(0) is None  # only the last two are kept
    (folder.path / "confusion.json").write_text('{"after": {"2": {"pairs": [[1]]}}}')
    with pytest.raises(UserError, match=r"confusion\.json is damaged"):
        folder.confusion(2)


def test_no_test_images():
    empty = np.zeros(0, dtype=np.int64)
    assert count_confusion([(empty, empty)], [0, 1]) == Confusion({}, {})
