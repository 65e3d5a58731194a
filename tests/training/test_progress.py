"""Time left, what is shown of a run, and where."""

import json
import logging
from pathlib import Path

import pytest
from small_run import CONFIG

import mambacl
from mambacl.log import logger
from mambacl.training.display import FIRST, LATER, Lines, Live, ProgressFile, make_view
from mambacl.training.folder import RunFolder
from mambacl.training.progress import COST, Progress, State, seconds_left


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Kept:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.texts: list[str] = []

    def show(self, state: State) -> None:
        self.states.append(State(**vars(state)))

    def line(self, text: str, task: bool) -> None:
        self.texts.append(text)

    def close(self) -> None:
        """Nothing to close."""


def test_each_phase_is_estimated_at_its_own_speed() -> None:
    done, seconds = {"train": 10.0, "evaluate": 20.0}, {"train": 30.0, "evaluate": 5.0}
    assert seconds_left({"train": 2, "evaluate": 8}, done, seconds) == 2 * 3.0 + 8 * 0.25
    assert seconds_left({"train": -1.0}, done, seconds) == 0.0
    assert seconds_left({"train": 2}, {}, {}) is None


def test_a_phase_that_was_not_measured_is_estimated_by_its_cost() -> None:
    expected = 7 * COST["evaluate"] * 30.0 / (10 * COST["train"])
    assert seconds_left({"evaluate": 7}, {"train": 10.0}, {"train": 30.0}) == pytest.approx(expected)


def test_batches_are_counted_and_can_be_read_twice() -> None:
    clock, kept = Clock(), Kept()
    progress = Progress("m", {"covariance": 12, "evaluate": 6}, clock)
    progress.views = [kept]
    progress.phase("covariance", "consolidating", 12, task=2, tasks=3)
    assert kept.states[-1].place() == "task 2/3 consolidating 0/12" and kept.states[-1].left is None
    batches = progress.over([([0] * 4, [0] * 4)] * 3)
    assert len(batches) == 3
    for _ in batches:
        clock.now += 1.0
    last = kept.states[-1]
    assert last.done == last.of == 12 and last.phase == "decomposing"
    assert last.left == pytest.approx(6 * 3.0 / 12 / COST["covariance"]) and last.elapsed == 3.0
    assert len(list(batches)) == 3


def test_work_with_a_deadline_has_the_time_until_then() -> None:
    view, progress = Kept(), Progress("", {"train": 100}, clock=Clock())
    progress.views, progress.deadline = [view], lambda: 42.0
    progress.phase("train", "training", of=10, epoch=3)
    progress.line("epoch 3")
    assert view.states[-1].left == 42.0 and view.states[-1].place() == "epoch 3 training 0/10"
    assert view.texts == ["epoch 3  0:42 left"]


def test_a_bar_shows_a_share_only_if_the_rest_is_known() -> None:
    assert State(elapsed=30.0, left=10.0).share() == 0.75
    assert State(elapsed=30.0).share() == 0.0


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_a_bar_keeps_to_one_line(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    live = Live("mamba-cl")
    try:
        live.show(State("", "training", 3, 10, 2, 20, 640, 2500, 0.1234, 0.87, elapsed=4000, left=12000))
        with live.bars.console.capture() as shown:
            live.bars.console.print(live.bars.make_tasks_table(live.bars.tasks))
    finally:
        live.close()
    [line] = shown.get().splitlines()
    assert "25%" in line and "1:06:40, 3:20:00 left task 3/10" in line
    assert ("loss 0.1234 accuracy 87.0%" in line) == (columns == 140)


def test_a_log_file_gets_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    lines = Lines("m", clock)
    state = State(
        phase="training", task=1, tasks=2, epoch=1, epochs=3, done=5, of=10, loss=0.5, accuracy=0.25, left=61.0
    )
    with caplog.at_level(logging.INFO, "mambacl"):
        for _ in range(int(FIRST + 2 * LATER) * 2):
            clock.now += 0.5
            lines.show(state)
    text = "m: task 1/2 epoch 1/3 training 5/10  loss 0.5000 accuracy 25.0%  1:01 left"
    assert caplog.messages == [text] * 3


def test_a_quiet_log_has_no_bar_and_no_lines() -> None:
    level = logger.level
    try:
        assert make_view("m") is not None
        logger.setLevel(logging.WARNING)
        assert make_view("m") is None
    finally:
        logger.setLevel(level)


def test_a_full_disk_does_not_stop_the_run_and_the_file_is_written_once_per_second() -> None:
    clock, written = Clock(), []

    def write(content: object) -> None:
        written.append(content)
        raise OSError(28, "No space left on device")

    file = ProgressFile(write, clock)
    for _ in range(5):
        file.show(State())
        clock.now += 0.4
    assert len(written) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
@pytest.mark.parametrize("method", ["mamba-cl", "analytic"])
def test_the_estimated_work_is_what_a_run_does(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Progress] = []
    step = Progress.step

    def noted(self: Progress, images: int) -> None:
        if self not in seen:
            seen.append(self)
        step(self, images)

    monkeypatch.setattr(Progress, "step", noted)
    monkeypatch.setattr("mambacl.training.display.WRITTEN", 0)  # seconds: the run is short
    options = {"classifier": "lda"} if method == "mamba-cl" else {"classifier_options.width": 50}
    mambacl.train(CONFIG, method=method, out=str(tmp_path / "run"), **options)
    assert len(seen) == 1 and seen[0].left == dict.fromkeys(COST, 0.0)
    worked = {"train", "covariance", "classifier", "evaluate"} if method == "mamba-cl" else {"classifier", "evaluate"}
    assert set(seen[0].done) == worked == set(seen[0].seconds)
    written = RunFolder(tmp_path / "run").progress()
    assert written["tasks"] == 3 and written["memory"] > 0 and json.dumps(written)
