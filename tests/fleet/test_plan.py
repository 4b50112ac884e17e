"""Decisions of the plan, case by case, and its properties."""

from __future__ import annotations

import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import (
    NOW,
    Row,
    carried_out,
    decide,
    job,
    launch,
    leaving,
    machine,
    observed,
    on,
    remembered,
)

from vcasgd.fleet.observed import Market, ObservationTimes, Observed, PoolStatus, with_history
from vcasgd.fleet.plan import Blame, StartWorker, StopWorker, Terminate, launch_token


def blame(machine_id: str, pool: str = "local", why: str = "did not join in time") -> Blame:
    return Blame(machine_id, pool, "z", True, why)


def stop(machine_id: str, reason: str, job: str = "A") -> StopWorker:
    return StopWorker(f"{job}@{machine_id}", reason)


TWO_POOLS = [PoolStatus("cheap"), PoolStatus("dear")]
BOTH = ("cheap", "dear")
BLOCKED = PoolStatus("local", blocked_until=NOW + 1, reason="no capacity")

AB, ON_AB = [machine("a"), machine("b")], [on("a"), on("b")]
ONE = job("A", maximum=1)
WITH_SPARE = job("A", maximum=1, spare=1)

TABLE = [
    Row("a spare machine", observed(jobs=[WITH_SPARE]), [launch(2)]),
    Row("a spare machine waits", observed(
        AB, [on("a")], [WITH_SPARE],
        history=ObservationTimes(since=NOW - 9999, idle={"b": NOW - 9999}),
    ), []),
    Row("a spare machine takes the place of a lost one", observed(
        [machine("b")], jobs=[WITH_SPARE],
    ), [StartWorker("b", "A"), launch(1)]),
    Row("a machine that another job needs is no spare", observed(
        AB, [on("a")], [WITH_SPARE, job("B", maximum=1)], pools=[PoolStatus("local", capacity=2)],
    ), [StartWorker("b", "B")]),
    Row("no spare machine at the end of a job", observed(
        AB, [on("a")], [job("A", maximum=1, spare=1, wants=1)],
        history=ObservationTimes(since=NOW - 9999, idle={"b": NOW - 9999}),
    ), [Terminate("b", "idle")]),
    Row("nothing at all", observed(), []),
    Row("a job without machines", observed(jobs=[job("A")]), [launch(4)]),
    Row("no more than are useful", observed(jobs=[job("A", wants=2)]), [launch(2)]),
    Row("not running", observed(jobs=[job("A", running=False)]), []),
    Row("nothing useful to do", observed(jobs=[job("A", 1, wants=0)]), []),
    Row("a pool's room", observed(
        jobs=[job("A")], pools=[PoolStatus("local", capacity=3)],
    ), [launch(3)]),
    Row("a full pool", observed(
        [leaving("a"), machine("b")], [on("b")], [job("A")],
        pools=[PoolStatus("local", capacity=1)],
    ), []),
    Row("a pool smaller than its fleet", observed(
        AB, ON_AB, [job("A")], pools=[PoolStatus("local", capacity=1)],
    ), []),
    Row("an unknown pool", observed(jobs=[job("A", pools=("moon",))]), []),
    Row("launches in flight count", observed(
        jobs=[job("A")],
        pools=[PoolStatus("local", launching=3, markets={("z", True): Market(launches=7)})],
    ), [launch(1, launches=7)]),
    Row("launches in flight take room", observed(
        jobs=[job("A")], pools=[PoolStatus("local", launching=2, capacity=3)],
    ), [launch(1)]),
    Row("booting machines count", observed(
        AB, jobs=[job("A", maximum=3)], nodes="a",
    ), [StartWorker("a", "A"), launch(1)]),
    Row("a joined machine gets a worker", observed(
        [machine("a")], jobs=[ONE],
    ), [StartWorker("a", "A")]),
    Row("all is well", observed([machine("a")], [on("a")], [ONE]), []),
    Row("a dead worker is replaced on its machine", observed(
        [machine("a")], [on("a", alive=False)], [ONE],
    ), [StartWorker("a", "A")]),
    Row("replacement at the notice", observed([leaving("a")], [on("a")], [ONE]), [launch(1)]),
    Row("replacement on an idle machine at the notice", observed(
        [leaving("a"), machine("b")], [on("a")], [ONE],
    ), [StartWorker("b", "A")]),
    Row("nothing starts on a leaving machine", observed(
        [leaving("a")], jobs=[job("A", 1, 1)],
    ), [launch(1)]),
    Row("half the fleet at once", observed(
        [leaving("a"), leaving("b"), machine("c"), machine("d")],
        [on("a"), on("b"), on("c"), on("d")], [job("A")],
    ), [launch(2)]),
    Row("pools in order", observed(
        jobs=[job("A", pools=BOTH)], pools=[PoolStatus("cheap", capacity=1), TWO_POOLS[1]],
    ), [launch(1, pool="cheap"), launch(3, pool="dear")]),
    Row("the job's order, not the list's", observed(
        jobs=[job("A", pools=("dear", "cheap"))], pools=TWO_POOLS,
    ), [launch(4, pool="dear")]),
    Row("a blocked pool is skipped", observed(
        jobs=[job("A", pools=BOTH)],
        pools=[PoolStatus("cheap", blocked_until=NOW + 1, reason="no capacity"), TWO_POOLS[1]],
    ), [launch(4, pool="dear")]),
    Row("all pools blocked", observed(jobs=[job("A")], pools=[BLOCKED]), []),
    Row("no longer blocked", observed(
        jobs=[job("A")], pools=[replace(BLOCKED, blocked_until=NOW)],
    ), [launch(4)]),
    Row("the preferred pool's idle machine first", observed(
        [machine("a", pool="dear"), machine("b", pool="cheap")],
        jobs=[job("A", maximum=1, pools=BOTH)], pools=TWO_POOLS,
    ), [StartWorker("b", "A")]),
    Row("the cheaper idle machine first", observed(
        [machine("a", price=2), machine("b", price=1)], jobs=[ONE],
    ), [StartWorker("b", "A")]),
    Row("a machine of another pool is no use", observed(
        [machine("a", pool="dear")], jobs=[ONE],
    ), [launch(1)]),
    Row("idle machines go to the next job before anything is launched", observed(
        [machine("a")], jobs=[job("A", running=False), job("B", maximum=2)],
    ), [StartWorker("a", "B"), launch(1)]),
    Row("machines of a job that ended are waited for, not doubled", observed(
        [machine("a")], [on("a")], [job("A", running=False), job("B", maximum=1)],
    ), [stop("a", "the job is not running")]),
    Row("workers of an unknown job", observed(
        [machine("a")], [on("a", "X")], [ONE],
    ), [stop("a", "the job is not running", "X")]),
    Row("workers of an ended job on a machine with a notice", observed(
        [leaving("a")], [on("a")], [job("A", running=False)],
    ), [stop("a", "the job is not running")]),
    Row("minimum of each first, then in order", observed(
        [machine(name) for name in "abcd"], jobs=[job("A", 1, 4), job("B", 2, 4)],
        pools=[PoolStatus("local", capacity=4)],
    ), [
        StartWorker("a", "A"), StartWorker("b", "B"), StartWorker("c", "B"), StartWorker("d", "A"),
    ]),
    Row("a minimum takes from who has more, the latest first", observed(
        [machine(name) for name in "abcd"], [on("a"), on("b"), on("c", "B"), on("d", "B")],
        [job("A", 1, 2), job("B", 1, 2), job("C", 1, 2)], pools=[BLOCKED],
    ), [
        StopWorker("B@d", "its machine is reassigned to C, which lacks a part of its minimum", "C"),
    ]),
    Row("a minimum takes nothing while there is room", observed(
        AB, ON_AB, [job("A", 1, 2), job("B", 1, 1)],
    ), [launch(1)]),
    Row("a minimum takes only what it can use", observed(
        AB, ON_AB, [job("A", 1, 2), job("B", 1, 1, pools=("moon",))], pools=[BLOCKED],
    ), []),
    Row("a young surplus stays", observed(AB, ON_AB, [job("A", wants=1)]), []),
    Row("a lasting surplus goes, the dearest first", observed(
        [machine("a", price=2), machine("b")], ON_AB, [job("A", wants=1)],
        history=ObservationTimes(0.0, surplus={"A": NOW - 15}),
    ), [stop("a", "no work for it")]),
    Row("a surplus that another job can use goes at once", observed(
        AB, ON_AB, [job("A", wants=1), job("B", maximum=1)],
    ), [stop("b", "its machine is reassigned to B")]),
    Row("idle for a while", observed(
        [machine("a")], history=ObservationTimes(0.0, idle={"a": NOW - 60}),
    ), []),
    Row("idle for too long", observed(
        [machine("a")], history=ObservationTimes(0.0, idle={"a": NOW - 61}),
    ), [Terminate("a", "idle")]),
    Row("idle for long, but wanted now", observed(
        [machine("a")], jobs=[ONE], history=ObservationTimes(0.0, idle={"a": NOW - 61}),
    ), [StartWorker("a", "A")]),
    Row("idle for long with a notice goes by itself", observed(
        [leaving("a")], history=ObservationTimes(0.0, idle={"a": NOW - 61}),
    ), []),
    Row("its worker is in quarantine, and it is replaced", replace(
        observed([machine("a")], jobs=[ONE]), quarantined=frozenset({"a"}),
    ), [Terminate("a", "its worker is in quarantine"), launch(1)]),
    Row("booting", observed([machine("a", age=300)], nodes=""), []),
    Row("not joined in time", observed(
        [machine("a", age=301)], nodes="",
    ), [Terminate("a", "did not join in time"), blame("a")]),
    Row("not joined in time, and replaced elsewhere", observed(
        [machine("a", age=301, pool="cheap")], jobs=[job("A", maximum=1, pools=BOTH)], nodes="",
        pools=TWO_POOLS,
    ), [Terminate("a", "did not join in time"), blame("a", "cheap"), launch(1, pool="dear")]),
    Row("its boot failed, and it is replaced elsewhere", replace(
        observed([machine("a", age=20, pool="cheap")], jobs=[job("A", maximum=1, pools=BOTH)],
                 nodes="", pools=TWO_POOLS),
        boot_errors={"a": "no disk"},
    ), [
        Terminate("a", "did not boot: no disk"), blame("a", "cheap", "did not boot: no disk"),
        launch(1, pool="dear"),
    ]),
    Row("one that has joined can say what it likes", replace(
        observed([machine("a")]), boot_errors={"a": "no disk"},
    ), []),
    Row("a pool has patience of its own", observed(
        [machine("a", age=200), machine("b", age=200, pool="slow")], nodes="",
        pools=[PoolStatus("local", boot_seconds=199), PoolStatus("slow", boot_seconds=900)],
    ), [Terminate("a", "did not join in time"), blame("a")]),
    Row("a new controller does not judge what it has not seen", observed(
        [machine("a", age=9_000)], nodes="", history=ObservationTimes(since=NOW - 10),
    ), []),
    Row("a node missing for a moment", observed(
        [machine("a")], [on("a", alive=False)], [ONE], nodes="",
        history=ObservationTimes(0.0, joined={"a": NOW - 30}),
    ), []),
    Row("a node gone for good", observed(
        [machine("a")], [on("a")], [ONE], nodes="",
        history=ObservationTimes(0.0, joined={"a": NOW - 31}),
    ), [Terminate("a", "it is no longer in the cluster"), launch(1)]),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=[row.case for row in TABLE])
