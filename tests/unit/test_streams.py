"""Streams: a sample is its shard and its offset, on every machine."""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from vcasgd.errors import SpecError, UserCodeError
from vcasgd.learning.stream_shards import is_stream
from vcasgd.learning.streams import Run, Stream, StreamLayout


@cache
def table() -> Any:
    """Return a table of Hugging Face, whose import takes long."""
    from datasets import Dataset as Table

    return Table.from_dict({"number": list(range(100))})


class Numbers(IterableDataset[int]):
    def __init__(self, length: int = 50) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Split(Numbers):
    """Reads a part in each loader process, as torch's documentation shows it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, self.length, step))


class Buffered(Split):
    """Shuffles with a buffer and the global random numbers."""

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for number in super().__iter__():
            buffer.append(number)
            if len(buffer) > 8:
                yield buffer.pop(random.randrange(len(buffer)))
        np.random.shuffle(buffer)
        yield from buffer


class Shards(Numbers):
    num_shards = 3

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        part = [range(5), range(5, 6), range(6, 16)][info.id] if info else range(16)
        return iter([each + 100 * self.epoch for each in part])


class Restless(Numbers):
    def __iter__(self) -> Iterator[int]:
        numbers = list(range(self.length))
        random.Random(os.urandom(8)).shuffle(numbers)
        return iter(numbers)


class Sized(Numbers):
    def __init__(self, says: int) -> None:
        super().__init__(50)
        self.says = says

    def __len__(self) -> int:
        return self.says


class Watched(Sized):
    read = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(50):
            self.read += 1
            yield number


def read(stream: Stream, *indices: int) -> list[Any]:
    return list(stream.__getitems__(indices))


SOURCES: dict[str, Any] = {
    "plain": (Numbers, 1),
    "parts": (Split, 4),
    "buffer": (Buffered, 4),
    "shards": (Shards, 1),
    "hugging face": (lambda: table().to_iterable_dataset(num_shards=7), 1),
    "hugging face, shuffled": (
        lambda: table().to_iterable_dataset(num_shards=7).shuffle(seed=1, buffer_size=9),
        1,
    ),
    "hugging face, loader": (lambda: table().to_iterable_dataset(num_shards=7), 2),
}


@pytest.mark.parametrize(("make", "readers"), SOURCES.values(), ids=SOURCES)
def test_a_number_is_the_same_sample_on_every_machine(make: Any, readers: int) -> None:
    def stream() -> Stream:
        return Stream(make(), seed=3, readers=readers, chunk=4)

    first, second = stream(), stream()
    whole = read(first, *range(len(first)))
    second.use(first.lengths)

    plain = sorted(str(each) for each in make())
    assert sorted(map(str, whole)) == plain
    # Read forward, back, over borders of shards, and with other random numbers in between.
    for start in (7, 30, 2, 12):
        torch.rand(3), random.random(), np.random.rand()
        stop = min(start + 9, len(whole))
        assert read(second, *range(start, stop)) == whole[start:stop]
    assert read(second, 3, 11, 5) == [whole[3], whole[11], whole[5]]


def test_an_epoch_gets_its_number() -> None:
    stream = Stream(Shards(), seed=0)

    for epoch in (2, 0):
        stream.set_epoch(epoch)
        numbers = read(stream, *range(16))
        assert sorted(numbers) == list(range(100 * epoch, 100 * epoch + 16))


def test_shuffling_of_hugging_face_follows_the_epoch() -> None:
    source = table().to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=30)
    stream = Stream(source, seed=0)

    epochs = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        epochs.append([each["number"] for each in read(stream, *range(100))])

    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[1]) == list(range(100))


#: webdataset leaves the closing of a file to the garbage collector.
leaves_files_open = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


def epochs_of(stream: Stream, *epochs: int) -> list[list[Any]]:
    read_ones = []
    for epoch in epochs:
        stream.set_epoch(epoch)
        read_ones.append(read(stream, *range(len(stream))))
    return read_ones


@pytest.mark.parametrize(("source", "shuffled"), [(Buffered(), True), (Split(), False)])
def test_shards_of_a_shuffled_stream_change_their_order(source: Any, *, shuffled: bool) -> None:
    class Files(type(source)):
        num_shards = 10

    epochs = epochs_of(Stream(Files(), seed=0), 0, 1, 0)

    assert epochs[0] == epochs[2]
    firsts = [[each % 10 for each in epoch[::5]] for epoch in epochs]
    assert sorted(firsts[0]) == sorted(firsts[1]) == list(range(10))
    assert (firsts[0] != firsts[1]) == shuffled


@pytest.fixture
def tars(tmp_path: Path) -> str:
    """Return the pattern of four files of ten samples each, as webdataset names them."""
    for number in range(4):
        with tarfile.open(tmp_path / f"part-{number}.tar", "w") as archive:
            for key in range(10 * number, 10 * number + 10):
                member = tarfile.TarInfo(f"{key:03}.cls")
                content = str(key).encode()
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return f"{tmp_path}/part-{{0..3}}.tar"


@leaves_files_open
@pytest.mark.parametrize("options", [{"shardshuffle": 4}, {"shardshuffle": 4, "detshuffle": True}])
def test_files_of_a_webdataset_are_shards(tars: str, options: Any) -> None:
    webdataset = pytest.importorskip("webdataset")

    def stream() -> Stream:
        dataset = webdataset.WebDataset(tars, **options).shuffle(5).decode().to_tuple("cls")
        return Stream(dataset, seed=0)

    # Given two machines, of which one hasn't read the epochs before
    first, second = stream(), stream()
    epochs, (last,) = epochs_of(first, 0, 1), epochs_of(second, 1)

    assert first.lengths == (10, 10, 10, 10)
    assert epochs[1] == last != epochs[0]
    numbers = [[number for (number,) in epoch] for epoch in epochs]
    assert sorted(numbers[0]) == sorted(numbers[1]) == list(range(40))
    files = [[number // 10 for number in epoch[::10]] for epoch in numbers]
    assert files[0] != files[1]
    assert any(numbers[0][at] > numbers[0][at + 1] for at in range(8))


@leaves_files_open
def test_an_epoch_of_a_webdataset_can_have_another_length(tars: str) -> None:
    webdataset = pytest.importorskip("webdataset")
    dataset = webdataset.WebDataset(tars, resampled=True, shardshuffle=False)
    dataset = dataset.decode().to_tuple("cls").with_epoch(25)

    streams = [Stream(dataset, seed=0, readers=2, chunk=5) for _ in range(2)]

    assert streams[0].lengths == (25, 25)
    assert epochs_of(streams[0], 0, 1) == epochs_of(streams[1], 0, 1)


@leaves_files_open
def test_a_loader_of_webdataset_is_refused(tars: str) -> None:
    webdataset = pytest.importorskip("webdataset")
    loader = webdataset.WebLoader(webdataset.WebDataset(tars, shardshuffle=False), batch_size=4)

    with pytest.raises(SpecError, match=r"a WebLoader yields batches .*DataLoader\(dataset"):
        len(Stream(loader, seed=0))


def test_a_stream_that_raises_names_the_sample() -> None:
    class Broken(Numbers):
        def __iter__(self) -> Iterator[int]:
            yield from range(20)
            raise OSError("truncated")

    with pytest.raises(UserCodeError, match=r"raised OSError .* of a shard: truncated"):
        len(Stream(Broken(), seed=0))


def test_parts_of_the_last_batch_are_read_once() -> None:
    source = Watched(50)
    stream = Stream(source, seed=0)
    read(stream, *range(8, 16))
    before = source.read

    assert read(stream, 12, 12) == [12, 12]
    assert read(stream, *range(8, 12)) == [8, 9, 10, 11]
    assert source.read == before


def test_random_numbers_of_training_stay() -> None:
    stream = Stream(Buffered(), seed=0)
    state = random.getstate()

    read(stream, *range(20))

    assert random.getstate() == state


def test_loader_processes_that_read_all_are_one_shard(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream(Numbers(), seed=0, readers=4, chunk=4)

    assert read(stream, *range(50)) == list(range(50))
    assert "doesn't look at get_worker_info" in caplog.text


def test_batches_alternate_between_parts_as_in_a_loader() -> None:
    stream = Stream(Split(16), seed=0, readers=2, chunk=3)
    loader = torch.utils.data.DataLoader(Split(16), batch_size=3, num_workers=2)

    assert read(stream, *range(16)) == torch.cat(list(loader)).tolist()


def test_a_job_of_some_samples_counts_no_more() -> None:
    class Endless(Split):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            number = info.id if info else 0
            while True:
                yield number

    stream = Stream(Endless(), seed=0, readers=2, chunk=2, most=7)

    assert stream.lengths == (4, 3)
    assert read(stream, *range(7)) == [0, 0, 1, 1, 0, 0, 1]


def test_a_stream_that_knows_its_length_is_not_counted() -> None:
    source = Watched(50)
    stream = Stream(source, seed=0)

    assert len(stream) == 50
    assert source.read <= 32
    assert read(stream, 49) == [49]


@pytest.mark.parametrize(
    ("says", "message"),
    [(51, "has 50 samples instead of 51"), (49, "has more samples instead of 49")],
)
def test_a_wrong_length_is_an_error(says: int, message: str) -> None:
    stream = Stream(Sized(says), seed=0)

    with pytest.raises(UserCodeError, match=message):
        read(stream, *range(says))


class Once(Numbers):
    def __init__(self) -> None:
        self.numbers = iter(range(50))

    def __iter__(self) -> Iterator[int]:
        return self.numbers


@pytest.mark.parametrize("source", [Restless, Once])
def test_a_stream_that_differs_each_time_is_refused(source: type[Numbers]) -> None:
    with pytest.raises(SpecError, match="two passes over the iterable data set"):
        len(Stream(source(), seed=0))


def test_what_has_indices_is_no_stream() -> None:
    class Both(Numbers):
        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return 50

    for data in (Numbers(), Sized(3), table().to_iterable_dataset()):
        assert is_stream(data)
    for data in (Both(), table(), torch.utils.data.TensorDataset(torch.ones(3)), [1, 2], Dataset()):
        assert not is_stream(data)


def positions(layout: StreamLayout, start: int, stop: int) -> list[tuple[int, int]]:
    return [
        (run.shard, run.offset + each)
        for run in layout.runs(start, stop)
        for each in range(run.count)
    ]


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_every_sample_of_every_shard_has_one_number(width: int, chunk: int) -> None:
    lengths = (5, 0, 9, 2, 4, 7, 1)
    layout = StreamLayout(lengths, width, chunk)

    whole = positions(layout, 0, layout.samples)

    assert sorted(whole) == [
        (shard, offset) for shard, length in enumerate(lengths) for offset in range(length)
    ]
    for start in range(layout.samples):
        assert positions(layout, start, min(start + 6, layout.samples)) == whole[start : start + 6]
    for shard, length in enumerate(lengths):
        if length:
            assert whole[layout.first_of(shard)] == (shard, 0)


def test_runs_are_long() -> None:
    assert list(StreamLayout((5, 3, 4)).runs(2, 9)) == [Run(0, 2, 3), Run(1, 0, 3), Run(2, 0, 1)]
