"""Machines whose version differs from the stack's: real installations, a real index, a real pip."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.children import Process
from support.gateways import RunningGateway, running_gateway
from support.processes import run_program
from support.waiting import await_truth
from support.wheels import build_own_wheel, rename_wheel, write_wheel

import vcasgd
from vcasgd.spec.access import Scope

OLD, NEW = "0.0.9", vcasgd.__version__
#: A version that is no final release, and one of somebody's own.
PREVIEW, PRIVATE = "8.0.0rc1", "9.0.0+own"
#: A command that updates to each version in its arguments, as if stacks had named them, and prints
#: a line of JSON for each, with what it said.
UPDATE = """
import json, sys
from vcasgd.agent.installation import update_to
from vcasgd.errors import VcasgdError

if sys.argv[1] == "--version":
    from vcasgd.cli import main

    main()
for version in sys.argv[1:]:
    said = []
    try:
        update_to(version, allowed=True, show=said.append)
    except VcasgdError as error:
        said.append(str(error))
    print(json.dumps(said))
"""
#: Versions that are not installed, with the reasons.
REFUSED = {
    "0.0.1": "it installs newer versions only",
    OLD: "it installs newer versions only",
    PREVIEW: "is a pre-release",
    PRIVATE: "is a pre-release",
    "": "the version of the stack is none of vcasgd",
    "1.0 --index-url https://192.0.2.1": "the version of the stack is none of vcasgd",
    "1.0 @ file:///tmp/evil.whl": "the version of the stack is none of vcasgd",
    "9" * 5000: "the version of the stack is none of vcasgd",
    "5.0.0": "pip could not install vcasgd 5.0.0",
}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheels, which stands for the package index of a machine's owner."""
    folder = tmp_path_factory.mktemp("wheels")
    index = folder / "index"
    own = build_own_wheel(folder / "sources", index)
    rename_wheel(own, NEW, OLD)
    for version in (PREVIEW, PRIVATE):  # which nobody installs
        write_wheel(index, "vcasgd", version, "")
    return index


@dataclass
class Installation:
    """A virtual environment with vcasgd, and the libraries of these tests."""

    folder: Path
    index: Path
    sources: str = ""

    @property
    def python(self) -> str:
        return str(self.folder / "bin/python")

    @property
    def env(self) -> dict[str, str]:
        found = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index), "PYTHONPATH": self.sources}
        return {**os.environ, **found, "VCASGD_HOME": str(self.folder)}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_program([self.python, *words], env=self.env, cwd=self.folder, timeout=300)

    def install(self, what: str) -> None:
        done = self.run("-m", "pip", "install", "--no-deps", "--force-reinstall", what)
        assert done.returncode == 0, done.stderr

    def update(self, *versions: str) -> list[str]:
        """Update to versions that stacks name; return what is said about each."""
        done = self.run("-c", UPDATE, *versions)
        assert done.returncode == 0, done.stderr
        return ["\n".join(json.loads(line)) for line in done.stdout.splitlines()]

    @property
    def version(self) -> str:
        (found,) = self.folder.glob("lib/python*/site-packages/vcasgd-*.dist-info")
        return found.name.removeprefix("vcasgd-").removesuffix(".dist-info")


