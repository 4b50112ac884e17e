"""Hostile content in the ledger or a tensors server ends its own job, and all others go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

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

from vcasgd.learning.layout import Layout, TensorEntry, TensorKind
from vcasgd.limits import MAX_CONTENT_BYTES
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.servers import Servers, node_name
from vcasgd.store.tensors.snapshot import Meta

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
    hostile = Hostile.of(harness, Training(harness).job)
    yield hostile
    hostile.close()


def _layout(**fields: object) -> str:
    entry = {"name": "w", "shape": [1], "kind": "parameter", "offset": 0, **fields}
    return json.dumps({"samples": 10, "validation_samples": 1, "order_digest": "d",
                       "layout": json.dumps([entry])})  # fmt: skip


def _result(end: str) -> str:
    return json.dumps(RESULT)[:-1] + end


#: Key, field, and stored value, and words that the reason has to contain.
FATAL = {
    "a number as a result": ("evaluations", "1", "5", "evaluation 1"),
    "deep nesting": ("evaluations", "1", "[" * 100_000, "evaluation 1"),
    "deep nesting in metrics": (
        "evaluations", "1", _result(',"metrics":' + '{"a":' * 50_000), "evaluation 1"
    ),
    "a huge number": ("evaluations", "1", _result(f',"at":{HUGE}}}'), f"{FIRST} at"),
    "a huge epoch": ("evaluations", HUGE, json.dumps(RESULT), "evaluation 1000"),
    "versions of other shards": (
        "evaluations", "1", json.dumps({**RESULT, "versions": [HUGE]}), f"{FIRST} versions"
    ),
    "facts that end early": ("facts", "facts", "{", "facts"),
    "facts with a huge number": ("facts", "facts", f'{{"samples":{HUGE}}}', "facts"),
    "a nested layout": ("facts", "facts", _layout(shape="[" * 5000), "layout"),
    "a model that can't exist": ("facts", "facts", _layout(shape=[1 << 50]), "layout"),
    "a negative size": ("facts", "facts", _layout(shape=[-1]), "layout"),
    "a counter that is no number": ("counters", "next", "many", "counter next"),
    "a huge counter": ("counters", "next", HUGE, "counter next"),
}  # fmt: skip


@pytest.mark.parametrize("case", FATAL)
def test_content_that_can_not_be_read_ends_its_job_with_the_reason(
    harness: Harness, api: Api, hostile: Hostile, case: str
) -> None:
    key, field, value, reason = FATAL[case]

    hostile.ledger.hset(getattr(hostile.keys, key), field, value)

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


def test_an_unexpected_error_of_a_write_and_a_cancel_stop_no_other_job(harness: Harness) -> None:
    # Given a job whose checkpoints can't be written, because a worker changed the model's facts
    training = Training(harness, samples=4000, checkpoint={"every": 0.5})
    hostile = Hostile.of(harness, training.job)
    training.add_workers(1)
    training.await_samples(1)
    facts = json.loads(harness.ledger.connection.hget(hostile.keys.facts, "facts"))
    (first, *others) = json.loads(facts["layout"])
    facts["layout"] = json.dumps([{**first, "shape": [*first["shape"], 2]}, *others])
    hostile.ledger.hset(hostile.keys.facts, "facts", json.dumps(facts))
    await_truth(lambda: harness.events(training.job, "checkpoint-failed"))

    harness.jobs.cancel(training.job)

    victim = Training(harness)
    victim.add_workers(1)
    train_on(harness, victim)


# -- a tensors server ------------------------------------------------------------------------------

LAYOUT = Layout((TensorEntry("w", (4,), TensorKind.PARAMETER, 0),))
META = Meta(version=0, token=0, floats=4, parameters=4, layout=LAYOUT.digest())
SHARD_FACTS = {"samples": 400, "validation_samples": 1, "layout": LAYOUT.to_json(),
               "order_digest": "d", "batch_size": 5, "subtasks_per_epoch": 4}  # fmt: skip
RECORD = {"finished": "0", "version": "0", "token": "0", "safe": "0"}


def _write(hostile: Hostile, meta: str, record: dict[str, str], version: int = 0) -> None:
    """Write a first model, as the worker that leases it may, and the facts."""
    keys = hostile.tensor_keys
    tensors, chunk = hostile.tensors, keys.snapshot_chunk(version, 0, "0")
    tensors.set(chunk, b"\0" * 16)
    tensors.hset(keys.applied, mapping=record)
    tensors.set(keys.meta, meta)
    hostile.ledger.hset(hostile.keys.facts, "facts", json.dumps(SHARD_FACTS))


def _meta(**fields: object) -> str:
    return json.dumps({**json.loads(META.to_json()), **fields})


#: Description and record of the first model, and the words of the reason.
MODELS: dict[str, tuple[str, dict[str, str], str]] = {
    "another version": (META.to_json(), {**RECORD, "version": "7"}, "differ in version"),
    "a version that is no number": (META.to_json(), {**RECORD, "version": "x"}, "not a count"),
    "far too many epochs": (META.to_json(), {**RECORD, "finished": str(10**15)}, "applied record"),
    "a negative number": (META.to_json(), {**RECORD, "finished": "-1"}, "not a count"),
    "a subtask that doesn't exist": (META.to_json(), {**RECORD, "99": "1"}, "applied record"),
    "a position that doesn't exist": (META.to_json(), {**RECORD, "0": "101"}, "applied record"),
    "a huge number": (META.to_json(), {**RECORD, "9" * 4000: "1"}, "not a count"),
    "a bitmap that is too long": (META.to_json(), {**RECORD, "b0": "\1" * 513}, "applied record"),
    "a bitmap of other subtasks": (
        META.to_json(),
        {**RECORD, "b0": "\x7f" * 512},
        "applied record",
    ),
    "a bitmap that is no number": (META.to_json(), {**RECORD, "b-1": "\1"}, "not a count"),
    "a bitmap far away": (META.to_json(), {**RECORD, f"b{10**15}": "\1"}, "applied record"),
    "deep nesting": ("[" * 100_000, RECORD, "can't be read"),
    "another size": (_meta(floats=5), RECORD, "floats"),
    "wrong counters": (_meta(integers="x"), RECORD, "integers"),
    "counts of nothing": (_meta(totals={"staleness": {"x": 1}}), RECORD, "staleness"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_first_model_that_can_not_be_read_ends_its_job(
    harness: Harness, hostile: Hostile, case: str
) -> None:
    meta, record, reason = MODELS[case]

    _write(hostile, meta, record)

    assert reason in (hostile.await_expulsion().reason or "")
    assert harness.server.alive


@pytest.mark.ci
def test_a_record_that_changes_later_ends_neither_the_server_nor_other_jobs(
    harness: Harness, hostile: Hostile
) -> None:
    # Given a parameter server that has loaded the first model; before, it reports version 0
    _write(hostile, replace(META, version=1).to_json(), {**RECORD, "version": "1"}, version=1)
    ledger, tensors = harness.ledger.connection, harness.tensors.connection
    await_truth(lambda: _served(harness).get(hostile.job) == 1)
    before = harness.server.pid

    # When the record changes as in a write that a worker sent before it lost the permission
    keys = TensorKeys(hostile.job)
    tensors.hset(keys.applied, mapping={"version": "7", "token": "5"})
    tensors.set(keys.meta, replace(META, version=7, token=5).to_json())
    tensors.delete(keys.snapshot_chunk(7, 5, "0"))

    await_truth(lambda: "is loaded again" in (harness.home / "server-0.log").read_text())
    victim = Training(harness)
    victim.add_workers(1)
    train_on(harness, victim)
    assert harness.server.pid == before
    assert ledger.ping()


def _served(harness: Harness) -> dict[str, int]:
    row = Servers(harness.ledger.connection).all().get(node_name(0), {})
    versions: dict[str, int] = row.get("versions", {})
    return versions
