"""Packages: equal bytes for equal content, ignore patterns, and safe unpacking."""

from __future__ import annotations

import io
import os
import threading
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import PATIENCE

from vcasgd.errors import PackageError
from vcasgd.limits import MAX_PACKAGE_FILES
from vcasgd.task.package import IGNORE_FILE, check, digest_of, pack, unpack

LIMIT = 1_000_000


def write(directory: Path, **files: str) -> Path:
    """Write files; ``a__b_py`` stands for ``a/b.py``."""
    for name, text in files.items():
        path = directory / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
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


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", train_py="import torch", lib__model_py="x = 1")


class TestPack:
    def test_equal_content_gives_equal_bytes(self, source: Path, tmp_path: Path) -> None:
        """The order of creation, times, and permissions of files don't matter."""
        twin = tmp_path / "twin"
        write(twin, lib__model_py="x = 1")
        write(twin, train_py="import torch")
        os.utime(twin / "train.py", (0, 2_000_000_000))
        (twin / "train.py").chmod(0o755)

        assert pack(source, LIMIT) == pack(twin, LIMIT)

    @pytest.mark.parametrize(
        "name",
        [".git__config", "lib__.venv__x", "__pycache____x", "node_modules__x", "a.pyc", ".ssh__id"],
    )
    def test_built_in_patterns_are_ignored(self, source: Path, name: str) -> None:
        path = source / name.replace("__pycache__", "PYCACHE").replace("__", "/").replace(
            "PYCACHE", "__pycache__/"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")

        assert names(pack(source, LIMIT)) == ["lib/model.py", "train.py"]

    @pytest.mark.parametrize(
        "pattern",
        ["data/", "*.bin", "# a comment\n\n  data/raw  ", "/data", "data/**"],
    )
    def test_patterns_of_the_ignore_file_are_ignored(self, source: Path, pattern: str) -> None:
        (source / "data" / "raw").mkdir(parents=True)
        (source / "data" / "raw" / "big.bin").write_bytes(bytes(100))
        (source / IGNORE_FILE).write_text(pattern)

        assert names(pack(source, LIMIT)) == [IGNORE_FILE, "lib/model.py", "train.py"]

    @pytest.mark.parametrize(
        "patterns",
        [
            "/big.bin",
            "*.bin\n!big.bin",
            "data/raw?big.bin",
        ],
    )
    def test_other_files_are_kept(self, source: Path, patterns: str) -> None:
        write(source, data__sub__big="")
        (source / "data" / "sub" / "big").rename(source / "data" / "sub" / "big.bin")
        (source / IGNORE_FILE).write_text(patterns)

        assert "data/sub/big.bin" in names(pack(source, LIMIT))

    def test_built_in_patterns_can_not_be_re_included(self, source: Path) -> None:
        write(source, node_modules="x")
        (source / IGNORE_FILE).write_text("!node_modules")

        assert "node_modules" not in names(pack(source, LIMIT))

    def test_a_home_of_a_stack_is_never_packed(self, source: Path) -> None:
        # A first job is often written in the home folder, in which the stack's is, too.
        home = source / "state"
        (home / "ledger").mkdir(parents=True)
        for name in ("stack.lock", "token", "secrets.json", "ledger/server.conf"):
            (home / name).write_text("a password")
        (source / IGNORE_FILE).write_text("!state")

        assert names(pack(source, LIMIT)) == [IGNORE_FILE, "lib/model.py", "train.py"]

    def test_invalid_pattern_names_the_file(self, source: Path) -> None:
        (source / IGNORE_FILE).write_text("!")

        with pytest.raises(PackageError, match=r"\.vcasgdignore: invalid pattern") as caught:
            pack(source, LIMIT)

        assert caught.value.details["field"] == "working_dir"

    def test_special_files_are_skipped(self, source: Path) -> None:
        (source / "dangling").symlink_to(source / "nowhere")
        os.mkfifo(source / "pipe")

        assert names(pack(source, LIMIT)) == ["lib/model.py", "train.py"]

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
        """Workers on one machine share a cache; none sees an incomplete package."""
        source = tmp_path / "source"
        source.mkdir()
        for number in range(200):
            (source / f"m{number}.py").write_text(str(number))
        data, cache = pack(source, LIMIT), tmp_path / "cache"
        start, seen = threading.Barrier(8), []

        def work() -> None:
            start.wait(PATIENCE)
            target = unpack(data, digest_of(data), cache)
            seen.append(len(list(target.iterdir())))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)

        assert seen == [200] * 8
        assert [path.name for path in cache.iterdir()] == [digest_of(data)]

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

    @given(st.lists(st.text(max_size=20), min_size=1, max_size=4))
    def test_no_name_leads_outside(self, parts: list[str]) -> None:
        name = "/".join(parts)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            try:
                archive.writestr(name, "x")
            except (ValueError, IndexError):
                return  # A zip can't contain this name.
        try:
            check(buffer.getvalue())
        except PackageError:
            return
        base = Path("/base/inner")
        assert (base / name.split("\0")[0]).resolve().is_relative_to(base)

    def test_other_data_than_a_zip_is_refused(self, tmp_path: Path) -> None:
        data = b"not a zip"

        with pytest.raises(PackageError, match="not a readable zip"):
            check(data)
        with pytest.raises(PackageError, match="not a readable zip"):
            unpack(data, digest_of(data), tmp_path / "cache")
        assert list((tmp_path / "cache").glob("*")) == []

    def test_unreadable_zip_is_refused(self, tmp_path: Path) -> None:
        """The zip is encrypted or has a flipped bit."""
        whole = zip_of("train.py")
        encrypted = bytearray(whole)
        encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
        encrypted[6] |= 1
        flipped = bytearray(whole)
        flipped[flipped.index(b"content")] ^= 1
        for data in map(bytes, (encrypted, flipped)):
            with pytest.raises(PackageError, match="can't be read"):
                unpack(data, digest_of(data), tmp_path / "cache")
            assert list((tmp_path / "cache").glob("*")) == []

    def test_leftover_of_a_killed_worker_is_no_package(self, source: Path, tmp_path: Path) -> None:
        data = pack(source, LIMIT)
        left = tmp_path / "cache" / f".{digest_of(data)}.4711"
        left.mkdir(parents=True)
        (left / "train.py").write_text("half")

        target = unpack(data, digest_of(data), tmp_path / "cache")

        assert (target / "train.py").read_text() == "import torch"
