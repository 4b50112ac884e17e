"""Checkpoints in a folder: atomic writes, and detection of damage."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from vcasgd.errors import CheckpointDamaged, NotFound
from vcasgd.learning.layout import Layout
from vcasgd.learning.shards import Cut
from vcasgd.learning.vector import gather
from vcasgd.storage.checkpoints import Checkpoints, StoredCheckpoint
from vcasgd.storage.model_checkpoints import ModelCheckpoints, parse
from vcasgd.storage.objects import Storage
from vcasgd.store.tensors.snapshot import Meta, Record, Snapshot, UpdateTotals, encode_integers


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model(torch.randn(8, 3))  # the running statistics and their counter have values
    return model


def snapshot_of(model: nn.Module, version: int = 7) -> tuple[Snapshot, Layout, Tensor]:
    layout = Layout.of(model)
    floats, integers = gather(model, layout)
    meta = Meta(
        version=version,
        token=3,
        floats=layout.floats,
        parameters=layout.parameters,
        layout=layout.digest(),
        integers=encode_integers(integers),
        totals=UpdateTotals(version, 100, 12, 4, 33.5, {"checksum": 1}),
        created_at=12.5,
    )
    return Snapshot(meta, Record(2, {40: 5, 41: 1})), layout, floats


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "storage"


@pytest.fixture
def checkpoints(folder: Path) -> ModelCheckpoints:
    return ModelCheckpoints(Storage(f"file://{folder}"), "job")


def in_pieces(vector: Tensor) -> Callable[[], Iterator[Tensor]]:
    """Return a vector that is read in pieces of five, which aren't those of its tensors."""
    return lambda: iter(vector.split(5))


def write(checkpoints: ModelCheckpoints, version: int = 7, seed: int = 0) -> StoredCheckpoint:
    snapshot, layout, floats = snapshot_of(small_model(seed), version)
    return checkpoints.write((snapshot,), layout, in_pieces(floats))


def path_of(folder: Path, stored: StoredCheckpoint) -> Path:
    return folder / "jobs" / "job" / "checkpoints" / stored.name


class TestRoundTrip:
    def test_everything_comes_back(self, checkpoints: ModelCheckpoints) -> None:
        snapshot, layout, floats = snapshot_of(small_model())

        stored = checkpoints.write((snapshot,), layout, in_pieces(floats))

        loaded = checkpoints.read(stored.name)
        assert loaded.whole == (snapshot,)
        assert loaded.floats.numpy().tobytes() == floats.numpy().tobytes()
        assert torch.equal(loaded.integers, snapshot.meta.integer_vector())
        assert checkpoints.all() == [stored]
        assert stored.name == f"v000000000007-{stored.digest}.safetensors"

    def test_opens_with_plain_safetensors(
        self, checkpoints: ModelCheckpoints, folder: Path
    ) -> None:
        model = small_model()

        path = path_of(folder, write(checkpoints))

        other = small_model(seed=1)
        other.load_state_dict(safetensors.torch.load_file(path))
        for name, tensor in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor), name
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            document = json.loads(file.metadata()["vcasgd"])
        (shard,) = document["shards"]
        assert shard["meta"]["version"] == 7
        assert shard["record"] == {
            "finished": 2, "positions": {"40": 5, "41": 1}, "done": {},
        }  # fmt: skip


def flip_a_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": flip_a_bit,
    "cut off": lambda data: data[:-1],
    "cut in the header": lambda data: data[:20],
    "empty": lambda _: b"",
    "one byte more": lambda data: data + b"\0",
    "something else": lambda data: b"\0" * len(data),
}


class TestDamage:
    def test_the_one_before_is_used_and_said_so(
        self, checkpoints: ModelCheckpoints, folder: Path
    ) -> None:
        whole = write(checkpoints, 3)
        for version in (5, 9):
            path = path_of(folder, write(checkpoints, version))
            path.write_bytes(flip_a_bit(path.read_bytes()))
        errors: list[CheckpointDamaged] = []

        loaded = checkpoints.newest(errors.append)

        assert loaded is not None
        assert loaded.name == whole.name
        assert "v000000000009" in str(errors[0])
        assert "v000000000005" in str(errors[1])


