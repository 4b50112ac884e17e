"""Thousands of malformed headers and bodies are refused, counted once, and removed.

Every example is malformed by construction, so an accepted one is a defect. The examples
are the same in every run.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.world import MakeWorld, World, layout_of, spec_of
from xxhash import xxh3_64_intdigest

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.vector import LARGEST_VALUE
from vcasgd.parameter_server.blend import ModelState, ShardConfig
from vcasgd.parameter_server.reports import INNOCENT
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import ModelFacts
from vcasgd.store.tensors.chunks import CHUNK_BYTES
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import Meta, Record, Snapshot, encode_integers

#: of the examples below; with up to 24 entries each on each of two servers
TURNS, LARGE_TURNS = 250, 15
MAX_ENTRIES = 24


def fixed(examples: int) -> Any:
    """The same examples every time, so many of them however long they take."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# --- what can be wrong ------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**53, 2**80)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "a:b", "}", "\u0000", "ü", "x" * 200, "1", "-0", "\U0001f600" * 30])
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
raw_texts = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [b"", b"null", b"[]", b"{}", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{" * 5000,
         b"[" * 100_000, b'{"a":' * 50_000, b'"' + b"\\u0000" * 1000 + b'"',
         b'{"codec":"\\ud800"}', b'{"' + b"x" * 500_000 + b'":1}', b" " * 2_000_000]
    ),
)  # fmt: skip

#: fields that an honest header may do without: one more of them is no second one
OPTIONAL = {"claims", "integers", "loss_sum", "signature"}
#: overrides of a header that is honest otherwise: [0, 2) of subtask 1
wrong_places = st.one_of(
    st.fixed_dictionaries({"layout": st.text(max_size=64)}),
    st.fixed_dictionaries({"codec": st.text(max_size=32).filter(lambda name: name != "float32")}),
    st.fixed_dictionaries({"shard": st.integers(1, 2**53 - 1)}),
    st.fixed_dictionaries({"subtask": st.integers(6, 2**53 - 1)}),
    st.fixed_dictionaries({"start": st.integers(1, 2**53 - 1)}),
    st.fixed_dictionaries({"stop": st.just(0) | st.integers(5, 2**53 - 1)}),
    st.fixed_dictionaries({"start": st.integers(-(2**70), -1), "stop": st.integers()}),
)
#: those that only somebody who has the payload or the record can see
wrong_details = st.one_of(
    st.fixed_dictionaries({"subtask": st.just(0), "start": st.integers(0, 1)}),
    st.fixed_dictionaries({"size": st.integers(0, 2**53 - 1).filter(lambda size: size != 52)}),
    st.fixed_dictionaries({"checksum": st.integers(0, 2**64 - 1)}),
    st.fixed_dictionaries({"integers": st.text(min_size=1, max_size=40)}),
    st.integers(2, 50).map(
        lambda count: {"integers": encode_integers(torch.zeros(count, dtype=torch.int64))}
    ),
)
wrong_numbers = st.sampled_from(
    [math.nan, -math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 2 * LARGEST_VALUE]
)


@dataclass(frozen=True)
class Garbage:
    """A damaged update. ``text`` makes its header's text from that of a valid one."""

    fields: dict[str, Any]
    text: Callable[[str], bytes] = str.encode
    number: float | None = None  # instead of one of the vector's
    at: float = 0.0  # where something is spoilt, as a part of the whole
    body: str = "whole"
    entry: str = "h"


def insert(text: str, key: str, value: Any) -> bytes:
    """One more field, the last; the name may be there already."""
    return f"{text[:-1]},{json.dumps(key)}:{json.dumps(value)}}}".encode()


def mutate(text: str, at: float, junk: bytes) -> bytes:
    raw = text.encode()
    place = int(at * len(raw))
    return raw[:place] + junk + raw[place + len(junk) :]


