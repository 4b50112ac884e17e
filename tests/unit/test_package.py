"""Packages: equal bytes for equal content, ignore patterns, and safe unpacking."""

from __future__ import annotations

import io
import os
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.waiting import PATIENCE

from vcasgd.errors import PackageError
from vcasgd.limits import MAX_PACKAGE_FILES
from vcasgd.task.package import IGNORE_FILE, check, digest_of, pack, unpack

LIMIT = 1_000_000


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def names(package: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        return archive.namelist()


def zip_of(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, "content")
    return buffer.getvalue()


#: Files of a job, in the order of a package.
FILES = {"lib/model.py": "x = 1", "train.py": "import torch"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", FILES)


class TestPack:
    def test_equal_content_gives_equal_bytes(self, source: Path, tmp_path: Path) -> None:
        """The order of creation, times, and permissions of files don't matter."""
        twin = write(tmp_path / "twin", dict(reversed(FILES.items())))
        os.utime(twin / "train.py", (0, 2_000_000_000))
        (twin / "train.py").chmod(0o755)

        assert pack(source, LIMIT) == pack(twin, LIMIT)

    @pytest.mark.parametrize(
        ("name", "patterns"),
        [
            *((name, None) for name in (".git/config", "lib/.venv/x", "__pycache__/x", "a.pyc")),
            *((name, None) for name in (".ssh/id", "node_modules/x")),
            ("node_modules", "!node_modules"),
            *(("data/raw/big.bin", each) for each in ("data/", "*.bin", "/data", "data/**")),
            ("data/raw/big.bin", "# a comment\n\n  data/raw  "),
        ],
    )
    def test_files_of_a_pattern_are_ignored(
        self, source: Path, name: str, patterns: str | None
    ) -> None:
        """Built-in patterns can't be included again."""
        write(source, {name: "x", **({IGNORE_FILE: patterns} if patterns else {})})

        assert set(names(pack(source, LIMIT))) - {IGNORE_FILE} == set(FILES)

    @pytest.mark.parametrize("patterns", ["/big.bin", "*.bin\n!big.bin", "data/raw?big.bin"])
    def test_other_files_are_kept(self, source: Path, patterns: str) -> None:
        write(source, {"data/sub/big.bin": "", IGNORE_FILE: patterns})

        assert "data/sub/big.bin" in names(pack(source, LIMIT))

    def test_a_home_of_a_stack_is_never_packed(self, source: Path) -> None:
        # A first job is often written in the home folder, in which the stack's is, too.
        home = ("stack.lock", "token", "secrets.json", "ledger/server.conf")
        write(source, {f"state/{name}": "a password" for name in home})
        write(source, {IGNORE_FILE: "!state"})

        assert names(pack(source, LIMIT)) == [IGNORE_FILE, *FILES]

    def test_invalid_pattern_names_the_file(self, source: Path) -> None:
        (source / IGNORE_FILE).write_text("!")

        with pytest.raises(PackageError, match=r"\.vcasgdignore: invalid pattern") as caught:
            pack(source, LIMIT)

        assert caught.value.details["field"] == "working_dir"

    def test_special_files_are_skipped(self, source: Path) -> None:
        (source / "dangling").symlink_to(source / "nowhere")
        os.mkfifo(source / "pipe")

        assert names(pack(source, LIMIT)) == [*FILES]

    def test_package_above_the_limit_names_the_largest_files(self, source: Path) -> None:
        for megabytes in (1, 2, 3, 4):
            (source / f"data-{megabytes}").write_bytes(bytes(megabytes * 1_000_000))

        with pytest.raises(PackageError) as caught:
            pack(source, 5_000_000)

        message = str(caught.value)
        for expected in ("10.0 MB", "limit is 5.0 MB", "data-4 (4.0 MB), data-3 (3.0 MB)"):
            assert expected in message
        assert "data-1" not in message
        assert IGNORE_FILE in message
        assert caught.value.details["field"] == "working_dir"

    def test_directory_without_files_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PackageError, match="contains no files"):
            pack(tmp_path, LIMIT)
        with pytest.raises(PackageError, match="is not a directory"):
            pack(tmp_path / "none", LIMIT)


class TestUnpack:
    def test_round_trip(self, source: Path, tmp_path: Path) -> None:
        data = pack(source, LIMIT)

        target = unpack(data, digest_of(data), tmp_path / "cache")

        assert target == tmp_path / "cache" / digest_of(data)
        assert (target / "lib" / "model.py").read_text() == "x = 1"
        assert pack(target, LIMIT) == data

    def test_concurrent_unpacks(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", {f"m{number}.py": "" for number in range(200)})
        data, cache = pack(source, LIMIT), tmp_path / "cache"
        start = threading.Barrier(8)

        def work() -> int:
            start.wait(PATIENCE)
            return len(list(unpack(data, digest_of(data), cache).iterdir()))

        with ThreadPoolExecutor(8) as pool:
            seen = [future.result(PATIENCE) for future in [pool.submit(work) for _ in range(8)]]

        assert seen == [200] * 8
        assert [path.name for path in cache.iterdir()] == [digest_of(data)]

    @pytest.mark.parametrize("compression", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
    def test_other_compressions_are_refused(self, tmp_path: Path, compression: int) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", compression) as archive:
            archive.writestr("train.py", "x = 1")
        data = buffer.getvalue()

        with pytest.raises(PackageError, match="not deflated"):
            unpack(data, digest_of(data), tmp_path)

    @pytest.mark.parametrize("damage", [b"", b"x", None])
    def test_damaged_package_is_refused(
        self, source: Path, tmp_path: Path, damage: bytes | None
    ) -> None:
        data = pack(source, LIMIT)
        arrived = data[:-1] if damage is None else damage

        with pytest.raises(PackageError, match="damaged"):
            unpack(arrived, digest_of(data), tmp_path / "cache")

        assert not (tmp_path / "cache").exists()

    @pytest.mark.parametrize(
        "name", ["../evil", "a/../../evil", "/etc/evil", "..", "a\\..\\evil", "a/..\\evil"]
    )
    def test_name_that_leads_outside_is_refused(self, tmp_path: Path, name: str) -> None:
        data = zip_of("train.py", name)

        with pytest.raises(PackageError, match="outside"):
            check(data)
        with pytest.raises(PackageError, match="outside"):
            unpack(data, digest_of(data), tmp_path / "cache")

        assert list(tmp_path.rglob("*evil*")) == []
        assert list((tmp_path / "cache").glob("*")) == []

    def test_too_many_files_are_refused_before_their_names_are_read(self, tmp_path: Path) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for number in range(MAX_PACKAGE_FILES):
                archive.writestr(f"{number}", b"")
        check(buffer.getvalue())
        with zipfile.ZipFile(buffer, "a") as archive:
            archive.writestr("one-more", b"")
        data = buffer.getvalue()

        for refused in (data, data[:-1]):  # also if the rest can't be read
            with pytest.raises(PackageError, match=f"more than {MAX_PACKAGE_FILES} files"):
                check(refused)
        with pytest.raises(PackageError, match="more than"):
            unpack(data, digest_of(data), tmp_path / "cache")

    def test_unreadable_zip_is_refused(self, tmp_path: Path) -> None:
        """It is none, is encrypted, or has a flipped bit."""
        with pytest.raises(PackageError, match="not a readable zip"):
            check(b"not a zip")
        whole = zip_of("train.py")
        encrypted = bytearray(whole)
        encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
        encrypted[6] |= 1
        flipped = bytearray(whole)
        flipped[flipped.index(b"content")] ^= 1
        for data in map(bytes, (b"not a zip", encrypted, flipped)):
            with pytest.raises(PackageError, match=r"can't be read|not a readable zip"):
                unpack(data, digest_of(data), tmp_path / "cache")
            assert list((tmp_path / "cache").glob("*")) == []

    def test_leftover_of_a_killed_worker_is_no_package(self, source: Path, tmp_path: Path) -> None:
        data = pack(source, LIMIT)
        left = tmp_path / "cache" / f".{digest_of(data)}.4711"
        left.mkdir(parents=True)
        (left / "train.py").write_text("half")

        target = unpack(data, digest_of(data), tmp_path / "cache")

        assert (target / "train.py").read_text() == "import torch"
