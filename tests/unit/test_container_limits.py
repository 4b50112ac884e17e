"""Limits of containers, in files as the kernel has them, and in a real control group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from vcasgd.container_limits import free_memory_bytes, memory_bytes, processors

MB = 1 << 20
#: /proc/self/mountinfo with version 2, with version 1, and with both.
V2 = "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 20 0:27 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 20 0:28 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)
DISK = "29 1 259:1 / / rw,relatime - ext4 /dev/root rw\n"
NO_LIMIT = "9223372036854771712\n"


def make_root(tmp_path: Path, own: str, mounts: str, files: dict[str, str]) -> Path:
    content = {"proc/self/cgroup": own, "proc/self/mountinfo": DISK + mounts}
    content |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in content.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def v1(own: str, top: str = "/", **files: str) -> tuple[str, str, dict[str, str]]:
    return f"5:memory:{own}\n4:cpu,cpuacct:{own}\n1:name=systemd:/\n", V1.format(top=top), files


@pytest.mark.parametrize(
    ("own", "mounts", "files", "limit"),
    [
        ("0::/\n", V2, {"memory.max": f"{64 * MB}\n"}, 64),
        ("0::/a/b\n", V2, {"a/b/memory.max": "max\n", "a/memory.max": f"{64 * MB}\n"}, 64),
        ("0::/a/b\n", V2, {"a/b/memory.max": f"{32 * MB}\n", "a/memory.max": f"{64 * MB}\n"}, 32),
        ("0::/../..\n", V2, {"memory.max": f"{64 * MB}\n"}, 64),
        ("0::/\n", V2, {"memory.max": "max\n"}, None),
        ("0::/\n", V2, {}, None),
        ("0::/\n", "", {"memory.max": f"{64 * MB}\n"}, None),
        (*v1("/"), None),
        (*v1("/docker/a"), None),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_smallest_group_around_this_process(
    tmp_path: Path, own: str, mounts: str, files: dict[str, str], limit: int | None
) -> None:
    root = make_root(tmp_path, own, mounts, files)

    assert memory_bytes(root) == (limit * MB if limit else psutil.virtual_memory().total)


@pytest.mark.parametrize("top", ["/", "/docker/a"], ids=["host", "container"])
def test_memory_of_version_1(tmp_path: Path, top: str) -> None:
    own, mounts, _ = v1("/docker/a", top)
    place = "memory" if top == "/docker/a" else "memory/docker/a"
    files = {
        f"{place}/memory.limit_in_bytes": f"{64 * MB}\n",
        f"{place}/memory.usage_in_bytes": f"{40 * MB}\n",
        f"{place}/memory.stat": f"inactive_file 0\ntotal_inactive_file {10 * MB}\n",
        "memory/memory.limit_in_bytes" if top == "/" else "memory/x": NO_LIMIT,
    }
    root = make_root(tmp_path, own, mounts, files)

    assert memory_bytes(root) == 64 * MB
    assert free_memory_bytes(root) == 34 * MB


def test_files_that_can_be_dropped_are_free_memory(tmp_path: Path) -> None:
    files = {
        "memory.max": f"{64 * MB}\n",
        "memory.current": f"{60 * MB}\n",
        "memory.stat": f"anon 1\nfile 2\ninactive_file {20 * MB}\n",
    }

    assert free_memory_bytes(make_root(tmp_path, "0::/\n", V2, files)) == 24 * MB


@pytest.mark.parametrize(
    ("own", "mounts", "files", "expected"),
    [
        ("0::/\n", V2, {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a\n", V2, {"a/cpu.max": "max 100000\n", "cpu.max": "25000 100000\n"}, 0.25),
        ("0::/\n", V2, {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", V2, {"cpu.max": "100000000 100000\n"}, None),
        ("4:cpu,cpuacct:/a\n", V1.format(top="/a"),
         {"cpu,cpuacct/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
         0.5),
        ("4:cpu,cpuacct:/\n", V1.format(top="/"),
         {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
         None),
    ],
)  # fmt: skip
def test_processors_are_those_of_the_quota(
    tmp_path: Path, own: str, mounts: str, files: dict[str, str], expected: float | None
) -> None:
    root = make_root(tmp_path, own, mounts, files)

    assert processors(root) == (expected or len(os.sched_getaffinity(0)))


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == psutil.virtual_memory().total
    assert processors(tmp_path) == len(os.sched_getaffinity(0))


@pytest.fixture
def group() -> Iterator[Path]:
    """Yield a control group of this machine with 512 MiB."""
    top, limit = Path("/sys/fs/cgroup"), "memory.max"
    if (top / "memory").is_dir():
        top, limit = top / "memory", "memory.limit_in_bytes"
    path = top / f"vcasgd-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no right to create control groups: {error}")
    try:
        (path / limit).write_text(str(512 * MB))
    except OSError as error:
        path.rmdir()
        pytest.skip(f"no right to limit memory: {error}")
    yield path
    path.rmdir()


def test_a_stack_in_a_group_with_a_limit_divides_that(group: Path, tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "from vcasgd.container_limits import free_memory_bytes, memory_bytes\n"
        "from vcasgd.settings import Settings\n"
        "from vcasgd.stack import StackHome, StackState\n"
        "from vcasgd.stack.layout import StackLayout\n"
        "home = StackHome(pathlib.Path(sys.argv[2]))\n"
        "home.create()\n"
        "layout = StackLayout.plan(home, Settings(api_port=0), StackState())\n"
        "print(memory_bytes(), free_memory_bytes(), layout.tensors_memory_mb)\n"
    )
    argv = [sys.executable, "-c", code, str(group), str(tmp_path / "home")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)

    total, free, tensors = map(int, done.stdout.split())
    assert total == 512 * MB
    assert 0 < free < total
    assert tensors == 512 * MB // 2_000_000
