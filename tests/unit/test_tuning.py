"""Decisions of self-tuning, on invented measurements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vcasgd.learning.rates import Rates
from vcasgd.learning.tuning import (
    Load,
    Momenta,
    Trial,
    explicit_momentum,
    factor_after,
    fewer,
    implicit_momentum,
    local_steps,
    next_trial,
    room_for,
    shares_by_speed,
    smoothed_momentum,
)
from vcasgd.task.place import Place
from vcasgd.task.task import Task

# --- local steps ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "before", "shares"),
    [
        ({}, {}, {}),
        ({"a": 0.1}, {}, {"a": 1.0}),
        # H·t_min/t
        ({"a": 0.1, "b": 0.2, "c": 0.4}, {}, {"a": 1.0, "b": 0.5, "c": 0.25}),
        # a small difference in speed is ignored
        ({"a": 0.1, "b": 0.11}, {}, {"a": 1.0, "b": 1.0}),
        # a share changes only for a large difference
        ({"a": 0.1, "b": 0.22}, {"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.5}),
        ({"a": 0.1, "b": 0.25}, {"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.4}),
        # a slow worker that is the only one left gets the whole interval
        ({"b": 0.4}, {"b": 0.25}, {"b": 1.0}),
        # the slowest worker still gets the smallest share
        ({"a": 0.001, "b": 100.0}, {}, {"a": 1.0, "b": 1 / 16}),
        # an invalid duration leaves the worker out
        (
            {"a": 0.1, "b": math.nan, "c": 0.0, "d": -1.0, "e": math.inf, "f": 0.2},
            {},
            {"a": 1.0, "f": 0.5},
        ),
    ],
)
def test_slower_workers_get_smaller_shares(
    seconds: dict[str, float], before: dict[str, float], shares: dict[str, float]
) -> None:
    assert shares_by_speed(seconds, before) == pytest.approx(shares)


@given(st.dictionaries(st.text(max_size=3), st.floats(1e-6, 1e3), min_size=1))
def test_the_fastest_worker_gets_the_whole_interval(seconds: dict[str, float]) -> None:
    shares = shares_by_speed(seconds, {})

    assert shares.keys() == seconds.keys()
    assert all(1 / 16 <= share <= 1 for share in shares.values())
    assert shares[min(seconds, key=lambda name: seconds[name])] == 1
    # the same measurement again changes nothing
    assert shares_by_speed(seconds, shares) == shares


@pytest.mark.parametrize(
    ("interval", "share", "steps"),
    [(20, 1.0, 20), (20, 0.5, 10), (20, 0.26, 5), (4, 1 / 16, 1), (1, 0.5, 1), (20, 7.0, 20)],
)
def test_shares_of_intervals(interval: int, share: float, steps: int) -> None:
    assert local_steps(interval, share) == steps


# --- momentum -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("staleness", "momentum"), [(0.0, 0.0), (1.0, 0.5), (3.0, 0.75), (9.0, 0.9), (-1.0, 0.0)]
)
def test_asynchrony_acts_like_momentum(staleness: float, momentum: float) -> None:
    assert implicit_momentum(staleness) == pytest.approx(momentum)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_staleness_reveals_the_number_of_workers_at_any_speed(rates: list[float]) -> None:
    # between two updates of a worker, each other one makes r_other / r_own; weighted by own rate
    mean = sum(own * (sum(rates) - own) / own for own in rates) / sum(rates)

    assert implicit_momentum(mean) == pytest.approx(1 - 1 / len(rates))


@pytest.mark.parametrize(
    ("given_momentum", "asynchrony", "left"),
    [
        (0.9, 0.0, 0.9),
        (0.9, 0.5, 0.4),
        (0.9, 0.75, 0.15),
        (0.5, 0.75, 0.001),
        (0.0005, 0.9, 0.0005),
    ],
)
def test_both_momenta_add_up_to_the_users(
    given_momentum: float, asynchrony: float, left: float
) -> None:
    assert explicit_momentum(given_momentum, asynchrony) == pytest.approx(left)


@pytest.mark.parametrize(
    ("estimate", "before", "after"), [(0.52, 0.5, 0.5), (0.6, 0.5, 0.6), (0.0, 0.5, 0.0)]
)
def test_estimates_ignore_small_changes(estimate: float, before: float, after: float) -> None:
    assert smoothed_momentum(estimate, before) == after


def groups() -> list[dict[str, Any]]:
    return [
        {"params": [torch.nn.Parameter(torch.zeros(1))]},
        {"params": [torch.nn.Parameter(torch.zeros(1))], "momentum": 0.5},
    ]


def test_each_group_starts_from_its_own_momentum() -> None:
    optimizer = torch.optim.SGD(groups(), lr=0.1, momentum=0.9, nesterov=True)
    momenta = Momenta(optimizer)

    # always relative to the user's value, not to the previous one
    for asynchrony in (0.75, 0.25):
        first = momenta.follow(asynchrony)

    assert first == pytest.approx(0.65)
    assert [group["momentum"] for group in optimizer.param_groups] == pytest.approx([0.65, 0.25])
    momenta.follow(0.0)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.5]


def test_the_length_of_a_step_stays_constant() -> None:
    optimizer = torch.optim.SGD(groups(), lr=0.1, momentum=0.9)
    momenta = Momenta(optimizer)
    rates = Rates(Task(), optimizer, momenta.correction)

    momenta.follow(0.25)
    for _ in range(2):
        rates.follow(Place(0.5))

    first, second = optimizer.param_groups
    assert first["lr"] / (1 - first["momentum"]) == pytest.approx(0.1 / (1 - 0.9))
    assert second["lr"] / (1 - second["momentum"]) == pytest.approx(0.1 / (1 - 0.5))
    momenta.follow(0.0)
    rates.follow(Place(0.5))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


def test_adams_first_beta_is_a_momentum_that_needs_no_correction() -> None:
    optimizer = torch.optim.AdamW(groups()[:1], betas=(0.9, 0.99))
    momenta = Momenta(optimizer)

    assert momenta.follow(0.5) == pytest.approx(0.4)
    assert optimizer.param_groups[0]["betas"] == (pytest.approx(0.4), 0.99)
    assert momenta.correction(optimizer.param_groups[0]) == 1


@pytest.mark.parametrize("given_momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_momentum_can_drop_and_return(kind: Any, given_momentum: float) -> None:
    (group, *_) = groups()
    optimizer = kind([group["params"][0]], lr=0.1, momentum=given_momentum)
    momenta = Momenta(optimizer)

    assert Momenta(torch.optim.Adagrad(groups()[:1])).follow(0.5) is None
    for asynchrony in (0.95, 0.0, 0.5):
        assert (momenta.follow(asynchrony) is None) is (given_momentum == 0)
        group["params"][0].grad = torch.ones(1)
        optimizer.step()

    assert bool(torch.isfinite(group["params"][0]).all())


# --- mixing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("qualities", "factor"),
    [
        ([], 1.0),
        ([0.5, 0.6, 0.7], 1.0),
        # a single worse evaluation is noise
        ([0.5, 0.4, 0.6], 1.0),
        ([0.5, 0.4, 0.45], 0.5),
        ([0.5, 0.4, 0.5, 0.45], 0.5),  # equal to the best is neither worse nor better
        ([0.5, 0.4, 0.4, 0.4, 0.4], 0.25),
        # each new best evaluation undoes half a reduction
        ([0.5, 0.4, 0.4, 0.6], 2**-0.5),
        ([0.5, 0.4, 0.4, 0.6, 0.7, 0.8], 1.0),
        ([0.5, math.nan, math.inf], 0.5),
        ([math.nan, -math.inf, 0.5], 2**-0.5),
        ([0.9, *[0.1] * 40], 1 / 16),
    ],
)
def test_updates_get_less_weight_while_validation_worsens(
    qualities: list[float], factor: float
) -> None:
    assert factor_after(qualities) == pytest.approx(factor)


@given(st.lists(st.floats(), max_size=60))
def test_the_factor_is_bounded_for_all_evaluations(qualities: list[float]) -> None:
    assert 1 / 16 <= factor_after(qualities) <= 1


# --- learners -------------------------------------------------------------------------------

NOW, REST = 1000.0, 600.0


def load(rate: float, room: int = 9, cores: int = 8) -> Load:
    return Load(rate, room, cores)


@pytest.mark.parametrize(
    ("trial", "measured", "most", "learners"),
    [
        # a second learner is always tried, further ones while they help
        (Trial(), load(10), 4, 2),
        (Trial(2, {1: 10}), load(15), 4, 3),
        (Trial(2, {1: 10}), load(11.1), 4, 3),
        # a gain of a tenth is not enough
        (Trial(2, {1: 10}), load(11), 4, 1),
        (Trial(3, {2: 15}), load(15.5), 4, 2),
        # never more than the job, the processors, and the memory allow
        (Trial(2, {1: 10}), load(20), 2, 2),
        (Trial(2, {1: 10}), load(20, cores=2), 4, 2),
        (Trial(), load(10, room=0), 4, 1),
        (Trial(), load(10, cores=1), 4, 1),
        # memory became short
        (Trial(3, {2: 10}), load(20, room=-1), 4, 2),
        (Trial(1), load(20, room=-5), 4, 1),
        # a number that did not help is not tried again for a while
        (Trial(1, {1: 10}, closed_until=NOW + 1), load(10), 4, 1),
        (Trial(1, {1: 10}, closed_until=NOW), load(10), 4, 2),
    ],
)
def test_learners_are_added_while_they_help(
    trial: Trial, measured: Load, most: int, learners: int
) -> None:
    assert next_trial(trial, measured, most, NOW, REST).learners == learners


def test_a_crash_removes_a_learner_but_never_the_last() -> None:
    trial = fewer(Trial(3, {1: 10.0, 2: 15.0}), NOW, REST)

    assert trial == Trial(2, {1: 10.0, 2: 15.0}, NOW + REST)
    assert fewer(Trial(1), NOW, REST).learners == 1


@given(
    st.lists(st.floats(0.1, 1000), min_size=1, max_size=6),
    st.integers(-3, 6),
    st.integers(1, 6),
)
def test_the_number_of_learners_stays_within_bounds(
    rates: list[float], room: int, cores: int
) -> None:
    trial = Trial()
    for now in range(30):
        before = trial.learners
        measured = Load(rates[before - 1], room, cores)
        trial = next_trial(trial, measured, len(rates), float(now), REST)
        assert 1 <= trial.learners <= len(rates)
        assert trial.learners <= max(before, cores)


@pytest.mark.parametrize(
    ("available", "total", "own", "room"),
    [(50, 100, 10, 4), (50, 100, 40, 1), (15, 100, 10, 0), (5, 100, 10, -1), (50, 100, 0, 40)],
)
def test_a_tenth_of_the_memory_stays_free(
    available: float, total: float, own: float, room: int
) -> None:
    assert room_for(available, total, own) == room