class TestStream:
    @pytest.fixture(autouse=True)
    def small_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Storage.stream, "__defaults__", (1000,))

    def test_chunks_and_size_are_those_of_the_file(
        self, checkpoints: ModelCheckpoints, folder: Path
    ) -> None:
        stored = write(checkpoints)

        stream = checkpoints.open_stream(stored.name)

        chunks = list(stream.chunks)
        assert len(chunks) > 1
        assert b"".join(chunks) == path_of(folder, stored).read_bytes()
        assert stream.size == sum(map(len, chunks))

    @pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
    def test_a_damaged_file_is_never_complete(
        self, checkpoints: ModelCheckpoints, folder: Path, damage: Callable[[bytes], bytes]
    ) -> None:
        stored = write(checkpoints)
        path = path_of(folder, stored)
        path.write_bytes(damage(path.read_bytes()))
        chunks = []

        stream = checkpoints.open_stream(stored.name)
        with pytest.raises(CheckpointDamaged, match="digest does not match"):
            chunks.extend(stream.chunks)

        assert sum(map(len, chunks)) < max(1, stream.size)
        with pytest.raises(CheckpointDamaged, match=stored.name):
            checkpoints.read(stored.name)

    def test_a_file_that_is_pruned_meanwhile_is_an_error(
        self, checkpoints: ModelCheckpoints
    ) -> None:
        name = write(checkpoints).name
        stream = checkpoints.open_stream(name)
        next(stream.chunks)
        checkpoints.prune(1, frozenset())
        write(checkpoints, version=8)

        checkpoints.prune(1, frozenset())

        with pytest.raises(NotFound):
            list(stream.chunks)


class TestWrongContent:
    """The digest is right, but the content is invalid."""

    @pytest.fixture
    def written(self, tmp_path: Path) -> Callable[..., Path]:
        snapshot, layout, floats = snapshot_of(small_model())

        def build(document: Any = None, **changes: Any) -> Path:
            tensors = {
                entry.name: entry.view(floats, snapshot.meta.integer_vector()).contiguous()
                for entry in layout.entries
            }
            tensors |= changes.pop("tensors", {})
            shard = snapshot.to_dict()
            shard |= {name: changes.pop(name) for name in ("meta", "record") if name in changes}
            whole = {"shards": [shard], "layout": layout.to_json(), **changes}
            text = json.dumps(whole if document is None else document)
            path = tmp_path / "x.safetensors"
            safetensors.torch.save_file(tensors, path, metadata={"vcasgd": text})
            return path

        return build

    @pytest.mark.parametrize(
        "changes",
        [
            {"meta": {}},
            {"meta": None},
            {"meta": asdict(replace(snapshot_of(small_model())[0].meta, floats=1))},
            {"record": {}},
            {"record": {"finished": "?", "positions": {}}},
            {"record": {"finished": 0, "positions": []}},
            {"record": {"finished": 0, "positions": {"a": 1}}},
            {"shards": []},
            {"shards": None},
            {"layout": "[]x"},
            {"layout": "{}"},
            {"layout": None},
            {"document": {}},
            {"document": []},
            {"document": "text"},
        ],
        ids=lambda changes: repr(changes)[:40],
    )
    def test_metadata(self, written: Callable[..., Path], changes: dict[str, Any]) -> None:
        with pytest.raises(CheckpointDamaged):
            parse(written(**changes))

    @pytest.mark.parametrize(
        ("name", "tensor", "said"),
        [
            # One number would be broadcast to the whole layer.
            ("0.weight", torch.zeros(1), r"0\.weight"),
            ("1.num_batches_tracked", torch.tensor(99), "counters"),
        ],
    )
    def test_a_tensor(
        self, written: Callable[..., Path], name: str, tensor: Tensor, said: str
    ) -> None:
        with pytest.raises(CheckpointDamaged, match=said):
            parse(written(tensors={name: tensor}))