def test_decide(row: Row) -> None:
    assert decide(remembered(row.state), NOW) == row.actions


def test_machines_that_join_are_used_and_neither_bought_nor_ended() -> None:
    pool = PoolStatus("local", provider="join", offers=())
    here = [machine("a", price=0.0), machine("b", price=0.0)]
    since = ObservationTimes(since=0.0, idle={"a": 0.0, "b": 0.0})

    # idle for long, and without a job
    assert decide(remembered(observed(here, pools=[pool], history=since)), NOW) == []
    # a job that wants more than there are
    wanting = observed(here, jobs=[job("A", 3, 4)], pools=[pool], history=since)
    assert decide(remembered(wanting), NOW) == [StartWorker("a", "A"), StartWorker("b", "A")]


def test_a_launch_that_was_not_recorded_is_repeated_under_the_same_token() -> None:
    state = observed(jobs=[job("A")])
    assert decide(state, NOW) == decide(state, NOW + 60)


def test_tokens_differ_by_ledger_pool_and_count_and_fit_everywhere() -> None:
    tokens = {launch_token(id_, p, n) for id_ in ("x", "y") for p in ("x", "y") for n in (0, 1)}
    assert len(tokens) == 8
    assert all(len(token) == 36 for token in tokens)


def test_history_drops_gone_machines() -> None:
    state = observed(
        history=ObservationTimes(0.0, joined={"a": 1.0}, idle={"a": 1.0}, surplus={"A": 1.0})
    )
    assert with_history(state, NOW).history == ObservationTimes(0.0)


