"""Exchange of a repetition on real servers: who can write what, and content that is no state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from support.harness import RedisServer
from support.repeated import Machine, Noisy
from support.servers import allow_database, url_of
from support.world import World

from vcasgd.errors import StoreDenied
from vcasgd.store.acl import TENSORS_SCRIPTS, AclUsers, tensors_user
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.ledger.untrusted import Invalid
from vcasgd.store.tensors.chunks import CHUNK_BYTES
from vcasgd.verification.exchange import (
    KEPT_SECONDS,
    Claims,
    RepetitionExchange,
    RepetitionRequest,
    RepetitionResult,
    RepetitionTask,
    StateSizes,
)
from vcasgd.verification.verifier import Verifier
from vcasgd.worker.interval import encoded_counters

SECRET = "a secret of the cluster"
EVE, OWN = "job.join-eve-1", "job.own"
#: More than one chunk.
FLOATS, BYTES = 300_000, 1_500_000


@dataclass
class Parties:
    """The parameter server, a volunteer's worker, and one that repeats, with their own users."""

    server: RepetitionExchange
    eve: RepetitionExchange
    own: RepetitionExchange
    request: RepetitionRequest
    clients: dict[str, RedisClient]

    def task(self, world: World, sizes: StateSizes) -> RepetitionTask:
        header, _ = world.update(0, 0, 2, 1, worker=EVE, update=f"{EVE}.1.2")
        return RepetitionTask(
            id=self.request.id,
            by=OWN,
            header=header.model_dump_json(),
            integers="",
            restorations=0,
            sizes=sizes,
        )


@pytest.fixture
def parties(server: RedisServer, world: World) -> Iterator[Parties]:
    users = [tensors_user(SECRET, world.job, name) for name in (EVE, OWN)]
    AclUsers(world.ledger, TENSORS_SCRIPTS, 0).sync(users)
    for user in users:
        allow_database(world.ledger, user.name, 1)
    with ExitStack() as stack:
        clients = [connect(user.url(url_of(server, 1))) for user in users]
        for client in clients:
            stack.callback(client.close)
        yield Parties(
            *(RepetitionExchange(each, world.keys) for each in (world.tensors, *clients)),
            RepetitionRequest(id="0123456789abcdef", worker=EVE, update=f"{EVE}.1.2"),
            dict(zip((EVE, OWN), clients, strict=True)),
        )
        world.ledger.execute_command("ACL", "DELUSER", *(user.name for user in users))


def test_three_parties_exchange_a_repetition_and_nothing_is_left(
    parties: Parties, world: World
) -> None:
    before = world.tensor_keys()
    base, sent = torch.randn(FLOATS), torch.randn(FLOATS)
    states = [torch.randint(0, 255, (BYTES,), dtype=torch.uint8) for _ in range(2)]

    # The parameter server asks, the volunteer uploads, and another worker is asked to repeat it
    parties.server.request(parties.request, base, sent)
    assert parties.eve.requested() == parties.request
    assert parties.server.answer(parties.request) is None
    parties.eve.upload(parties.request, *states)
    sizes = parties.server.answer(parties.request)
    assert sizes == StateSizes(before=BYTES, after=BYTES)
    parties.server.assign(parties.task(world, sizes))

    # It receives everything, and reports
    task = parties.own.task()
    assert task is not None
    assert torch.equal(parties.own.vector(task, "base", FLOATS), base)
    assert torch.equal(parties.own.vector(task, "sent", FLOATS), sent)
    assert torch.equal(parties.own.state(task, "before", BYTES), states[0])
    assert torch.equal(parties.own.state(task, "after", BYTES), states[1])
    result = RepetitionResult(outcome="repeated", update=0.25, state=0.5)
    parties.own.report(task, result)
    assert parties.server.result(task) == result

    # All of it would expire
    added = world.tensor_keys() - before
    lives = [world.tensors.ttl(f"{world.keys.prefix}{key}") for key in added]
    assert all(0 < life <= KEPT_SECONDS for life in lives)
    parties.server.end(parties.request, FLOATS, sizes)
    assert world.tensor_keys() - before == {f"u:{OWN}.result.{task.id}:0"}