class TestShards:
    """A model over several store nodes: one file, with the record of each shard."""

    @pytest.fixture
    def cut(self) -> Cut:
        layout = Layout.of(small_model())
        return Cut(layout.floats, layout.parameters, 3)

    def write(
        self,
        checkpoints: ModelCheckpoints,
        cut: Cut,
        versions: tuple[int, ...],
        state: Tensor | None = None,
    ) -> StoredCheckpoint:
        snapshot, layout, floats = snapshot_of(small_model())
        whole = tuple(
            Snapshot(
                replace(
                    snapshot.meta,
                    version=version,
                    floats=part.floats,
                    parameters=part.parameters,
                    integers=snapshot.meta.integers if part.shard == 0 else "",
                    # the first has not applied anything yet
                    rule_state=state is not None and part.shard > 0,
                ),
                Record(2, {40 + part.shard: 5}),
            )
            for part, version in zip(cut.parts, versions, strict=True)
        )
        rule_state = None if state is None else in_pieces(state)
        return checkpoints.write(whole, layout, in_pieces(floats), rule_state)

    def test_each_comes_back_with_its_own_record(
        self, checkpoints: ModelCheckpoints, cut: Cut
    ) -> None:
        _, _, floats = snapshot_of(small_model())

        name = self.write(checkpoints, cut, (7, 8, 9)).name

        for part, version in zip(cut.parts, (7, 8, 9), strict=True):
            loaded = checkpoints.read(name, part.shard, 3)
            snapshot = loaded.whole[part.shard]
            assert snapshot.meta.version == version
            assert snapshot.record == Record(2, {40 + part.shard: 5})
            assert torch.equal(loaded.floats, part.of(floats))
            assert torch.equal(loaded.integers, loaded.whole[0].meta.integer_vector())

    def test_each_gets_back_what_its_rule_remembers(
        self, checkpoints: ModelCheckpoints, cut: Cut
    ) -> None:
        state = torch.arange(float(cut.floats))

        name = self.write(checkpoints, cut, (0, 8, 9), state).name

        first, second, third = (checkpoints.read(name, shard, 3).state for shard in range(3))
        assert first is None
        assert second is not None
        assert torch.equal(second, cut.parts[1].of(state))
        assert third is not None
        assert torch.equal(third, cut.parts[2].of(state))

    @pytest.mark.parametrize("has_state", [False, True])
    def test_each_reads_only_its_part(
        self,
        checkpoints: ModelCheckpoints,
        cut: Cut,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        has_state: bool,
    ) -> None:
        monkeypatch.setattr("vcasgd.storage.checkpoints.PIECE_BYTES", 8)
        state = torch.arange(float(cut.floats)) if has_state else None
        stored = self.write(checkpoints, cut, (7, 8, 9), state)
        path = path_of(folder, stored)
        whole = path.read_bytes()
        vectors = range(len(whole) - (1 + has_state) * 4 * cut.floats, len(whole), 4 * cut.floats)
        _, _, floats = snapshot_of(small_model())
        for damaged in cut.parts:
            data, middle = bytearray(whole), (damaged.start + damaged.stop) // 2
            for start in vectors:
                data[start + 4 * middle] ^= 1
            path.write_bytes(data)

            for part in cut.parts:
                if part is damaged:
                    with pytest.raises(CheckpointDamaged, match="digest does not match"):
                        checkpoints.read(stored.name, part.shard, 3)
                else:
                    loaded = checkpoints.read(stored.name, part.shard, 3)
                    assert torch.equal(loaded.floats, part.of(floats))

    @pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
    @pytest.mark.parametrize("of", ["", ".pieces"], ids=["file", "digests"])
    def test_damage_of_the_digests_alone_does_not_matter(
        self,
        checkpoints: ModelCheckpoints,
        cut: Cut,
        folder: Path,
        of: str,
        damage: Callable[[bytes], bytes],
    ) -> None:
        stored = self.write(checkpoints, cut, (7, 8, 9))
        path = path_of(folder, stored)
        path = path.with_name(path.name + of)
        path.write_bytes(damage(path.read_bytes()))

        if of:
            assert checkpoints.read(stored.name, 1, 3).name == stored.name
            # An older checkpoint has none.
            path.unlink()
            assert checkpoints.read(stored.name, 1, 3).name == stored.name
        else:
            with pytest.raises(CheckpointDamaged):
                checkpoints.read(stored.name, 1, 3)

    def test_a_header_beyond_the_end_is_damage(
        self, checkpoints: ModelCheckpoints, cut: Cut, folder: Path
    ) -> None:
        """Someone made it, because its digests are right."""
        stored = self.write(checkpoints, cut, (7, 8, 9))
        path = path_of(folder, stored)
        data = (1 << 45).to_bytes(8, "little") + path.read_bytes()[8:]
        digest = hashlib.sha256(data).hexdigest()
        name = stored.name.replace(stored.digest, digest)
        path.with_name(name).write_bytes(data)
        path.with_name(f"{name}.pieces").write_text(digest)

        with pytest.raises(CheckpointDamaged):
            checkpoints.read(name, 1, 3)

    def test_one_of_another_number_of_shards_is_refused(
        self, checkpoints: ModelCheckpoints, cut: Cut
    ) -> None:
        errors: list[str] = []
        older = self.write(checkpoints, cut, (3, 3, 3))
        write(checkpoints, version=7)

        found = checkpoints.newest(lambda error: errors.append(error.message), 1, 3)

        assert found is not None
        assert found.name == older.name
        assert len(errors) == 1
        assert "has 1 shards, one per store node, but this job has 3" in errors[0]


