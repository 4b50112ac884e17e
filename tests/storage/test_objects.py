"""Object storage in a folder, also on a disk that is full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.waiting import await_truth

from vcasgd.errors import StorageUnavailable
from vcasgd.storage.objects import Storage


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(mount)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs more rights than this user has")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.mark.parametrize("streams", [False, True], ids=["bytes", "stream"])
@pytest.mark.parametrize("megabytes", [4, 24], ids=["in one part", "in several parts"])
def test_a_full_disk_leaves_no_part_of_an_object(
    tiny_disk: Path, megabytes: int, streams: bool
) -> None:
    storage = Storage(f"file://{tiny_disk}")
    storage.put("jobs/small", b"whole")
    free = os.statvfs(tiny_disk).f_bfree

    chunks = [bytes(1 << 20)] * megabytes
    put = partial(storage.put, "jobs/large", b"".join(chunks))
    if streams:
        put = partial(storage.put_stream, "jobs/large", iter(chunks), megabytes << 20)

    with pytest.raises(StorageUnavailable, match="jobs/large"):
        put()

    assert storage.names("jobs") == {"jobs/small": 5}
    assert storage.get("jobs/small") == b"whole"
    assert not storage.has("jobs/large")
    # Parts that were under way end a little later.
    await_truth(lambda: os.statvfs(tiny_disk).f_bfree == free)
    storage.put("jobs/after", b"there is room again")


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    """Even root can't create this folder."""
    storage = Storage(f"file://{tmp_path}/storage")
    (tmp_path / "storage" / "jobs").write_text("in the way")

    with pytest.raises(StorageUnavailable):
        storage.put("jobs/job/x", b"data")
    assert (tmp_path / "storage" / "jobs").read_text() == "in the way"


class TestStorage:
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return Storage(f"file://{tmp_path}/a/b")

    def test_objects(self, storage: Storage) -> None:
        storage.put("x/one", b"1")
        storage.put("x/two", memoryview(b"22"))
        storage.put("x/one", b"new")

        assert storage.get("x/one") == b"new"
        assert storage.names("x") == {"x/one": 3, "x/two": 2}
        assert storage.has("x/one")
        assert not storage.has("x/three")
        storage.delete("x/one")
        storage.delete("x/one")  # silent
        assert storage.names("x") == {"x/two": 2}

    def test_moved(self, storage: Storage) -> None:
        storage.put("a", b"1")
        storage.put("b", b"2")

        storage.move("a", "b")

        assert storage.names("") == {"b": 1}
        assert storage.get("b") == b"1"

    def test_a_large_object_in_several_parts(self, storage: Storage) -> None:
        data = os.urandom(1 << 20) * 13

        storage.put("large", data)

        assert storage.get("large") == data
        stream = storage.stream("large")
        assert stream.size == len(data)
        assert b"".join(stream.chunks) == data
        assert storage.names("") == {"large": len(data)}