def old_version(index: Path, folder: Path) -> Installation:
    """Install the old version in an environment of its own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    made = Installation(folder, index)
    made.install(f"vcasgd=={OLD}")
    assert made.version == OLD
    return made


@pytest.fixture
def installation(index: Path, tmp_path: Path) -> Installation:
    return old_version(index, tmp_path / "environment")


@pytest.fixture(scope="module")
def unchanged(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """An installation for tests that leave it as it is."""
    return old_version(index, tmp_path_factory.mktemp("unchanged") / "environment")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    home = tmp_path_factory.mktemp("gateway")
    with running_gateway(home) as gateway:
        gateway.publish_pool()
        yield gateway


@contextmanager
def joining(
    gateway: RunningGateway, installation: Installation, name: str, *options: str
) -> Iterator[tuple[Process, Path]]:
    """Run ``vcasgd join`` of an installation, and yield its process and its output."""
    with gateway.api.client() as client:
        token = client.create_token(name, Scope.JOIN, pool="volunteers").token
    log = installation.folder / "join.log"
    argv = [str(installation.folder / "bin/vcasgd"), "join", gateway.url, "--sandbox", "off"]
    process = Process([*argv, *options], log, {**installation.env, "VCASGD_TOKEN": token})
    try:
        yield process, log
    finally:
        process.end()
        sys.stdout.write(log.read_text())


@pytest.mark.ci
def test_without_the_option_a_machine_says_what_to_install(
    gateway: RunningGateway, unchanged: Installation
) -> None:
    with joining(gateway, unchanged, "ann") as (process, log):
        assert process.wait() == 1
    command = shlex.join([unchanged.python, "-m", "pip", "install", f"vcasgd[worker]=={NEW}"])
    said = log.read_text()
    assert f"error: the stack has vcasgd {NEW}, and this machine {OLD}\n" in said
    assert f"remedy: {command}, or join with --update" in said
    assert unchanged.version == OLD


@pytest.mark.slow
@pytest.mark.ci
def test_with_the_option_a_machine_updates_once_and_joins(
    gateway: RunningGateway, installation: Installation
) -> None:
    with joining(gateway, installation, "bob", "--update", "--until", "8h") as (process, log):
        await_truth(lambda: "joined as join-bob-" in log.read_text())

        # Then it is the same process, with the same end, in the version of the stack
        assert installation.version == NEW
        assert log.read_text().count("updates: ") == 1
        words = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        assert words[words.index("--until") + 1] == "8h"
        assert "T" in words[len(words) - 1 - words[::-1].index("--until") + 1]
        assert process.terminate() == 0
    assert "left in good order" in log.read_text()


@pytest.mark.slow
@pytest.mark.ci
def test_machine_leaves_and_updates_when_the_stack_gets_another_version(
    gateway: RunningGateway, index: Path, installation: Installation, tmp_path: Path
) -> None:
    # Given a stack of the old version, and a machine
    with zipfile.ZipFile(index / f"vcasgd-{OLD}-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path / "old")
    api = gateway.api
    api.end()
    api.process = Process(
        [sys.executable, "-P", "-m", "vcasgd.api"],
        api.log,
        {**api.env, **gateway.api_env, "PYTHONPATH": str(tmp_path / "old")},
    )
    await_truth(api._listens)
    with joining(gateway, installation, "mia", "--update") as (process, log):
        await_truth(lambda: log.read_text().count("joined as join-mia-") == 1)
        assert installation.version == OLD

        # When the stack gets the new one
        api.end()
        api.start(**gateway.api_env)

        # Then the machine leaves, and joins again with it
        await_truth(lambda: log.read_text().count("joined as join-mia-") == 2)
        said = log.read_text()
        assert f"leaves: the stack has vcasgd {NEW} now" in said
        assert said.index("left in good order") < said.index("updates: ")
        assert installation.version == NEW
        assert process.terminate() == 0


@pytest.mark.slow
@pytest.mark.ci
def test_versions_that_are_not_installed_have_reasons(unchanged: Installation) -> None:
    said = unchanged.update(*REFUSED)

    assert len(said) == len(REFUSED)
    for (version, reason), words in zip(REFUSED.items(), said, strict=True):
        assert reason in words, version
    assert unchanged.version == OLD


@pytest.mark.extended
def test_an_update_that_changes_nothing_is_not_repeated(
    gateway: RunningGateway, installation: Installation, index: Path, tmp_path: Path
) -> None:
    # Given sources that hide what pip installs
    with zipfile.ZipFile(index / f"vcasgd-{OLD}-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path / "old")
    hidden = replace(installation, sources=str(tmp_path / "old"))

    with joining(gateway, hidden, "eve", "--update") as (process, log):
        assert process.wait() == 1
    assert f"pip has installed it, and this command still starts {OLD}" in log.read_text()
    assert log.read_text().count("updates: ") == 1


@pytest.mark.ci
def test_installation_that_pip_should_not_change_is_left_alone(installation: Installation) -> None:
    wheel = installation.index / f"vcasgd-{OLD}-py3-none-any.whl"
    installation.install(str(wheel))
    (said,) = installation.update(NEW)
    assert "it was installed from a file or a repository, and not from a package index" in said
    assert installation.version == OLD


@pytest.mark.ci
def test_installation_of_the_system_is_left_alone(tmp_path: Path) -> None:
    packages = os.pathsep.join([str(Path(vcasgd.__file__).parents[1]), *sys.path[1:]])
    done = run_program(
        [f"{sys.base_prefix}/bin/python3", "-c", UPDATE, "99.0.0"],
        env={**os.environ, "PYTHONPATH": packages},
        cwd=tmp_path,
        timeout=300,
    )
    assert "this Python is not in a virtual environment" in done.stdout
