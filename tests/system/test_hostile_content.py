"""Hostile content in the ledger ends its own job, and all others go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from support.api_harness import Api
from support.harness import Harness
from support.hostile import (
    Hostile,
    assert_everything_answers,
    platform,
    platform_api,
    train_on,
    works,
)
from support.servers import KINDS
from support.training import Training
from support.waiting import await_truth

from vcasgd.limits import MAX_CONTENT_BYTES

HUGE = "1" + "0" * 400
FIRST = "evaluation 1, which can't be read:"
RESULT = {"version": 1, "metrics": {}, "worker": "w", "seconds": 0.0, "at": 1.0}


@pytest.fixture(scope="module", params=KINDS)
def harness(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Harness]:
    with platform(tmp_path_factory.mktemp("hostile"), request.param) as harness:
        yield harness


@pytest.fixture(scope="module")
def api(harness: Harness) -> Iterator[Api]:
    api = platform_api(harness)
    yield api
    api.end()


@pytest.fixture
def hostile(harness: Harness) -> Iterator[Hostile]:
    hostile = Hostile(harness, Training(harness).job)
    hostile.sign_in()
    yield hostile
    hostile.close()


def _facts(text: str) -> Callable[[Hostile], object]:
    return lambda hostile: hostile.ledger.hset(hostile.keys.facts, "facts", text)


def _evaluation(number: str, text: str) -> Callable[[Hostile], object]:
    return lambda hostile: hostile.ledger.hset(hostile.keys.evaluations, number, text)


def _counter(name: str, value: str) -> Callable[[Hostile], object]:
    return lambda hostile: hostile.ledger.hset(hostile.keys.counters, name, value)


def _layout(**fields: object) -> str:
    entry = {"name": "w", "shape": [1], "kind": "parameter", "offset": 0, **fields}
    return json.dumps({"samples": 10, "validation_samples": 1, "order_digest": "d",
                       "layout": json.dumps([entry])})  # fmt: skip


#: Stored values, and words that the reason has to contain.
FATAL = {
    "a number as a result": (_evaluation("1", "5"), "evaluation 1"),
    "deep nesting": (_evaluation("1", "[" * 100_000), "evaluation 1"),
    "deep nesting in metrics": (
        _evaluation("1", json.dumps(RESULT)[:-1] + ',"metrics":' + '{"a":' * 50_000), "evaluation 1"
    ),
    "a huge number": (
        _evaluation("1", json.dumps(RESULT)[:-1] + f',"at":{HUGE}}}'), f"{FIRST} at"
    ),
    "a huge epoch": (_evaluation(HUGE, json.dumps(RESULT)), "evaluation 1000"),
    "versions of other shards": (
        _evaluation("1", json.dumps({**RESULT, "versions": [HUGE]})), f"{FIRST} versions"
    ),
    "facts that end early": (_facts("{"), "facts"),
    "facts with a huge number": (_facts(f'{{"samples":{HUGE}}}'), "facts"),
    "a nested layout": (_facts(_layout(shape="[" * 5000)), "layout"),
    "a model that can't exist": (_facts(_layout(shape=[1 << 50])), "layout"),
    "a negative size": (_facts(_layout(shape=[-1])), "layout"),
    "a counter that is no number": (_counter("next", "many"), "counter next"),
    "a huge counter": (_counter("next", HUGE), "counter next"),
}  # fmt: skip


@pytest.mark.parametrize("case", FATAL)
def test_content_that_can_not_be_read_ends_its_job_with_the_reason(
    harness: Harness, api: Api, hostile: Hostile, case: str
) -> None:
    write, reason = FATAL[case]

    write(hostile)

    assert reason in (hostile.await_expulsion().reason or "")
    assert_everything_answers(api, [hostile.job])


def test_content_that_is_only_shown_stops_nothing(
    harness: Harness, api: Api, hostile: Hostile
) -> None:
    ledger, keys = hostile.ledger, hostile.keys
    victim = Training(harness)
    victim.add_workers(1)
    for text in ("{", "", "5", "[" * 100_000, f'{{"at":{HUGE}}}', '{"at":1e999}', "\\", "\x00"):
        ledger.xadd(keys.logs, {"l": text})
        ledger.hset(keys.workers, "worker-1", text)
        ledger.rpush(keys.failures, text)
    ledger.xadd(keys.logs, {b"\xff": b"\xff"})
    ledger.hset(keys.workers, b"\xff", "{}")
    ledger.hset(keys.workers, "w", f'{{"at": {HUGE}, "unknown": {HUGE}, "nan": NaN}}')
    ledger.hset(keys.workers, "v", f'{{"nested": {"[" * 100}1{"]" * 100}}}')
    ledger.hset(keys.holders, b"\xff", b"\xff")
    ledger.zadd(keys.leases, {b"evaluate:" + b"9" * 5000: 1.0, b"\xff": float("inf")})
    ledger.zadd(keys.open, {b"evaluate:x": 1.0})
    ledger.hset(keys.refused, b"pool \xff", b"\xff")

    assert_everything_answers(api, [hostile.job, victim.job])
    train_on(harness, victim)

    assert any("can't be read" in line["line"] for line in harness.jobs.logs(hostile.job))


@pytest.mark.parametrize("kind", ["logs", "workers", "evaluations", "refused"])
def test_a_flood_of_content_is_deleted_and_ends_its_job(
    harness: Harness, api: Api, hostile: Hostile, kind: str
) -> None:
    key, value = getattr(hostile.keys, kind), b"x" * (1 << 20)
    before = harness.ledger.connection.info("memory")["used_memory"]
    with hostile.ledger.pipeline() as pipe:
        for number in range(2 * MAX_CONTENT_BYTES // len(value)):
            if kind == "logs":
                pipe.xadd(key, {"l": value})
            else:
                pipe.hset(key, str(number), value)
        works(pipe.execute)  # It may lose its access meanwhile.

    reason = hostile.await_expulsion().reason or ""

    # Results that can't be read end the job before they are too many.
    assert kind.rstrip("s") in reason
    await_truth(
        lambda: harness.ledger.connection.info("memory")["used_memory"] < before + MAX_CONTENT_BYTES
    )
    assert_everything_answers(api, [hostile.job])


def test_another_job_trains_to_its_end(harness: Harness) -> None:
    hostile, victim = Hostile(harness, Training(harness).job), Training(harness)
    hostile.sign_in()
    victim.add_workers(1)
    for write, _ in FATAL.values():
        works(lambda write=write: write(hostile))
    hostile.await_expulsion()

    train_on(harness, victim)

    assert harness.jobs.get(hostile.job).state == "failed"


def test_an_unexpected_error_of_a_write_and_a_cancel_stop_no_other_job(harness: Harness) -> None:
    # Given a job whose checkpoints can't be written, because a worker changed the model's facts
    training = Training(harness, samples=4000, checkpoint={"every": 0.5})
    hostile = Hostile(harness, training.job)
    hostile.sign_in()
    training.add_workers(1)
    training.await_samples(1)
    facts = json.loads(harness.ledger.connection.hget(hostile.keys.facts, "facts"))
    (first, *others) = json.loads(facts["layout"])
    facts["layout"] = json.dumps([{**first, "shape": [*first["shape"], 2]}, *others])
    hostile.ledger.hset(hostile.keys.facts, "facts", json.dumps(facts))
    await_truth(lambda: harness.events(training.job, "checkpoint-failed"))

    # When the job is cancelled meanwhile
    harness.jobs.cancel(training.job)

    # Then the job loop still starts and ends others
    victim = Training(harness)
    victim.add_workers(1)
    train_on(harness, victim)
