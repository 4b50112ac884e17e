"""Evaluation points: how they are written in a job file, and when a job reaches them."""

from __future__ import annotations

import pytest

from vcasgd.learning.evaluation import EvaluationPoints, points_for
from vcasgd.learning.subtasks import EpochPlan
from vcasgd.spec.sections import Evaluate, parse_interval, place_of

#: Two epochs of 100 samples, of which the second is cut short.
PLAN = EpochPlan(100, 4, 2, seed=0, total_samples=150)


@pytest.mark.parametrize(
    ("text", "unit", "count"),
    [
        ("epoch", "epoch", 1),
        ("1 step", "step", 1),
        ("20steps", "step", 20),
        (" 100000 samples ", "sample", 100_000),
        ("1 sample", "sample", 1),
        ("10m", "second", 600),
        ("1.5h", "second", 5400),
        ("30 s", "second", 30),
    ],
)
def test_an_interval_has_a_unit(text: str, unit: str, count: float) -> None:
    interval = parse_interval(text)

    assert (interval.unit, interval.count) == (unit, count)
    assert Evaluate(every=text).interval == interval
    assert Evaluate().interval == parse_interval("epoch")


def points(every: str, batch_size: int = 8) -> EvaluationPoints:
    return points_for(Evaluate(every=every), PLAN, batch_size)


@pytest.mark.parametrize(
    ("every", "last"),
    [("epoch", 2), ("40 samples", 150), ("5 steps", 150), ("75 samples", 150), ("10m", 150)],
)
def test_the_last_point_is_the_end_of_the_job(every: str, last: int) -> None:
    assert points(every).last == last
    assert points(every).reached(finished_epochs=2, samples=150) == last
    assert points(every).samples_at(last) == 150


@pytest.mark.parametrize(
    ("every", "finished", "samples", "reached"),
    [
        ("epoch", 0, 99, 0),
        # A part of the second epoch can be applied before the first is finished.
        ("epoch", 0, 120, 0),
        ("epoch", 1, 120, 1),
        ("40 samples", 0, 39, 0),
        ("40 samples", 0, 40, 40),
        # An update that passes several points reaches the newest of them.
        ("40 samples", 1, 125, 120),
        ("5 steps", 0, 39, 0),
        ("5 steps", 0, 41, 40),
        ("1000 steps", 1, 149, 0),
        ("10m", 1, 149, 0),
    ],
)
def test_a_point_is_reached_by_progress(
    every: str, finished: int, samples: int, reached: int
) -> None:
    assert points(every).reached(finished, samples) == reached


@pytest.mark.parametrize(("every", "pin"), [("epoch", "epoch-40"), ("5 steps", "samples-40")])
def test_a_pin_names_its_point(every: str, pin: str) -> None:
    found = points(every)

    assert found.pin(40) == pin
    assert found.number_of(pin) == 40
    others = ("periodic", "test", "epoch-", "samples-x", "samples--1", "other-40")
    assert [found.number_of(other) for other in others] == [None] * len(others)


@pytest.mark.parametrize(
    ("epoch", "step", "place"),
    [
        (3.0, 120, "epoch 3"),
        (3.0, None, "epoch 3"),
        (2.4666, 98, "epoch 2.47, step 98"),
        (2.4666, None, "epoch 2.47"),
        (0.0001, 5, "epoch 0.00, step 5"),
    ],
)
def test_the_place_of_an_evaluation(epoch: float, step: int | None, place: str) -> None:
    assert place_of(epoch, step) == place
