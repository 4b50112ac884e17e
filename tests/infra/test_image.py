"""The container image, built by buildah without a daemon, and the roles in it.

The build takes minutes and gigabytes. It runs only with ``--extended`` and ``VCASGD_TEST_IMAGE=1``.
debootstrap makes its base unless ``VCASGD_IMAGE_BASE`` names one. ``VCASGD_IMAGE_OPTIONS`` are
further options of ``buildah build``, for example for pip's package index.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

REPOSITORY = Path(__file__).parents[2]
IMAGE = "localhost/vcasgd-test"
#: Size with the CPU build of PyTorch; one with CUDA is several times as large.
MAX_GB = 2.0

_UP = """
vcasgd up --foreground --port 0 & pid=$!
for _ in $(seq 150); do vcasgd-health $pid 2>/dev/null && break; sleep 1; done
vcasgd-health $pid; healthy=$?
kill -TERM $pid; wait $pid; ended=$?
echo "healthy $healthy, ended $ended"
"""


class Buildah:
    """buildah with its own storage and no privileges beyond root's."""

    def __init__(self, directory: Path) -> None:
        self._places = ["--root", str(directory / "storage"), "--runroot", str(directory / "run")]
        self._environment = {
            **os.environ,
            "BUILDAH_ISOLATION": "chroot",
            "STORAGE_DRIVER": "vfs",
        }

    def __call__(self, *arguments: str, seconds: float = 1700) -> str:
        done = subprocess.run(
            ["buildah", *self._places, *arguments],
            env=self._environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout.strip()

    def base(self, directory: Path) -> str:
        """Debian with Python, built from its packages."""
        given = os.environ.get("VCASGD_IMAGE_BASE")
        if given:
            return given
        if shutil.which("debootstrap") is None:
            pytest.skip("debootstrap is not installed, and VCASGD_IMAGE_BASE names no base")
        root = directory / "root"
        packages = "--include=python3,python3-venv,ca-certificates"
        subprocess.run(
            ["debootstrap", "--variant=minbase", packages, "bookworm", root],
            check=True,
            capture_output=True,
        )
        container = self("from", "scratch")
        self("copy", "--quiet", container, str(root), "/")
        self("commit", "--quiet", "--rm", container, "localhost/debian-python")
        return "localhost/debian-python"


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    if os.environ.get("VCASGD_TEST_IMAGE") != "1":
        pytest.skip("building the image takes minutes and gigabytes: set VCASGD_TEST_IMAGE=1")
    if shutil.which("buildah") is None or os.getuid() != 0:
        pytest.skip("buildah is not installed, or this is not root")
    directory = tmp_path_factory.mktemp("image")
    tool = Buildah(directory)
    base = tool.base(directory)
    options = shlex.split(os.environ.get("VCASGD_IMAGE_OPTIONS", ""))
    tool(
        "build",
        "--quiet",
        "--format=docker",
        f"--build-arg=BASE={base}",
        *options,
        "-t",
        IMAGE,
        ".",
    )
    yield tool
    shutil.rmtree(directory)


@pytest.mark.timeout(1800)
def test_image_is_small_and_runs_as_nobody(buildah: Buildah) -> None:
    found = json.loads(buildah("inspect", "--type=image", IMAGE))["Docker"]["config"]
    assert found["User"] == "vcasgd"
    assert found["Healthcheck"]["Test"] == ["CMD", "vcasgd-health"]
    number, unit = buildah("images", "--format={{.Size}}", IMAGE).split()
    assert float(number) * {"MB": 1e-3, "GB": 1.0}[unit] < MAX_GB


def test_all_roles_are_in_the_image(buildah: Buildah) -> None:
    container = buildah("from", IMAGE)
    # The version.
    assert buildah("run", container, "--", "vcasgd", "--version").startswith("vcasgd 0.")
    # The health check while the stack runs.
    said = buildah("run", container, "--", "sh", "-c", _UP, seconds=400)
    assert said.endswith("healthy 0, ended 0")
    # The demo.
    said = buildah("run", container, "--", "vcasgd", "demo", seconds=600)
    assert "samples lost       0" in said
