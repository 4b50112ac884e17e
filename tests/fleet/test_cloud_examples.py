"""The examples of commands for clouds, with stand-ins for the clouds' own command lines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.provider_backends import CLOUDS, exec_commands

from vcasgd.errors import NoCapacity
from vcasgd.fleet.pools import ExecPoolSpec, parse_pool
from vcasgd.fleet.providers.base import MACHINE_ID, Boot, MachineState
from vcasgd.fleet.providers.commands import ExecProvider
from vcasgd.fleet.providers.joining import NothingJoined

BOOT = Boot(("vcasgd", "join", "https://hub:1", "--machine", MACHINE_ID))
FAKE = Path(__file__).parents[1] / "support" / "fake_cloud_cli.py"
SECRET = "it's $a token"
VARIABLES = {"VAST_IMAGE": "me/vcasgd:1", "AZURE_GROUP": "ml", "AZURE_IMAGE": "vcasgd-1"}


@pytest.fixture(params=["vast", "azure"])
def provider(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ExecProvider:
    for name in ("vastai", "az"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
        program.chmod(0o755)
    (tmp_path / "cloud").mkdir()
    (tmp_path / "token").write_text(SECRET)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    for name, value in {**VARIABLES, "FAKE_CLOUD": f"{tmp_path}/cloud"}.items():
        monkeypatch.setenv(name, value)
    template = {
        **exec_commands(CLOUDS / f"{request.param}.py"),
        "token_file": str(tmp_path / "token"),
        "env": [*VARIABLES, "FAKE_CLOUD", "FAKE_OFFERS"],
    }
    row = {"name": "any", "provider": "exec", "zones": ["1"], "template": template}
    spec = parse_pool({**row, "machine_types": ["Standard_NC4as_T4_v3"]}, "pools.0")
    assert isinstance(spec, ExecPoolSpec)
    return ExecProvider("c", [spec], NothingJoined())


def test_machines_are_launched_once_listed_and_ended(
    provider: ExecProvider, tmp_path: Path
) -> None:
    # When two machines are launched twice
    launched = provider.launch("any", 2, BOOT, "t")
    assert provider.launch("any", 2, BOOT, "t") == launched

    # Then two run the command of a machine, with the token
    machines = {machine.id: machine for machine in provider.machines()}
    assert [*machines] == launched
    for name, machine in machines.items():
        assert machine.state is MachineState.RUNNING
        assert machine.host == "10.0.0.1"
        assert 1.6e9 < machine.launched_at < 2e9
        script = json.loads((tmp_path / "cloud" / f"{name}.json").read_text())["script"]
        assert f"vcasgd join https://hub:1 --machine {name}\n" in script
        assert """export VCASGD_TOKEN='it'"'"'s $a token'\n""" in script

    # When one is ended, then the other one is left
    provider.terminate(launched[0])
    assert [machine.id for machine in provider.machines()] == launched[1:]


def test_a_cloud_without_machines_has_no_capacity(
    provider: ExecProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OFFERS", "0")
    with pytest.raises(NoCapacity, match="any: launch"):
        provider.launch("any", 2, BOOT, "t")
    assert provider.machines() == []