parts = st.floats(0, 1, exclude_max=True)
#: Damage to a chunk of the payload.
BODIES: dict[str, Callable[[RedisClient, str, bytes], object]] = {
    "missing": lambda *_: None,
    "empty": lambda tensors, key, _: tensors.set(key, b""),
    "shorter": lambda tensors, key, chunk: tensors.set(key, chunk[:-1]),
    "longer": lambda tensors, key, chunk: tensors.set(key, chunk + b"x"),
    "flipped": lambda tensors, key, chunk: tensors.set(key, bytes([chunk[0] ^ 1]) + chunk[1:]),
    "list": lambda tensors, key, chunk: tensors.rpush(key, chunk),
    "set": lambda tensors, key, chunk: tensors.sadd(key, chunk),
    "hash": lambda tensors, key, chunk: tensors.hset(key, "a", chunk),
    "zset": lambda tensors, key, chunk: tensors.zadd(key, {chunk: 1}),
    "stream": lambda tensors, key, chunk: tensors.xadd(key, {"a": chunk}),
}
bodies = st.sampled_from(sorted(BODIES))
spoilt_headers = st.one_of(
    st.builds(lambda raw: Garbage({}, lambda _text: raw), raw_texts),
    st.builds(lambda key, value: Garbage({}, lambda text: insert(text, key, value)),
              st.text(max_size=10) | st.just("x" * 10_000), anything),
    st.builds(lambda key: Garbage({}, lambda text: insert(text, key, "twice")),
              st.sampled_from(sorted(Header.model_fields.keys() - OPTIONAL))),
    # the layout is wrong as well: what the junk leaves may be valid
    st.builds(lambda at, junk: Garbage({"layout": "x"}, lambda text: mutate(text, at, junk)),
              parts, st.binary(min_size=1, max_size=4)),
    st.builds(Garbage, wrong_places),
)  # fmt: skip
garbage = st.one_of(
    spoilt_headers,
    st.builds(Garbage, wrong_details),
    st.builds(lambda number, at: Garbage({}, number=number, at=at), wrong_numbers, parts),
    st.builds(lambda body, at: Garbage({}, body=body, at=at), bodies, parts),
    st.builds(lambda entry: Garbage({}, entry=entry), st.sampled_from(["", "H", "x" * 1000])),
)  # fmt: skip


