"""A worker's part in the rounds of its job."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from vcasgd.store.tensors.snapshot import RoundFacts
from vcasgd.worker.interval import Base
from vcasgd.worker.member import EXCHANGES, MAX_STEPS, Member, balanced_steps, is_late


def base_of(
    workers: int = 4, version: int = 1, *, step: float = 0.1, exchange: float = 0.0
) -> Base:
    """Return the base of a round of ``workers`` with a job's batch of 32 in all."""
    batch = 32 * bool(workers)
    facts = RoundFacts(workers, batch, step_seconds=step, exchange_seconds=exchange)
    return Base(torch.empty(0), torch.empty(0), version=version, round=facts)


def test_second_moments_are_those_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(200))
    optimizer = torch.optim.Adam([parameter], lr=0.01)
    member = Member(32, 4, steps=2)
    member.use(optimizer)
    member.measure(0.01)

    for version in range(100):
        member.follow(base_of(4, version))
        member.begin(progress=0.0)
        for _ in range(4):
            parameter.grad = torch.randn(200)
            optimizer.step()

    second = optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.999**400)
    assert float(second.mean()) == pytest.approx(1 / 4, rel=0.1)


@pytest.mark.parametrize(
    ("workers", "expected", "fixed", "samples"),
    [
        (0, 2, False, 32),
        (0, 1, False, 3200),
        (1, 1, False, 3200),
        (1, 1, True, 64),
        (2, 1, False, 64),
    ],
    ids=["nobody yet", "never another", "alone", "alone, with push_every", "two"],
)
def test_a_worker_pushes_less_often_while_it_is_alone(
    workers: int, expected: int, fixed: bool, samples: int
) -> None:
    """One that makes 100 local steps in a second, with its part of a batch of 32."""
    member = Member(32, expected, steps=2, fixed=fixed)
    member.measure(0.01)
    member.follow(base_of(workers))

    assert member.interval_stop(0, 32_000) == samples


@pytest.mark.parametrize(
    ("exchange", "workers", "keeps", "steps"),
    [
        (0.05, 1, True, 10),  # a second
        (0.2, 1, True, 100),  # ten seconds
        (5.0, 1, True, 100),
        (30.0, 1, True, 300),  # an exchange
        (0.5, 2, False, 2),
    ],
)
def test_a_worker_that_is_alone_never_waits_for_an_exchange(
    exchange: float, workers: int, keeps: bool, steps: int
) -> None:
    """Its steps take 0.1 s."""
    member = Member(32, 1, steps=2)
    member.measure(0.1)
    member.follow(base_of(workers, version=0))
    member.end(1, now=100.0)
    member.measure_exchange(1, now=100.0 + exchange)
    member.follow(base_of(workers))

    assert member.keeps_copy is keeps
    assert member.interval_stop(0, 32_000) == steps * member.batch


@pytest.mark.parametrize(
    ("exchange", "large", "fixed", "takes_turns", "shards"),
    [
        (0.05, True, False, False, 16),  # shorter than a step
        (0.13, True, False, False, 12),  # about as long
        (0.15, True, False, True, 10),
        (0.4, True, False, True, 4),
        (9.0, True, False, True, 4),  # a fifth of them at least
        (9.0, False, False, False, 4),
        (9.0, True, True, False, 4),
    ],
)
def test_workers_push_parts_of_a_large_vector_in_turn_if_an_exchange_is_long(
    exchange: float, large: bool, fixed: bool, takes_turns: bool, shards: int
) -> None:
    """Their steps take 0.1 s, and there are 16 shards."""
    member = Member(32, 4, steps=2, fixed=fixed, large=large)
    member.shards = 16

    member.follow(base_of(exchange=exchange))

    assert member.takes_turns is takes_turns
    assert member.shards_of_turn == shards


def test_noise_does_not_change_whether_workers_take_turns() -> None:
    member, taken = Member(32, 4, steps=2, large=True), []
    for seconds in (0.13, 0.15, 0.13, 0.11, 0.09, 0.13):
        member.follow(base_of(exchange=seconds))
        taken.append(member.takes_turns)

    assert taken == [False, True, True, True, False, False]