class TestListing:
    def test_oldest_first_and_only_checkpoints(
        self, checkpoints: ModelCheckpoints, folder: Path
    ) -> None:
        stored = [write(checkpoints, version) for version in (1_000_000, 20, 3)]
        base = path_of(folder, stored[0]).parent
        (base / "notes.txt").write_text("x")
        (base / "v1-abc.safetensors").write_text("x")
        (base / f"{stored[0].name}.part").write_text("x")

        assert checkpoints.all() == stored[::-1]

    @pytest.mark.parametrize(
        "name", ["x", "../../../etc/passwd", "v000000000001-" + "0" * 64 + ".safetensors/..", ""]
    )
    def test_what_is_no_name_is_not_found(self, checkpoints: ModelCheckpoints, name: str) -> None:
        with pytest.raises(NotFound) as caught:
            checkpoints.open_stream(name)
        assert caught.value.status == 404


def test_pruning_keeps_the_newest_and_the_protected(
    checkpoints: ModelCheckpoints, folder: Path
) -> None:
    stored = [write(checkpoints, version) for version in range(1, 7)]

    gone = checkpoints.prune(2, frozenset({stored[1].name}))

    assert gone == [stored[index].name for index in (0, 2, 3)]
    kept = [stored[1], stored[4], stored[5]]
    assert checkpoints.all() == kept
    files = {each.name for each in path_of(folder, stored[1]).parent.iterdir()}
    assert files == {each.name + end for each in kept for end in ("", ".pieces")}


#: Writes a checkpoint of three pieces, and is killed at one of the calls of the storage.
KILLED = """
import os, signal, sys
from vcasgd.storage.checkpoints import PIECE_BYTES, Checkpoints
from vcasgd.storage.objects import Storage

class Killed(Storage):
    def put(self, *arguments):
        if sys.argv[2] == "after the file":
            os.kill(os.getpid(), signal.SIGKILL)
        super().put(*arguments)

def chunks():
    global passes
    passes += 1
    yield bytes(PIECE_BYTES)
    yield bytes(PIECE_BYTES)
    if passes == 2 and sys.argv[2] == "in the file":
        os.kill(os.getpid(), signal.SIGKILL)
    yield bytes(PIECE_BYTES)

passes = 0
Checkpoints(Killed(sys.argv[1]), "job").put((9,), chunks)
"""


@pytest.mark.parametrize("when", ["in the file", "after the file"])
def test_a_process_that_is_killed_leaves_nothing_that_stays(
    checkpoints: ModelCheckpoints, folder: Path, when: str
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, f"file://{folder}", when], check=False)
    assert killed.returncode == -signal.SIGKILL
    base = folder / "jobs" / "job" / "checkpoints"
    assert list(base.iterdir())

    last = write(checkpoints, 10)
    checkpoints.prune(1, frozenset())

    assert {each.name for each in base.iterdir()} == {last.name, f"{last.name}.pieces"}


def test_what_a_killed_process_left_takes_no_room_from_the_next_write(folder: Path) -> None:
    command = [sys.executable, "-c", KILLED, f"file://{folder}", "in the file"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (left,) = (folder / "jobs" / "job" / "checkpoints").iterdir()

    def chunks() -> Iterator[bytes]:
        assert not left.exists()
        yield b"content"

    Checkpoints(Storage(f"file://{folder}"), "job").put((10,), chunks)