def test_history_keeps_since_when() -> None:
    state = observed([machine("a"), machine("b")], [on("b")], [job("A", wants=0)])
    later = with_history(with_history(state, NOW), NOW + 9)
    assert later.history.idle == {"a": NOW}
    assert later.history.joined == {"a": NOW + 9, "b": NOW + 9}
    assert later.history.surplus == {"A": NOW}


names = st.sampled_from(string.ascii_lowercase[:6])
states = st.builds(
    observed,
    machines=st.lists(st.builds(machine, names), unique_by=lambda one: one.id, max_size=6),
    workers=st.lists(
        st.builds(on, names, st.sampled_from("ABC"), alive=st.booleans()),
        unique_by=lambda worker: worker.machine_id,
        max_size=6,
    ),
    jobs=st.lists(
        st.builds(
            job,
            st.sampled_from("ABC"),
            st.integers(0, 2),
            st.integers(2, 4),
            wants=st.integers(0, 5),
            running=st.booleans(),
        ),
        unique_by=lambda one: one.job,
        max_size=3,
    ),
    nodes=st.sampled_from(["*", "a b c", ""]),
    pools=st.lists(
        st.builds(PoolStatus, st.just("local"), capacity=st.integers(0, 6)), min_size=1, max_size=1
    ),
)


@given(states)
def test_no_machine_is_promised_or_ended_twice(state: Observed) -> None:
    actions = decide(with_history(state, NOW), NOW)
    used = [a.machine_id for a in actions if isinstance(a, StartWorker | Terminate)]
    stopped = [a.name for a in actions if isinstance(a, StopWorker)]
    assert len(used) == len(set(used))
    assert len(stopped) == len(set(stopped))


@given(states)
def test_decisions_settle(state: Observed) -> None:
    """Repeated decisions and their execution reach a stable state: nothing flaps."""
    now = NOW
    for _ in range(12):
        state = with_history(state, now)
        state = carried_out(state, decide(state, now), now)
        now += 200
    assert not decide(with_history(state, now), now)