def test_an_interval_lasts_as_long_as_two_turns() -> None:
    """It ends as soon as the turn has."""
    member = Member(32, 4, steps=2, large=True)
    member.shards = 8
    member.measure(0.1)
    member.measure_copy(4.0)
    member.follow(base_of(exchange=4.0))

    assert member.interval_stop(0, 32_000) == pytest.approx(2 * 10 * member.batch, abs=2)


@pytest.mark.parametrize(
    ("stalled", "exchange", "pause"),
    [
        (0.03, 4.0, 1.0),  # 3 %
        (0.03, 1.0, 0.8),  # four times as long as a turn, which exchanges a fifth of the shards
        (3.0, 60.0, 2.0),  # all five turns of an exchange lose 10 s
    ],
)
def test_a_training_that_takes_turns_stands_still_for_a_small_share_of_its_time(
    stalled: float, exchange: float, pause: float
) -> None:
    member = Member(32, 4, steps=2, large=True)
    member.shards = 10
    member.measure_copy(exchange)
    member.follow(base_of(exchange=exchange))
    assert member.may_start_turn(now=100.0)

    member.start_turn(now=100.0)
    member.stall(stalled)

    assert not member.may_start_turn(now=99.99 + pause)
    assert member.may_start_turn(now=100.01 + pause)


@pytest.mark.parametrize(
    ("workers", "position", "expected", "batches"),
    [
        pytest.param(1, 0, [64, 100], [32, 32], id="alone: those of an ordinary loop"),
        pytest.param(2, 0, [33, 67, 100], [17, 17, 17], id="two: equal ones"),
        pytest.param(1, 10, [32, 96, 100], None, id="the rest of a batch, and then whole ones"),
        pytest.param(1, 30, [47, 64, 100], None, id="a short one with the next batch"),
        pytest.param(1, 63, [80, 100], None, id="up to the end of the subtask"),
        pytest.param(1, 70, [100], None, id="the rest"),
        pytest.param(1, 97, [100], None, id="a few samples"),
    ],
)
def test_intervals_and_batches_of_a_subtask(
    workers: int, position: int, expected: list[int], batches: list[int] | None
) -> None:
    member = Member(32, workers, steps=2)

    stops = [position]
    while stops[-1] < 100:
        stops.append(member.interval_stop(stops[-1], 100))

    assert stops[1:] == expected
    sizes = [member.batch_size(stop - start) for start, stop in pairwise(stops)]
    assert batches in (None, sizes)


@pytest.mark.parametrize(
    ("exchange", "step", "expected"),
    [
        (0.0, 0.1, None),
        (0.1, 0.0, None),
        (0.001, 0.1, 1),
        (0.1, 0.1, 1),
        (0.13, 0.1, 1),
        (0.15, 0.1, 2),
        (0.5, 0.1, 4),
        (1e9, 1e-9, MAX_STEPS),
    ],
)
def test_a_round_trains_about_as_long_as_an_exchange_takes(
    exchange: float, step: float, expected: int | None
) -> None:
    facts = RoundFacts(workers=4, batch=32, step_seconds=step, exchange_seconds=exchange)

    assert balanced_steps(facts) == expected


@pytest.mark.parametrize(("fixed", "samples"), [(False, 4 * 8), (True, 2 * 8)])
def test_intervals_follow_the_exchange_unless_push_every_is_set(fixed: bool, samples: int) -> None:
    member = Member(32, 4, steps=2, fixed=fixed)
    member.measure(0.01)
    assert member.interval_stop(0, 32_000) == 2 * 8
    member.follow(base_of(step=0.01, exchange=0.04))

    assert member.interval_stop(0, 32_000) == samples


@pytest.mark.parametrize(
    ("present", "steps"), [(4, 20), (3, 15), (1, 5), (9, 20)], ids=["all", "three", "one", "more"]
)
def test_an_interval_of_push_every_has_as_many_samples_with_fewer_workers(
    present: int, steps: int
) -> None:
    member = Member(32, 4, steps=20, fixed=True)
    member.measure(0.01)
    member.follow(base_of(present, step=0.0))

    # Its own batch is the same as before, because those of all add up to the job's.
    assert member.interval_stop(0, 32_000) == steps * 8


