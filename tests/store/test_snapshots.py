"""Readers always see a complete snapshot, whichever process writes, dies or is late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from support.harness import RedisServer
from support.servers import url_of
from support.waiting import PATIENCE
from torch import Tensor

from vcasgd.errors import Fenced, SnapshotMissing
from vcasgd.store import bulk_transfer
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors import chunks as module
from vcasgd.store.tensors import snapshot_store
from vcasgd.store.tensors.chunks import CHUNK_BYTES, outgoing
from vcasgd.store.tensors.snapshot import (
    Change,
    Meta,
    Record,
    Snapshot,
    UpdateTotals,
    encode_integers,
)
from vcasgd.store.tensors.snapshot_store import SnapshotStore
from vcasgd.store.tensors.updates import UpdateSender

KEYS = TensorKeys("job")


@pytest.fixture
def snapshots(tensors: RedisClient) -> SnapshotStore:
    return SnapshotStore(tensors, KEYS)


def meta_of(vector: Tensor, version: int, token: int) -> Meta:
    return Meta(version, token, vector.numel(), vector.numel(), "layout")


def publish(
    snapshots: SnapshotStore,
    vector: Tensor,
    version: int,
    token: int = 1,
    previous: Meta | None = None,
    positions: dict[int, int] | None = None,
) -> Meta:
    """Publish a version, as the parameter server does after each batch."""
    meta = meta_of(vector, version, token)
    replaced = snapshots.chunk_keys(previous) if previous else []
    snapshots.write(meta, vector, base=version - 1, instead_of=replaced)
    text = {str(subtask): at for subtask, at in (positions or {}).items()}
    fields = {"version": version, "token": token, "finished": 0, **text}
    change = Change(base=version - 1, fields=fields)
    snapshots.commit(token, meta, change)
    return meta


def constant(value: float, size: int = 1000) -> Tensor:
    return torch.full((size,), float(value))


def install(snapshots: SnapshotStore, vector: Tensor | None = None, token: int = 1) -> Meta:
    vector = constant(0) if vector is None else vector
    meta = meta_of(vector, 0, token)
    assert snapshots.install(token, meta, Record(), vector)
    return meta


def values(vector: Tensor) -> list[float]:
    return sorted(set(vector.tolist()))


def fetch(snapshots: SnapshotStore, size: int = 1000) -> tuple[Snapshot, Tensor]:
    out = torch.empty(size)
    return snapshots.fetch(out), out


def key_names(tensors: RedisClient) -> set[str]:
    return {key.decode().removeprefix(KEYS.prefix) for key in tensors.keys("*")}


def in_pieces(snapshots: SnapshotStore, meta: Meta) -> Tensor:
    """Return a vector that was read in pieces of at most 8 MiB."""
    pieces = [piece.clone() for piece in snapshots.pieces(meta)]
    assert max(map(len, pieces)) <= 8 * CHUNK_BYTES // 4
    return torch.cat(pieces)


class TestRoundTrip:
    CHUNK = CHUNK_BYTES // 4

    @pytest.mark.parametrize("halves", [False, True], ids=["whole", "in halves"])
    @pytest.mark.parametrize("size", [1, 7, CHUNK - 1, CHUNK, 2 * CHUNK + 1, 11 * CHUNK + 5])
    def test_every_size_comes_back_bit_by_bit(
        self, snapshots: SnapshotStore, size: int, halves: bool
    ) -> None:
        vector = torch.randn(size, generator=torch.Generator().manual_seed(size))
        vector[0] = -0.0
        meta = replace(meta_of(vector, 0, 1), halves=halves)
        assert snapshots.install(1, meta, Record(), vector)

        snapshot, out = fetch(snapshots, size)
        rounded = torch.empty(size)
        snapshots.fetch_rounded(rounded)

        assert snapshot.meta == meta
        assert out.numpy().tobytes() == vector.numpy().tobytes()
        assert torch.equal(in_pieces(snapshots, meta), vector)
        nearest = vector.to(torch.bfloat16).float() if halves else vector
        assert torch.equal((rounded - vector).abs(), (nearest - vector).abs())
        parts = 2 if halves else 1
        assert len(snapshots.chunk_keys(meta)) == parts * -(-size // (parts * self.CHUNK))

    def test_everything_of_a_snapshot_is_kept(self, snapshots: SnapshotStore) -> None:
        counters = torch.tensor([1, -5, 2**62])
        meta = replace(
            meta_of(constant(1), 41, 7),
            parameters=900,
            integers=encode_integers(counters),
            rule_state=True,
            totals=UpdateTotals(41, 820, 12, 3, 7.5, {"checksum": 2}, logged={"a": (0.5, 2)}),
            created_at=12.5,
        )
        record = Record(3, {12: 5, 14: 1})

        assert snapshots.install(7, meta, record, constant(1), constant(2))

        assert snapshots.read() == Snapshot(meta, record)
        assert torch.equal(snapshots.fetch_state(meta), constant(2))
        assert snapshots.version() == 41
        assert snapshots.read().meta.integer_vector().tolist() == counters.tolist()
        assert meta.totals.staleness_mean == 12 / 41


class TestCommit:
    def test_the_record_changes_with_the_version(self, snapshots: SnapshotStore) -> None:
        meta = install(snapshots)
        publish(snapshots, constant(1), 1, previous=meta, positions={4: 10, 5: 2})

        publish(snapshots, constant(2), 2, positions={4: 20})

        snapshot, out = fetch(snapshots)
        assert snapshot.record == Record(0, {4: 20, 5: 2})
        assert snapshot.meta.version == 2
        assert values(out) == [2.0]

    def test_repeated_it_is_harmless(self, snapshots: SnapshotStore, tensors: RedisClient) -> None:
        """The answer to the first attempt was lost."""
        install(snapshots)
        publish(snapshots, constant(1), 1, positions={4: 10})
        before, present = key_names(tensors), fetch(snapshots)[0]

        publish(snapshots, constant(1), 1, positions={4: 10})

        assert key_names(tensors) == before
        assert fetch(snapshots)[0] == present

    def test_repeated_it_does_not_undo_what_came_after(
        self, snapshots: SnapshotStore, tensors: RedisClient
    ) -> None:
        meta = install(snapshots)
        sender = UpdateSender(tensors, KEYS)
        sender.begin(4, 0, 10, 1)
        tensors.hset(KEYS.pushed, "4", "6|u")
        change = Change(0, fields={"version": 1, "token": 1, "finished": 0}, reset={"4": 0})
        new = replace(meta, version=1)
        snapshots.write(new, constant(1))
        snapshots.commit(1, new, change)
        tensors.hset(KEYS.pushed, "4", "3|v")  # pushed since then

        snapshots.commit(1, new, change)

        assert tensors.hget(KEYS.pushed, "4") == b"3|v"

    def test_a_finished_epoch_is_forgotten(self, snapshots: SnapshotStore) -> None:
        """The bits of the next epoch remain, which starts in the middle of a block."""
        meta = install(snapshots)
        new = replace(meta, version=1)
        snapshots.write(new, constant(1))
        fields = {"version": 1, "token": 1, "finished": 1}
        done = (0, 4095, 8191, 8192, 8201, 8202, 12288)

        snapshots.commit(1, new, Change(0, fields=fields, done=done, forget=(0, 8202)))

        assert snapshots.read().record == Record(1, {}, {2: b"\0\x04", 3: b"\x01"})


class TestFencing:
    def test_an_old_token_commits_nothing(
        self, snapshots: SnapshotStore, tensors: RedisClient
    ) -> None:
        install(snapshots, token=1)
        snapshots.takeover(2)
        publish(snapshots, constant(1), 1, token=2)
        before = fetch(snapshots)[0]

        with pytest.raises(Fenced, match="token 2 has taken over"):
            publish(snapshots, constant(-1), 1, token=1)

        snapshot, out = fetch(snapshots)
        assert snapshot == before
        assert values(out) == [1.0], "its chunks have names that no process uses"
        assert snapshots.delete_orphans(2, [snapshot.meta]) == 1, "of version 0"
        assert "s:1.2:0" in key_names(tensors)
        assert "s:1.1:0" not in key_names(tensors)

    def test_a_token_takes_over_once_and_for_all(self, snapshots: SnapshotStore) -> None:
        snapshots.takeover(2)
        snapshots.takeover(2)  # the answer was lost: again

        with pytest.raises(Fenced):
            snapshots.takeover(1)
        with pytest.raises(Fenced):
            snapshots.install(1, meta_of(constant(0), 0, 1), Record(), constant(0))
        snapshots.takeover(3)
        snapshot = Snapshot(install(snapshots, token=3), Record())
        with pytest.raises(Fenced):
            snapshots.pin(2, ["a"], snapshot)
        assert snapshots.pins() == {}


class TestInstall:
    def test_only_where_there_is_none(self, snapshots: SnapshotStore, tensors: RedisClient) -> None:
        install(snapshots, constant(1), token=1)
        before = key_names(tensors)

        late = meta_of(constant(2), 9, 2)
        assert not snapshots.install(2, late, Record(4, {}), constant(2))

        assert key_names(tensors) == before, "nothing is left of the attempt"
        assert values(fetch(snapshots)[1]) == [1.0]
        assert snapshots.version() == 0

    def test_a_second_first_snapshot_keeps_a_pinned_one(self, snapshots: SnapshotStore) -> None:
        """Two workers created it, or one of them twice because an answer was lost."""
        meta = meta_of(constant(1), 0, 0)
        assert snapshots.install(0, meta, Record(), constant(1))
        assert not snapshots.install(0, meta, Record(), constant(1))
        assert values(fetch(snapshots)[1]) == [1.0]
        snapshots.takeover(1)
        snapshots.pin(1, ["start"], snapshots.read())
        publish(snapshots, constant(2), 1)

        assert not snapshots.install(0, meta, Record(), constant(1))

        assert values(snapshots.fetch_pinned("start")[1]) == [1.0]

    def test_what_was_pushed_before_is_no_longer_on_its_way(
        self, snapshots: SnapshotStore, tensors: RedisClient
    ) -> None:
        tensors.hset(KEYS.pushed, "0", "3|u")
        tensors.hset(KEYS.tokens, "0", 9)
        tensors.xadd(KEYS.stream, {"h": "old"})

        install(snapshots)

        assert key_names(tensors) == {"fence", "meta", "applied", "news", "s:0.1:0"}


def test_every_reader_and_writer_raises_snapshot_missing(
    snapshots: SnapshotStore, tensors: RedisClient
) -> None:
    sender = UpdateSender(tensors, KEYS)
    meta = meta_of(constant(1), 1, 1)
    calls: list[Callable[[], object]] = [
        snapshots.version,
        snapshots.read,
        lambda: snapshots.fetch(torch.empty(1000)),
        lambda: snapshots.fetch_pinned("a"),
        lambda: snapshots.commit(1, meta, Change(0, fields={"version": 1})),
        lambda: snapshots.pin(1, ["a"], Snapshot(meta, Record())),
        lambda: sender.begin(0, 0, 10, 1),
        lambda: sender.status([(0, 0, 10, "u")]),
    ]
    for call in calls:
        with pytest.raises(SnapshotMissing):
            call()
    assert snapshots.view().version is None
    assert key_names(tensors) == set()


def test_a_reader_never_sees_a_mixture(
    server: RedisServer, snapshots: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read while a writer publishes; the vector of version v is v everywhere.

    Each chunk is requested after the previous one has arrived, so that writes occur in between.
    """
    monkeypatch.setattr(module, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(bulk_transfer, "DEPTH", 1)
    size = 8 * 1024 + 5
    metas = [install(snapshots, constant(0, size))]
    seen: list[int] = []
    stop = threading.Event()

    def write() -> None:
        client = connect(url_of(server, 1))
        own = SnapshotStore(client, KEYS)
        while not stop.wait(0.002):
            version = metas[-1].version + 1
            if version > 5 * (len(seen) + 1):
                continue  # Else, a slow reader would find each version replaced.
            before_last = metas[-2] if len(metas) > 1 else None
            metas.append(publish(own, constant(version, size), version, previous=before_last))
        client.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        out = torch.empty(size)
        while len(set(seen)) < 60:
            snapshot = snapshots.fetch(out)
            assert values(out) == [float(snapshot.meta.version)]
            seen.append(snapshot.meta.version)
    finally:
        stop.set()
        writer.join(PATIENCE)

    assert seen == sorted(seen), "versions never run backwards"


class TestRoom:
    """A publication removes the version before the present one while it writes the next one."""

    def test_both_together_take_the_room_of_one(
        self, snapshots: SnapshotStore, tensors: RedisClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "CHUNK_BYTES", 64)
        monkeypatch.setattr(snapshot_store, "REMOVED_CHUNKS", 4)
        first, second = install(snapshots), publish(snapshots, constant(1), 1)
        most = 0

        def counted(chunks: Iterator[memoryview]) -> Iterator[memoryview]:
            nonlocal most
            for chunk in chunks:
                yield chunk
                most = max(most, len(key_names(tensors)))

        monkeypatch.setattr(
            snapshot_store, "outgoing", lambda *args, **how: counted(outgoing(*args, **how))
        )
        before = len(key_names(tensors))
        third = publish(snapshots, constant(2), 2, previous=first)

        assert before <= most <= before + 1
        assert values(fetch(snapshots)[1]) == [2.0]
        assert tensors.exists(*snapshots.chunk_keys(second)) == len(snapshots.chunk_keys(second))
        assert not tensors.exists(*snapshots.chunk_keys(first))
        assert third.version == 2

    @pytest.mark.parametrize("change", ["failover", "takeover"])
    def test_nothing_is_removed_if_another_version_may_be_the_present_one(
        self, snapshots: SnapshotStore, tensors: RedisClient, change: str
    ) -> None:
        first = install(snapshots)
        meta = meta_of(constant(2), 2, 1)
        base = 0 if change == "takeover" else 1
        if change == "takeover":
            snapshots.takeover(2)

        snapshots.write(meta, constant(2), base=base, instead_of=snapshots.chunk_keys(first))

        assert values(fetch(snapshots)[1]) == [0.0]


def test_delete_all_leaves_nothing_of_the_job_and_everything_of_others(
    snapshots: SnapshotStore, tensors: RedisClient
) -> None:
    others = SnapshotStore(tensors, TensorKeys("job-2"))
    assert others.install(1, meta_of(constant(1), 0, 1), Record(), constant(1))
    before = key_names(tensors)
    install(snapshots)
    publish(snapshots, constant(1), 1)
    snapshots.request_pin("a")
    snapshots.pin(1, ["b"], snapshots.read())
    tensors.set(KEYS.payload_chunk("u", 0), b"left behind")
    tensors.xadd(KEYS.stream, {"h": "x"})

    assert snapshots.delete_all() == 10

    assert key_names(tensors) == before
    assert snapshots.delete_all() == 0