def add(world: World, spoilt: Garbage) -> None:
    """Write garbage to the keys of an update."""
    vector = world.delta(1, 0, 2)
    if spoilt.number is not None:
        vector[int(spoilt.at * len(vector))] = spoilt.number
    header, payload = world.update(1, 0, 2, 1, vector=vector, worker="rogue")
    # bypasses the checks of the class, as only a broken worker does
    header = header.model_copy(update=spoilt.fields)
    raw = bytes(payload)
    hit = int(spoilt.at * -(-len(raw) // CHUNK_BYTES))
    for index, start in enumerate(range(0, len(raw), CHUNK_BYTES)):
        key, chunk = world.keys.payload_chunk(header.update, index), raw[start:][:CHUNK_BYTES]
        if index == hit and spoilt.body in BODIES:
            BODIES[spoilt.body](world.tensors, key, chunk)
        else:
            world.tensors.set(key, chunk)
    text = spoilt.text(json.dumps(header.model_dump()))
    world.tensors.xadd(world.keys.stream, {spoilt.entry: text})


# --- rows, without a server --------------------------------------------------------------------


def test_rows_that_are_spoilt_change_nothing_or_are_numbers() -> None:
    # Given a table of 300 rows and one statistic, and a payload of five rows
    update = {"rule": "async-local-sgd", "eta": 1.0, "codec": "rows"}
    layout, spec = layout_of(300, table=True), spec_of(update=update)
    config = ShardConfig(spec, ModelFacts(300, 1, layout.to_json(), ""))
    meta = Meta(0, 0, layout.floats, layout.parameters, layout.digest())
    honest = struct.pack("<6I6f", 5, 0, 7, 8, 200, 299, *[1.0] * 6)
    refused: set[str] = set()
    applied = 0

    @fixed(200)
    @given(
        st.lists(st.tuples(st.integers(0, 47), st.integers(0, 255)), max_size=3),
        st.sampled_from([0, 0, 0, 4, 8, 1]),
        st.binary(max_size=8),
    )
    def spoil(bytes_changed: list[tuple[int, int]], cut: int, more: bytes) -> None:
        nonlocal applied
        raw = bytearray(honest)
        for at, value in bytes_changed:
            raw[at] = value
        raw = raw[: len(raw) - cut] + more
        weights = torch.zeros(layout.floats)
        model = ModelState(config, Snapshot(meta, Record()), weights)
        header = Header(
            update="u1", worker="w", subtask=1, start=0, stop=2, base=0, token=1, codec="rows",
            size=len(raw), checksum=0, layout=layout.digest(),
        )  # fmt: skip
        try:
            model.check(header)
            model.payload(header)[:] = raw
            model.inspect(header, model.payload(header), 0)
            model.blend("1-0", header, [])
        except InvalidUpdate as error:
            refused.add(error.reason)
        else:
            applied += 1
        assert bool(weights.any()) <= model.batch.applied
        assert bool(torch.isfinite(weights).all())

    spoil()

    assert refused == {"length", "rows", "non-finite"}
    assert 10 < applied < 190


# --- headers and bodies, through a real server ------------------------------------------------


def dispose(world: World, shard: Shard, heap: list[Garbage]) -> None:
    """Check that each entry is counted once and removed, and the model is unchanged."""
    before, weights = world.snapshots.read(), world.vector().numpy().tobytes()
    for spoilt in heap:
        add(world, spoilt)

    assert shard.turn() == len(heap)

    after = world.snapshots.read()
    assert world.vector().numpy().tobytes() == weights
    assert (after.meta.version, after.record) == (before.meta.version, before.record)
    assert after.meta.integers == before.meta.integers
    assert after.meta.totals.samples == before.meta.totals.samples
    counted = sum(after.meta.totals.rejected.values()) - sum(before.meta.totals.rejected.values())
    assert counted == len(heap)
    assert world.reader.waiting() == 0


def busy_shard(world: World) -> Shard:
    """A job with samples [0, 2) of subtask 0 applied."""
    shard = world.shard()
    world.apply(shard, 0, 0, 2)
    assert world.snapshots.version() == 1
    return shard


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Each refusal is a warning."""
    caplog.set_level(logging.CRITICAL, logger="vcasgd.parameter_server.reports")


@pytest.mark.ci
def test_a_parameter_server_refuses_all_of_it(world: World) -> None:
    shard, count = busy_shard(world), 0

    @fixed(TURNS)
    @given(st.lists(garbage, min_size=MAX_ENTRIES // 2, max_size=MAX_ENTRIES))
    # the rarest reasons, which chance alone might miss
    @example([Garbage({"start": 1}), Garbage({"subtask": 0})])
    def refuse(heap: list[Garbage]) -> None:
        nonlocal count
        dispose(world, shard, heap)
        count += len(heap)

    refuse()

    assert count >= TURNS * MAX_ENTRIES // 2
    job = world.jobs.get(world.job)
    assert sum(job.totals["rejected"].values()) == count
    # No update is older than a rollback here.
    assert job.totals["rejected"].keys() >= INNOCENT - {"rolled-back", "suspect"} | {
        "header", "shard", "layout", "codec", "range", "length", "missing", "checksum",
        "non-finite", "integers",
    }  # fmt: skip
    assert "rogue" in world.jobs.workers.quarantined(world.job)
    assert world.leases("rogue").acquire().quarantined
    world.push(1, 0, 2, worker="honest")
    assert shard.turn() == 1
    world.assert_exact()


def test_bodies_of_several_chunks(make_world: MakeWorld) -> None:
    world = make_world(samples=CHUNK_BYTES // 4 + 1000)
    shard = busy_shard(world)

    @fixed(LARGE_TURNS)
    @given(
        st.lists(
            st.builds(
                lambda body, number, at: Garbage({}, body=body, number=number, at=at),
                bodies,
                st.none() | wrong_numbers,
                parts,
            ),
            min_size=1,
            max_size=4,
        )
    )
    def refuse(heap: list[Garbage]) -> None:
        dispose(world, shard, heap)

    refuse()

    world.push(1, 0, 2)
    assert shard.turn() == 1
    world.assert_exact()


def test_a_value_at_the_edge_of_what_is_allowed(world: World) -> None:
    """The header of the damaged payloads is valid."""
    shard = busy_shard(world)
    vector = world.delta(1, 0, 2)
    vector[3] = struct.unpack("<f", struct.pack("<f", LARGEST_VALUE))[0] / 2
    header, payload = world.update(1, 0, 2, 1, vector=vector)
    assert header.checksum == xxh3_64_intdigest(payload)

    world.inject(header, payload)

    assert shard.turn() == 1
    assert world.snapshots.version() == 2
