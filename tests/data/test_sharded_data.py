"""Sharded data sets: formats, index, bounded caches, and reads from folders and S3."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import torch
from moto.server import ThreadedMotoServer
from safetensors.torch import save
from support.waiting import PATIENCE, await_truth
from torch import Tensor, nn
from typer.testing import CliRunner

import vcasgd
from vcasgd.cli.commands import app
from vcasgd.data import ShardedDataset, ShardIndex, make_index
from vcasgd.data.dataset import DiskCache, ShardCache, storage_at
from vcasgd.data.shards import DataShard
from vcasgd.errors import DataError, SpecError, StorageUnavailable
from vcasgd.spec.job import JobSpec
from vcasgd.worker.interval import Base
from vcasgd.worker.learner import Learner

#: samples in a shard
SIZE = 10


def npz(first: int) -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.arange(first, first + SIZE, dtype=np.float32), y=np.ones((SIZE, 2)))
    return file.getvalue()


def safetensors(first: int) -> bytes:
    x = torch.arange(first, first + SIZE, dtype=torch.float32)
    return save({"x": x, "y": torch.ones(SIZE, 2, dtype=torch.float64)})


def tar(first: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in range(first, first + SIZE):
            for extension, data in {"txt": str(number), "cls": "7", "bin": "raw"}.items():
                member = tarfile.TarInfo(f"some/folder/{number:06}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data.encode()))
    return file.getvalue()


def folder(path: Path, shards: int = 3) -> Path:
    """Shard of arrays whose samples are their own indices."""
    path.mkdir()
    for number in range(shards):
        (path / f"part-{number}.npz").write_bytes(npz(SIZE * number))
    make_index(storage_at(path))
    return path


class Bucket:
    def __init__(self, name: str) -> None:
        self.url = f"s3://{name}/set"
        self._name = name
        self._client = boto3.client("s3")
        self._client.create_bucket(Bucket=name)
        for number in range(4):
            self.put(f"part-{number}.npz", npz(SIZE * number))
        make_index(storage_at(self.url))

    def put(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._name, Key=f"set/{name}", Body=data)

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._name, Key=f"set/{name}")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bucket:
    variables = {
        "ENDPOINT_URL": s3, "ALLOW_HTTP": "true", "ACCESS_KEY_ID": "nobody",
        "SECRET_ACCESS_KEY": "nothing", "DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return Bucket(f"bucket-{abs(hash(request.node.name)):x}")


def kept(cache: Path) -> list[str]:
    """Return the digests of the shards on disk, without files that are being written."""
    return [path.name for path in cache.iterdir() if len(path.name) == 64]


def xs(samples: list[Any]) -> list[float]:
    return [float(sample["x"]) for sample in samples]


# --- forms -----------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "suffix"), [(npz, "npz"), (safetensors, "safetensors")])
def test_arrays_are_samples_row_by_row(tmp_path: Path, make: Any, suffix: str) -> None:
    for number in range(2):
        (tmp_path / f"{number}.{suffix}").write_bytes(make(SIZE * number))
    make_index(storage_at(tmp_path))
    dataset = ShardedDataset(tmp_path)

    assert len(dataset) == 2 * SIZE
    assert xs(dataset.__getitems__([12, 3, 19, 0])) == [12, 3, 19, 0]
    assert dataset[5]["y"].tolist() == [1, 1]


def test_members_of_a_tar_with_one_name_are_a_sample(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(tar(0))
    make_index(storage_at(tmp_path))
    dataset = ShardedDataset(tmp_path, transform=lambda sample: {**sample, "new": True})

    wanted = {"__key__": "some/folder/000004", "txt": "4", "cls": 7, "bin": b"raw", "new": True}
    assert dataset[4] == wanted


def test_member_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(tar(0).replace(b"7" + 511 * b"\0", b"x" + 511 * b"\0"))
    make_index(storage_at(tmp_path))

    # Not a DataError, which would be the fault of the whole shard
    with pytest.raises(ValueError, match=r"shard 0\.tar: some/folder/000004\.cls can't be decoded"):
        ShardedDataset(tmp_path)[4]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.npz", b"PK\x03\x04 and nothing more"),
        ("a.safetensors", b"\0" * 16),
        ("a.tar", b"x" * 1024),
        ("a.safetensors", save({"x": torch.ones(2), "y": torch.ones(3)})),
        ("a.safetensors", save({"x": torch.tensor(1.0)})),
    ],
)
def test_unreadable_shard_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)

    with pytest.raises(DataError, match=rf"shard {name}: can't be read"):
        make_index(storage_at(tmp_path))


# --- the index -------------------------------------------------------------------------


def test_command_writes_the_index(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(npz(0))

    done = CliRunner().invoke(app, ["data", "index", str(tmp_path), "--json"])

    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == [{"location": str(tmp_path), "shards": 1, "samples": SIZE}]
    (shard,) = ShardIndex.load(storage_at(tmp_path)).shards
    assert (shard.name, shard.samples, shard.bytes) == ("a.npz", SIZE, len(npz(0)))


def index_of(**shard: object) -> str:
    return json.dumps({"format": "vcasgd-data/1", "shards": [shard] if shard else []})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        ('{"format": "other", "shards": []}', "format: must be 'vcasgd-data/1'"),
        (index_of(), "shards: must have at least 1 item"),
        (index_of(name="a.npz"), r"shards\.0\.samples: is required"),
        (index_of(name="a.npz", samples=-1, bytes=1, sha256="0"), r"shards\.0\.samples: "),
        (index_of(name="a.npz", samples=1, bytes=1, sha256="../etc"), r"shards\.0\.sha256: "),
        (index_of(name="a.exe", samples=1, bytes=1, sha256="0" * 64), r"shards\.0\.name: "),
    ],
)
def test_invalid_index_is_explained(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "index.json").write_text(text)

    with pytest.raises(DataError, match=message):
        ShardedDataset(tmp_path)


def test_invalid_location_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is not a folder, s3"):
        ShardedDataset("ftp://host/data")
    with pytest.raises(DataError, match="does not exist on this machine"):
        ShardedDataset(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no index\.json \(run vcasgd data index"):
        ShardedDataset(tmp_path)


# --- caches ----------------------------------------------------------------------------


def test_shard_is_downloaded_once(bucket: Bucket, tmp_path: Path) -> None:
    first, second = (ShardedDataset(bucket.url, cache_dir=tmp_path) for _ in range(2))

    assert xs(first.__getitems__([0, 11, 1])) == [0, 11, 1]
    assert xs(first.__getitems__([2, 3])) == [2, 3]
    assert xs(second.__getitems__([4])) == [4]

    counts = first.read_counters()
    assert (counts["misses"], counts["memory_hits"], counts["disk_hits"]) == (2, 1, 0)
    assert (counts["downloads"], counts["downloaded_bytes"]) == (2, 2 * len(npz(0)))
    assert counts["hit_rate"] == pytest.approx(1 / 3)
    assert counts["stall_seconds"] > 0
    # another worker of the machine
    assert (second.read_counters()["disk_hits"], second.read_counters()["downloads"]) == (1, 0)


def test_memory_and_disk_are_bounded_and_evict_the_least_recently_used(
    bucket: Bucket, tmp_path: Path
) -> None:
    of_two = 2 * len(npz(0))
    one_in_memory = SIZE * (4 + 16)
    # Of a process that was killed while it wrote.
    (tmp_path / f"{'0' * 64}.part").write_bytes(npz(0))
    dataset = ShardedDataset(
        bucket.url, cache_dir=tmp_path, disk_bytes=of_two, memory_bytes=one_in_memory
    )

    for sample in (0, 10, 0, 20):
        dataset[sample]
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= of_two
    assert dataset.read_counters()["downloads"] == 3

    # the second one had to go, the first one did not
    dataset[0]
    assert dataset.read_counters()["downloads"] == 3
    dataset[10]
    assert dataset.read_counters()["downloads"] == 4


def test_shard_damaged_on_disk_is_downloaded_again(bucket: Bucket, tmp_path: Path) -> None:
    ShardedDataset(bucket.url, cache_dir=tmp_path)[0]
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    dataset = ShardedDataset(bucket.url, cache_dir=tmp_path)

    assert xs([dataset[0]]) == [0]
    assert dataset.read_counters()["downloads"] == 1


def test_shard_damaged_in_storage_is_named_after_two_downloads(
    bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("part-1.npz", npz(0))
    dataset = ShardedDataset(bucket.url, cache_dir=tmp_path)

    with pytest.raises(DataError, match=r"shard part-1\.npz of s3://.* is damaged"):
        dataset[10]
    assert dataset.read_counters()["downloads"] == 2
    assert not list(tmp_path.iterdir())
    # the others can be read
    assert xs([dataset[0]]) == [0]
    bucket.delete("part-1.npz")
    with pytest.raises(DataError, match=r"shard part-1\.npz is not in s3://"):
        dataset[10]


def test_unreachable_storage_is_not_a_user_error(
    monkeypatch: pytest.MonkeyPatch, bucket: Bucket, tmp_path: Path
) -> None:
    learner = learner_of(bucket, tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "ftp://127.0.0.1:9")

    with pytest.raises(StorageUnavailable):
        learner.plan  # noqa: B018 - it reads the index


def test_prefetched_shards_are_available_when_read(bucket: Bucket, tmp_path: Path) -> None:
    dataset = ShardedDataset(bucket.url, cache_dir=tmp_path)

    dataset.will_read(np.array([25, 5, 27]))
    await_truth(lambda: len(kept(tmp_path)) == 2)

    assert xs(dataset.__getitems__([5, 25])) == [5, 25]
    assert (dataset.read_counters()["disk_hits"], dataset.read_counters()["misses"]) == (2, 0)
    dataset.close()


class SlowDisk(DiskCache):
    """Disk on which a look at the first shard lasts until the fetch of that shard has ended.

    The second shard keeps one of the two fetchers busy until then. So the thread that stores the
    third one has ended the fetch of the first.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 20)
        self.is_slow = False
        self.looked, self.fetched = threading.Event(), threading.Event()

    def has(self, shard: DataShard) -> bool:
        return self.look(super().has(shard))

    def get(self, shard: DataShard) -> bytes | None:
        return self.look(super().get(shard))

    def look(self, result: Any) -> Any:
        if self.is_slow:
            self.looked.set()
            assert self.fetched.wait(PATIENCE)
        return result

    def put(self, shard: DataShard, data: bytes) -> None:
        assert (self.fetched if shard.name == "part-1.npz" else self.looked).wait(PATIENCE)
        super().put(shard, data)
        if shard.name == "part-2.npz":
            self.fetched.set()


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "prefetches"])
def test_fetch_that_ends_while_the_disk_is_looked_at_is_not_repeated(
    bucket: Bucket, tmp_path: Path, reads: bool
) -> None:
    storage, disk = storage_at(bucket.url), SlowDisk(tmp_path)
    shards = ShardIndex.load(storage).shards
    cache = ShardCache(storage, disk, 1 << 20)

    cache.prefetch(shards[:3])
    disk.is_slow = True
    if reads:
        assert xs([cache.get(shards[0])[5]]) == [5]
    else:
        cache.prefetch(shards[:1])
        disk.looked.set()
    await_truth(lambda: len(kept(tmp_path)) == 3)

    cache.close()
    assert cache.counts["downloads"] == 3