def test_nobody_answers_or_asks_for_another_one(parties: Parties, world: World) -> None:
    keys, eve = world.keys, parties.clients[EVE]
    for key in (
        keys.repetition("request"),
        keys.repetition("task"),
        keys.repetition("0123456789abcdef.base.0"),
        keys.payload_chunk(f"{OWN}.result.0123456789abcdef", 0),
        keys.payload_chunk(f"{OWN}.states.0123456789abcdef", 0),
    ):
        with pytest.raises(StoreDenied):
            eve.set(key, "x")
    # What an update contains is its worker's own business.
    with pytest.raises(StoreDenied):
        eve.get(keys.payload_chunk(f"{OWN}.1.1", 0))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda chunk: chunk[:-1], f"is {CHUNK_BYTES - 1} bytes"),
        (lambda chunk: chunk + b"x", f"is {CHUNK_BYTES + 1} bytes"),
        (lambda _: None, "a part of before is missing"),
    ],
)
def test_a_state_with_another_size_is_refused(
    parties: Parties, world: World, spoil: Callable[[bytes], bytes | None], message: str
) -> None:
    state = torch.zeros(BYTES, dtype=torch.uint8)
    parties.eve.upload(parties.request, state, state)
    key = world.keys.payload_chunk(f"{EVE}.states.{parties.request.id}.before", 0)
    spoiled = spoil(world.tensors.get(key))
    world.tensors.delete(key)
    if spoiled is not None:
        world.tensors.set(key, spoiled)
    task = parties.task(world, StateSizes(before=BYTES, after=BYTES))

    with pytest.raises(Invalid, match=message):
        parties.own.state(task, "before", BYTES)


def test_a_state_that_is_too_large_is_not_fetched(parties: Parties, world: World) -> None:
    task = parties.task(world, StateSizes(before=1 << 40, after=1))
    with pytest.raises(Invalid, match=f"at most {BYTES} are possible"):
        parties.own.state(task, "before", BYTES)


def test_a_server_that_is_nearly_full_has_no_room(parties: Parties, world: World) -> None:
    used = int(world.tensors.info("memory")["used_memory"])
    assert parties.server.has_room(1 << 50), "memory is not limited"
    world.tensors.config_set("maxmemory", 4 * used)
    try:
        assert parties.server.has_room(used)
        assert not parties.server.has_room(4 * used)
    finally:
        world.tensors.config_set("maxmemory", 0)


@pytest.mark.parametrize(("seconds", "outcome"), [(60.0, "repeated"), (0.0, "unable")])
def test_a_repetition_that_takes_too_long_ends(
    parties: Parties, world: World, seconds: float, outcome: str
) -> None:
    # Given a machine of one's own that has trained, and an interval of a volunteer's
    volunteer, own = Machine(Noisy()), Machine(Noisy(), subtask=1)
    own.interval()
    verifier = Verifier(parties.clients[OWN], world.job, OWN, lambda: False, seconds)
    verifier.end(own.learner, f"{OWN}.1", 0)
    base = volunteer.base[0]
    before, trained, after, facts = volunteer.interval()
    parties.server.request(parties.request, base, trained.update[:])
    parties.eve.upload(parties.request, before.to_bytes(), after.to_bytes())
    claims = Claims(planned=facts.planned, before=before.digest, after=after.digest)
    header, _ = world.update(facts.subtask, facts.start, facts.stop, 1, worker=EVE)
    counters = encoded_counters(trained.integers)
    more = {"batch": facts.batch, "claims": claims.model_dump_json(), "integers": counters}
    sizes = parties.server.answer(parties.request)
    assert sizes is not None
    task = RepetitionTask(
        id=parties.request.id,
        by=OWN,
        header=header.model_copy(update=more).model_dump_json(),
        integers=encoded_counters(volunteer.base[1]),
        restorations=0,
        sizes=sizes,
    )
    parties.server.assign(task)

    # When its time has ended, or not
    assert verifier.serve(own.learner)

    # Then it trains on
    result = parties.server.result(task)
    assert result is not None
    assert result.outcome == outcome, result
