"""The examples of commands for clouds, with stand-ins for the clouds' own command lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import fake_cloud_cli
from support.provider_backends import CLOUDS, exec_commands

from vcasgd.errors import NoCapacity
from vcasgd.fleet.pools import ExecPoolSpec, parse_pool
from vcasgd.fleet.providers.base import MACHINE_ID, Boot
from vcasgd.fleet.providers.commands import ExecProvider
from vcasgd.fleet.providers.joining import JoinedFleet
from vcasgd.schemas.fleet import MachineState

BOOT = Boot(("vcasgd", "join", "https://hub:1", "--machine", MACHINE_ID))
FAKE = Path(fake_cloud_cli.__file__)
SECRET = "it's $a token"
VARIABLES = {
    "VAST_IMAGE": "me/vcasgd:1", "AZURE_GROUP": "ml", "AZURE_IMAGE": "vcasgd-1",
    "RUNPOD_IMAGE": "me/vcasgd:1", "RUNPOD_API_KEY": "key", "LAMBDA_API_KEY": "key",
    "LAMBDA_SSH_KEY": "mine", "SKY_SETUP": ":",
}  # fmt: skip


@pytest.fixture(params=["vast", "azure", "runpod", "lambdacloud", "skypilot"])
def provider(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ExecProvider]:
    for name in fake_cloud_cli.PROGRAMS:
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
        program.chmod(0o755)
    (tmp_path / "cloud").mkdir()
    (tmp_path / "token").write_text(SECRET)
    with fake_cloud_cli.rest_api() as url:
        variables = {
            **VARIABLES, "FAKE_CLOUD": f"{tmp_path}/cloud",
            "RUNPOD_API": f"{url}/runpod", "LAMBDA_API": f"{url}/lambdacloud",
        }  # fmt: skip
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
        template = {
            **exec_commands(CLOUDS / f"{request.param}.py"),
            "token_file": str(tmp_path / "token"),
            "env": [*variables, "FAKE_OFFERS"],
        }
        row = {"name": "any", "provider": "exec", "zones": ["1"], "template": template}
        spot = request.param != "lambdacloud"
        spec = parse_pool({**row, "machine_types": ["L4:1"], "spot": spot}, "pools.0")
        assert isinstance(spec, ExecPoolSpec)
        yield ExecProvider("c", [spec], JoinedFleet())


@pytest.mark.ci
def test_machines_are_launched_once_listed_and_ended(
    provider: ExecProvider, tmp_path: Path
) -> None:
    # When two machines are launched twice; Lambda accepts one launch at a time
    launched = provider.launch("any", 2, BOOT, "t")
    assert provider.launch("any", 2, BOOT, "t") == launched
    if len(launched) == 1:
        launched = sorted(launched + provider.launch("any", 1, BOOT, "u"))
    assert len(launched) == 2

    # Then two run the command of a machine, with the token
    machines = {machine.id: machine for machine in provider.machines()}
    assert [*machines] == launched
    for name, machine in machines.items():
        assert machine.state is MachineState.RUNNING
        assert machine.host in ("10.0.0.1", "")
        assert 1.6e9 < machine.launched_at < 2e9
        started = json.loads((tmp_path / "cloud" / f"{name}.started").read_text())
        assert started == {"argv": ["join", "https://hub:1", "--machine", name], "token": SECRET}

    # When one is ended, twice, then the other one is left
    provider.terminate(launched[0])
    provider.terminate(launched[0])
    assert [machine.id for machine in provider.machines()] == launched[1:]


def test_a_cloud_without_machines_has_no_capacity(
    provider: ExecProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OFFERS", "0")
    if "skypilot" in str(provider._spec.template.list):
        # It tries clouds after its command has ended.
        provider.launch("any", 2, BOOT, "t")
    else:
        with pytest.raises(NoCapacity, match="any: launch"):
            provider.launch("any", 2, BOOT, "t")
    assert provider.machines() == []
