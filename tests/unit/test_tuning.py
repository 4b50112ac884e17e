"""What a job may set itself by measuring: each decision, on measurements made up by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vcasgd.errors import SpecError
from vcasgd.learning.rates import Rates
from vcasgd.learning.tuning import (
    Load,
    Momenta,
    Trial,
    explicit,
    factor_after,
    fewer,
    implicit,
    local_steps,
    next_trial,
    room_for,
    settled,
    shares_by_speed,
)
from vcasgd.spec.job import JobSpec
from vcasgd.task.task import Task

LEAST = {"name": "n", "task": "t:T", "epochs": 1, "subtasks_per_epoch": 1}

# --- job.yaml -------------------------------------------------------------------------------


def test_nothing_is_tuned_unless_it_is_asked_for() -> None:
    tuning = JobSpec.parse(LEAST).tuning

    assert (tuning.local_steps, tuning.momentum, tuning.mixing) == (False, False, False)
    assert tuning.learners_per_machine == 1
    assert not tuning.of_job


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"local_steps": "yes"}, "tuning.local_steps: must be a valid boolean; not 'yes'"),
        ({"learners_per_machine": 0}, "tuning.learners_per_machine: must be greater than"),
        ({"learners_per_machine": True}, "tuning.learners_per_machine: must be a valid integer"),
        ({"speed": True}, "tuning.speed: there is no such field"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({**LEAST, "tuning": fields})

    assert str(caught.value).startswith(message)


# --- local steps ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "before", "shares"),
    [
        ({}, {}, {}),
        ({"a": 0.1}, {}, {"a": 1.0}),
        # H·t_min/t
        ({"a": 0.1, "b": 0.2, "c": 0.4}, {}, {"a": 1.0, "b": 0.5, "c": 0.25}),
        # nearly the same speed is the same speed
        ({"a": 0.1, "b": 0.11}, {}, {"a": 1.0, "b": 1.0}),
        # what holds stays until it is far off
        ({"a": 0.1, "b": 0.22}, {"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.5}),
        ({"a": 0.1, "b": 0.25}, {"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.4}),
        # who was slow and is alone is as fast as anybody
        ({"b": 0.4}, {"b": 0.25}, {"b": 1.0}),
        # a worker that takes for ever makes something all the same
        ({"a": 0.001, "b": 100.0}, {}, {"a": 1.0, "b": 1 / 16}),
        # what is no time says nothing
        (
            {"a": 0.1, "b": math.nan, "c": 0.0, "d": -1.0, "e": math.inf, "f": 0.2},
            {},
            {"a": 1.0, "f": 0.5},
        ),
    ],
)
def test_slower_workers_make_fewer_steps(
    seconds: dict[str, float], before: dict[str, float], shares: dict[str, float]
) -> None:
    assert shares_by_speed(seconds, before) == pytest.approx(shares)


@given(st.dictionaries(st.text(max_size=3), st.floats(1e-6, 1e3), min_size=1))
def test_the_fastest_makes_the_whole_interval_and_nobody_more(seconds: dict[str, float]) -> None:
    shares = shares_by_speed(seconds, {})

    assert shares.keys() == seconds.keys()
    assert all(1 / 16 <= share <= 1 for share in shares.values())
    assert shares[min(seconds, key=lambda name: seconds[name])] == 1
    # measured again, nothing changes
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
    assert implicit(staleness) == pytest.approx(momentum)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_staleness_tells_how_many_work_whatever_their_speed(rates: list[float]) -> None:
    # Between two updates of one each other makes r_other / r_own; who pushes more counts more
    mean = sum(own * (sum(rates) - own) / own for own in rates) / sum(rates)

    assert implicit(mean) == pytest.approx(1 - 1 / len(rates))


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
def test_both_together_are_what_the_user_gave(
    given_momentum: float, asynchrony: float, left: float
) -> None:
    assert explicit(given_momentum, asynchrony) == pytest.approx(left)


@pytest.mark.parametrize(
    ("estimate", "before", "after"), [(0.52, 0.5, 0.5), (0.6, 0.5, 0.6), (0.0, 0.5, 0.0)]
)
def test_estimates_change_when_they_differ(estimate: float, before: float, after: float) -> None:
    assert settled(estimate, before) == after


def groups() -> list[dict[str, Any]]:
    return [
        {"params": [torch.nn.Parameter(torch.zeros(1))]},
        {"params": [torch.nn.Parameter(torch.zeros(1))], "momentum": 0.5},
    ]


def test_every_group_follows_from_its_own_momentum() -> None:
    optimizer = torch.optim.SGD(groups(), lr=0.1, momentum=0.9, nesterov=True)
    momenta = Momenta(optimizer)

    # not from what was set the last time
    for asynchrony in (0.75, 0.25):
        first = momenta.follow(asynchrony)

    assert first == pytest.approx(0.65)
    assert [group["momentum"] for group in optimizer.param_groups] == pytest.approx([0.65, 0.25])
    momenta.follow(0.0)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.5]


def test_the_step_stays_as_long_as_it_was_given() -> None:
    optimizer = torch.optim.SGD(groups(), lr=0.1, momentum=0.9)
    momenta = Momenta(optimizer)
    rates = Rates(Task(), optimizer, momenta.correction)

    momenta.follow(0.25)
    for _ in range(2):
        rates.follow(0.5)

    first, second = optimizer.param_groups
    assert first["lr"] / (1 - first["momentum"]) == pytest.approx(0.1 / (1 - 0.9))
    assert second["lr"] / (1 - second["momentum"]) == pytest.approx(0.1 / (1 - 0.5))
    momenta.follow(0.0)
    rates.follow(0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


def test_the_step_of_adam_is_normalised_already() -> None:
    optimizer = torch.optim.AdamW(groups()[:1], lr=0.1)
    momenta = Momenta(optimizer)

    momenta.follow(0.5)

    assert momenta.correction(optimizer.param_groups[0]) == 1


def test_adams_first_beta_is_a_momentum() -> None:
    optimizer = torch.optim.AdamW(groups()[:1], betas=(0.9, 0.99))

    assert Momenta(optimizer).follow(0.5) == pytest.approx(0.4)
    assert optimizer.param_groups[0]["betas"] == (pytest.approx(0.4), 0.99)


@pytest.mark.parametrize("given_momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_momentum_may_go_away_and_come_back(kind: Any, given_momentum: float) -> None:
    (group, *_) = groups()
    optimizer = kind([group["params"][0]], lr=0.1, momentum=given_momentum)
    momenta = Momenta(optimizer)

    for asynchrony in (0.95, 0.0, 0.5):
        assert (momenta.follow(asynchrony) is None) is (given_momentum == 0)
        group["params"][0].grad = torch.ones(1)
        optimizer.step()

    assert bool(torch.isfinite(group["params"][0]).all())


def test_where_there_is_no_momentum_there_is_none() -> None:
    assert Momenta(torch.optim.Adagrad(groups()[:1])).follow(0.5) is None


# --- mixing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("qualities", "factor"),
    [
        ([], 1.0),
        ([0.5, 0.6, 0.7], 1.0),
        # one that is worse is noise
        ([0.5, 0.4, 0.6], 1.0),
        ([0.5, 0.4, 0.45], 0.5),
        ([0.5, 0.4, 0.5, 0.45], 0.5),  # as good as the best is neither worse nor better
        ([0.5, 0.4, 0.4, 0.4, 0.4], 0.25),
        # back by half of the way with each that is the best so far
        ([0.5, 0.4, 0.4, 0.6], 2**-0.5),
        ([0.5, 0.4, 0.4, 0.6, 0.7, 0.8], 1.0),
        ([0.5, math.nan, math.inf], 0.5),
        ([math.nan, -math.inf, 0.5], 2**-0.5),
        ([0.9, *[0.1] * 40], 1 / 16),
    ],
)
def test_updates_have_less_weight_while_validation_worsens(
    qualities: list[float], factor: float
) -> None:
    assert factor_after(qualities) == pytest.approx(factor)


@given(st.lists(st.floats(), max_size=60))
def test_the_factor_is_bounded_whatever_is_measured(qualities: list[float]) -> None:
    assert 1 / 16 <= factor_after(qualities) <= 1


# --- learners -------------------------------------------------------------------------------

NOW, REST = 1000.0, 600.0


def load(rate: float, room: int = 9, cores: int = 8) -> Load:
    return Load(rate, room, cores)


@pytest.mark.parametrize(
    ("trial", "measured", "most", "learners"),
    [
        # the first try is free, and further ones while they help
        (Trial(), load(10), 4, 2),
        (Trial(2, {1: 10}), load(15), 4, 3),
        (Trial(2, {1: 10}), load(11.1), 4, 3),
        # a tenth is not enough
        (Trial(2, {1: 10}), load(11), 4, 1),
        (Trial(3, {2: 15}), load(15.5), 4, 2),
        # no further than the job, the processors and the memory allow
        (Trial(2, {1: 10}), load(20), 2, 2),
        (Trial(2, {1: 10}), load(20, cores=2), 4, 2),
        (Trial(), load(10, room=0), 4, 1),
        (Trial(), load(10, cores=1), 4, 1),
        # memory became short
        (Trial(3, {2: 10}), load(20, room=-1), 4, 2),
        (Trial(1), load(20, room=-5), 4, 1),
        # what did not help is not tried again for a while
        (Trial(1, {1: 10}, closed_until=NOW + 1), load(10), 4, 1),
        (Trial(1, {1: 10}, closed_until=NOW), load(10), 4, 2),
    ],
)
def test_learners_come_while_they_help(
    trial: Trial, measured: Load, most: int, learners: int
) -> None:
    assert next_trial(trial, measured, most, NOW, REST).learners == learners


def machine(rates: list[float], rounds: int, rest: float) -> list[int]:
    """The learners of a machine that trains ``rates[n-1]`` with n, one second after the other."""
    trial, counts = Trial(), []
    for now in range(rounds):
        trial = next_trial(trial, load(rates[trial.learners - 1]), len(rates), float(now), rest)
        counts.append(trial.learners)
    return counts


def test_the_search_ends_at_the_last_that_helped_and_looks_again_later() -> None:
    # Given a machine that three learners fill
    counts = machine([10, 19, 27, 28, 28], rounds=40, rest=20)

    # Then a fourth is tried, given up, and tried again after the rest
    assert counts == [2, 3, 4, *[3] * 20, 4, *[3] * 16]


def test_a_process_that_dies_costs_a_learner_and_never_the_last() -> None:
    trial = fewer(Trial(3, {1: 10.0, 2: 15.0}), NOW, REST)

    assert trial == Trial(2, {1: 10.0, 2: 15.0}, NOW + REST)
    assert fewer(Trial(1), NOW, REST).learners == 1


@given(
    st.lists(st.floats(0.1, 1000), min_size=1, max_size=6),
    st.integers(-3, 6),
    st.integers(1, 6),
)
def test_there_is_always_one_learner_and_never_more_than_allowed(
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
