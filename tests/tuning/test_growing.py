"""Rows that grow with the tasks, and random choices for the images of an epoch."""

import pytest
import torch

from mambacl.tuning.draws import COUNT, Draws
from mambacl.tuning.growing_rows import GrowingRows


def test_rows_of_earlier_tasks_are_fixed():
    rows = GrowingRows(2, 3)
    rows.start(torch.ones(1, 2, 3))
    rows.start(rows.current)  # a copy: it trains apart
    with torch.no_grad():
        rows.current += 1
    assert [p is rows.current for p in rows.parameters()] == [True]
    assert rows.rows()[:, 0, 0].tolist() == [1.0, 2.0]
    rows.extend(torch.zeros(2, 2, 3))
    assert rows.current.shape == (3, 2, 3) and rows.rows()[:, 0, 0].tolist() == [1.0, 2.0, 0.0, 0.0]
    assert rows.current.requires_grad and not rows.earlier.requires_grad


def test_rows_take_up_a_state_of_any_length_but_not_of_any_width():
    rows, other = GrowingRows(4), GrowingRows(4)
    for count in (2, 3):
        rows.start(torch.randn(count, 4))
    other.load_state_dict(rows.state_dict())
    assert torch.equal(other.rows(), rows.rows()) and len(other.earlier) == 2
    with pytest.raises(RuntimeError, match="size mismatch"):
        GrowingRows(5).load_state_dict(rows.state_dict())


def test_draws_are_even_and_start_again_with_the_epoch():
    draws = Draws(torch.device("cpu"))
    draws.restart(0, 1, 2)
    first = torch.cat([draws.below(3, 1000) for _ in range(9)])
    counts = first.bincount(minlength=3)
    assert len(counts) == 3 and (counts - 3000).abs().max() < 5 * (9000 * 2 / 9) ** 0.5  # five standard deviations
    draws.restart(0, 1, 2)
    assert torch.equal(draws.below(3, 9000), first)
    for seeds in ((1, 1, 2), (0, 2, 2), (0, 1, 3)):
        draws.restart(*seeds)
        assert not torch.equal(draws.below(3, 9000), first)


def test_draws_go_round():
    draws = Draws(torch.device("cpu"))
    draws.restart(0)
    whole = draws.below(1000, COUNT)
    assert torch.equal(draws.below(1000, 10), whole[:10])
