"""Signatures of updates, and quarantines of their authors, on a real server."""

from __future__ import annotations

from typing import Any

import pytest
from support.world import World

from vcasgd.errors import InvalidUpdate
from vcasgd.parameter_server.reports import REJECTIONS_BEFORE_QUARANTINE
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.acl import worker_key
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.header import UNSIGNED, Header
from vcasgd.store.tensors.updates import UpdateSender

SECRET = "only the platform knows"


@pytest.fixture
def shard(world: World) -> Shard:
    return world.started_shard(token=2, job_secret=SECRET)


def signed(world: World, worker: str, number: int, **changes: Any) -> tuple[Header, memoryview]:
    """Return an update of the second subtask by ``worker``."""
    header, payload = world.update(
        1, 0, 2, 1, worker=worker, update=f"{worker}.1.{number}", **changes
    )
    return header.signed(worker_key(SECRET, world.job, worker), world.keys), payload


class TestSignature:
    def test_it_holds_for_its_worker_job_and_shard_only(self, world: World) -> None:
        header, _ = signed(world, "w", 1)
        key = worker_key(SECRET, world.job, "w")

        header.check_signature(key, world.keys)

        for wrong_key, keys in (
            (worker_key(SECRET, world.job, "v"), world.keys),
            (worker_key(SECRET, "other", "w"), world.keys),
            (worker_key("another", world.job, "w"), world.keys),
            (key, TensorKeys(world.job, 1)),
            (key, TensorKeys("other")),
        ):
            with pytest.raises(InvalidUpdate) as caught:
                header.check_signature(wrong_key, keys)
            assert caught.value.reason == UNSIGNED

    @pytest.mark.parametrize(
        "change",
        [{"worker": "v"}, {"update": "w.1.2"}, {"start": 1}, {"stop": 1}, {"checksum": 3},
         {"size": 0}, {"base": 1}, {"loss_sum": 1.5}, {"signature": ""}, {"signature": "ü" * 64}],
    )  # fmt: skip
    def test_a_changed_header_is_not_signed(self, world: World, change: dict[str, Any]) -> None:
        header, _ = signed(world, "w", 1)

        with pytest.raises(InvalidUpdate):
            header.model_copy(update=change).check_signature(
                worker_key(SECRET, world.job, "w"), world.keys
            )

    def test_an_update_whose_payload_could_be_anothers_is_not_accepted(self, world: World) -> None:
        key = worker_key(SECRET, world.job, "w")
        header, _ = world.update(1, 0, 2, 1, worker="w", update="v.1.1")

        with pytest.raises(InvalidUpdate):
            header.signed(key, world.keys).check_signature(key, world.keys)


class TestBlame:
    def test_what_nobody_signed_is_refused_and_blamed_on_nobody(
        self, world: World, shard: Shard
    ) -> None:
        for number in range(3 * REJECTIONS_BEFORE_QUARANTINE):
            header, payload = world.update(1, 0, 2, 1, worker="w", update=f"w.1.{number}")
            world.inject(header, bytes(payload))
        shard.turn()

        assert world.rejected() == {UNSIGNED: 3 * REJECTIONS_BEFORE_QUARANTINE}
        assert world.jobs.workers.quarantined(world.job) == {}
        assert {each["details"]["worker"] for each in world.events("update-rejected")} == {
            "unknown"
        }

    def test_a_forged_header_takes_nothing_from_the_update_that_it_names(
        self, world: World, shard: Shard
    ) -> None:
        sender = UpdateSender(world.tensors, world.keys, worker_key(SECRET, world.job, "w"))
        header, payload = world.update(1, 0, 2, 1, worker="w", update="w.1.1")
        forged = header.model_copy(update={"signature": "0" * 64})
        world.tensors.xadd(world.keys.stream, {"h": forged.model_dump_json()})
        assert sender.push(header, 0, payload).accepted

        shard.turn()

        assert world.rejected() == {UNSIGNED: 1}
        assert world.fate(header) == "applied"

    def test_one_bad_update_that_somebody_repeats_is_one_fault(
        self, world: World, shard: Shard
    ) -> None:
        header, payload = signed(world, "w", 1, checksum=1)
        for _ in range(2 * REJECTIONS_BEFORE_QUARANTINE):
            world.inject(header, bytes(payload))
            shard.turn()

        assert world.jobs.workers.quarantined(world.job) == {}

    def test_several_bad_ones_that_it_signed_are_too_many(self, world: World, shard: Shard) -> None:
        for number in range(2 * REJECTIONS_BEFORE_QUARANTINE):
            header, payload = signed(world, "w", number, checksum=1)
            world.inject(header, bytes(payload))
            shard.turn()

        assert world.jobs.workers.quarantined(world.job).keys() == {"w"}
        assert len(world.events("worker-quarantined")) == 1
        assert len(world.events("update-rejected")) == REJECTIONS_BEFORE_QUARANTINE


class TestWhatWorkersWriteOfTheirJob:
    @pytest.mark.parametrize(
        "facts",
        [b"", b"{", b"[]", b"null", b"{}", b"\xff", b'{"samples": "many"}',
         b'{"samples":1,"validation_samples":1,"layout":"","order_digest":"","shards":0}',
         b'{"samples":1,"validation_samples":1,"layout":"","order_digest":"","shards":9999999}'],
    )  # fmt: skip
    def test_facts_that_make_no_sense_are_said_to(self, world: World, facts: bytes) -> None:
        world.ledger.hset(world.ledger_keys.facts, "facts", facts)

        job = world.jobs.get(world.job)

        assert job.facts is None
        assert "facts that can't be read" in (job.invalid or "")
        assert [each.id for each in world.jobs.all()] == [world.job]

    @pytest.mark.parametrize(
        ("epoch", "result"),
        [
            ("one", b"{}"),
            ("1", b"[]"),
            ("1", b"{}"),
            ("1", b"5"),
            ("1", b"[" * 100_000),
            ("9" * 400, b"{}"),
            ("1", b'{"version": 1, "metrics": []}'),
            ("1", b'{"version":1,"metrics":{},"worker":"w","seconds":0,"at":1' + b"0" * 400 + b"}"),
            ("1", b'{"version":1,"metrics":{},"worker":"w","seconds":0,"at":1,"versions":[1,2]}'),
        ],
    )
    def test_results_that_make_no_sense_are_said_to(
        self, world: World, epoch: str, result: bytes
    ) -> None:
        world.ledger.hset(world.ledger_keys.evaluations, epoch, result)

        job = world.jobs.get(world.job)

        assert job.evaluations == ()
        assert f"evaluation {epoch[:20]}, which can't be read" in (job.invalid or "")

    def test_failures_and_counters(self, world: World) -> None:
        keys, ledger = world.ledger_keys, world.ledger
        ledger.rpush(keys.failures, b"{", b"null", b"\xff", b'{"worker": 1}')
        ledger.hset(keys.counters, "next", "many")

        assert world.jobs.failures(world.job) == []
        assert world.jobs.work(world.job)["next"] == 0
