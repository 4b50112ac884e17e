"""Hostile content in a tensors server ends its own job, and the parameter server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.harness import Harness
from support.hostile import Hostile, platform, train_on
from support.servers import KINDS
from support.training import Training
from support.waiting import await_truth

from vcasgd.learning.layout import Layout, TensorEntry, TensorKind
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.servers import Servers, node_name
from vcasgd.store.tensors.snapshot import Meta

LAYOUT = Layout((TensorEntry("w", (4,), TensorKind.PARAMETER, 0),))
META = Meta(version=0, token=0, floats=4, parameters=4, layout=LAYOUT.digest())
FACTS = {"samples": 400, "validation_samples": 1, "layout": LAYOUT.to_json(), "order_digest": "d",
         "batch_size": 5, "subtasks_per_epoch": 4}  # fmt: skip
RECORD = {"finished": "0", "version": "0", "token": "0", "safe": "0"}


@pytest.fixture(scope="module", params=KINDS)
def harness(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Harness]:
    with platform(tmp_path_factory.mktemp("hostile"), request.param) as harness:
        yield harness


@pytest.fixture
def hostile(harness: Harness) -> Iterator[Hostile]:
    hostile = Hostile(harness, Training(harness).job)
    hostile.sign_in(tensors=True)
    yield hostile
    hostile.close()


def _write(hostile: Hostile, meta: str, record: dict[str, str], version: int = 0) -> None:
    """Write a first model, as the worker that leases it may, and the facts."""
    keys = hostile.tensor_keys
    tensors, chunk = hostile.tensors, keys.snapshot_chunk(version, 0, "0")
    tensors.set(chunk, b"\0" * 16)
    tensors.hset(keys.applied, mapping=record)
    tensors.set(keys.meta, meta)
    hostile.ledger.hset(hostile.keys.facts, "facts", json.dumps(FACTS))


def _meta(**fields: object) -> str:
    return json.dumps({**json.loads(META.to_json()), **fields})


#: Description and record of the first model, and the words of the reason.
CASES: dict[str, tuple[str, dict[str, str], str]] = {
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


@pytest.mark.parametrize("case", CASES)
def test_a_first_model_that_can_not_be_read_ends_its_job(
    harness: Harness, hostile: Hostile, case: str
) -> None:
    meta, record, reason = CASES[case]

    _write(hostile, meta, record)

    assert reason in (hostile.await_expulsion().reason or "")
    assert harness.server.alive


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

    # Then only that job is loaded again
    await_truth(lambda: "is loaded again" in (harness.home / "server-0.log").read_text())
    victim = Training(harness)
    victim.add_workers(1)
    train_on(harness, victim)
    assert harness.server.pid == before
    assert ledger.ping()


def _served(harness: Harness) -> dict[str, int]:
    """Return the version of each job's model in the parameter server."""
    row = Servers(harness.ledger.connection).all().get(node_name(0), {})
    versions: dict[str, int] = row.get("versions", {})
    return versions