# --- a learner ---------------------------------------------------------------------------


class Reads(vcasgd.Task):
    batch_size = 5

    def __init__(self, location: str, cache: Path) -> None:
        self.location = location
        self.cache = cache

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def dataset(self, split: str) -> ShardedDataset:
        return ShardedDataset(self.location, cache_dir=self.cache, window=1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        mean: Tensor = model(batch["x"].view(-1, 1)).mean() * 0
        return mean


def learner_of(bucket: Bucket, cache: Path) -> Learner:
    spec = {"name": "job", "task": "t:T", "epochs": 1, "subtasks_per_epoch": 4}
    return Learner(JobSpec.parse(spec), Reads(bucket.url, cache), "cpu")


def test_subtask_downloads_only_its_shards_and_those_of_the_next(
    bucket: Bucket, tmp_path: Path
) -> None:
    learner = learner_of(bucket, tmp_path)
    base = Base(torch.zeros(2), torch.empty(0, dtype=torch.int64))

    learner.start_subtask()
    learner.train(base, 0, 0, SIZE)

    # its own shard, and the one of the subtask after it
    await_truth(lambda: len(kept(tmp_path)) == 2)
    before = learner.reading()
    assert before["downloads"] == 2
    learner.train(base, 1, 0, SIZE)
    after = learner.reading()
    assert after["misses"] == before["misses"] <= 1
    assert after["disk_hits"] == before["disk_hits"] + 1