@pytest.mark.parametrize(
    ("workers", "exchange", "fixed", "progress", "expected"),
    [
        pytest.param(4, 0.001, False, 0.5, True, id="short"),
        pytest.param(4, 0.013, False, 0.5, True, id="as a step"),
        pytest.param(4, 0.02, False, 0.5, False, id="longer"),
        pytest.param(4, 0.0, False, 0.5, False, id="unknown"),
        pytest.param(4, 0.001, True, 0.5, False, id="push_every"),
        pytest.param(1, 0.001, False, 0.5, False, id="alone"),
        pytest.param(4, 0.001, False, 0.49, False, id="first half of the job"),
    ],
)
def test_a_step_overlaps_with_an_exchange_that_is_not_longer(
    workers: int, exchange: float, fixed: bool, progress: float, expected: bool
) -> None:
    member = Member(32, 4, steps=1, fixed=fixed)

    member.follow(base_of(workers, step=0.01, exchange=exchange))
    member.begin(progress)

    assert member.overlaps is expected


@pytest.mark.parametrize(
    ("workers", "step_seconds", "done", "seconds", "expected"),
    [
        pytest.param(4, 0.1, 5, 0.99, False, id="the others train"),
        pytest.param(4, 0.1, 5, 1.0, True, id="half as fast"),
        pytest.param(4, 0.1, 6, 1.0, False, id="a little slower"),
        pytest.param(4, 0.1, 6, 1.3, True, id="slower since"),
        pytest.param(4, 0.1, 1, 30.0, True, id="suspended"),
        pytest.param(1, 0.1, 1, 30.0, False, id="alone"),
        pytest.param(4, 0.0, 1, 30.0, False, id="unknown"),
        pytest.param(0, 0.0, 1, 30.0, False, id="first round"),
    ],
)
def test_interval_is_late_if_it_is_much_slower_than_its_round(
    workers: int, step_seconds: float, done: int, seconds: float, expected: bool
) -> None:
    facts = RoundFacts(workers, batch=32, step_seconds=step_seconds)

    assert is_late(facts, planned=10, done=done, seconds=seconds) is expected


def test_exchange_is_the_shortest_of_the_last_ones() -> None:
    """Longer ones waited for other workers, as that of the first round did for unknown ones."""
    member = Member(32, 4, steps=2)
    member.end(0, now=10.0)
    member.measure_exchange(0, now=10.01)
    assert member.exchange_seconds == 0
    member.follow(base_of(4))
    for update, seconds in enumerate((0.1, 0.5, 0.4, 0.7, 0.3, 0.6), start=1):
        member.end(update, now=10.0)
        member.measure_exchange(update, now=10.0 + seconds)

    assert member.exchange_seconds == pytest.approx(0.3)


def test_exchange_is_that_of_the_last_update_in_the_base() -> None:
    member = Member(32, 4, steps=1)
    member.follow(base_of(4))
    for update, ended in ((1, 10.0), (2, 11.0), (3, 12.0)):
        member.end(update, ended)

    member.measure_exchange(0, now=12.0)
    assert member.exchange_seconds == 0

    member.measure_exchange(2, now=12.5)
    assert member.exchange_seconds == 1.5

    # As often as there are exchanges that count, so that a second measurement would show.
    for _ in range(EXCHANGES):
        member.measure_exchange(2, now=20.0)
    assert member.exchange_seconds == 1.5, "each is measured once"


def test_an_optimizer_is_uncorrected_only_with_a_part_of_the_batch() -> None:
    optimizer = torch.optim.NAdam([nn.Parameter(torch.zeros(2))])
    member = Member(32, 1, steps=2)
    member.use(optimizer)
    assert member.uncorrected == ""

    member.follow(base_of(4))

    assert member.uncorrected == "NAdam"
