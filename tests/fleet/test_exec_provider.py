"""A pool's commands that fail, hang, or print something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import await_truth

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    NoCapacity,
    QuotaExceeded,
    SpecError,
    Throttled,
)
from vcasgd.fleet.pools import ExecPoolSpec, parse_pool
from vcasgd.fleet.providers.base import MACHINE_ID, Boot
from vcasgd.fleet.providers.commands import ExecProvider
from vcasgd.fleet.providers.joining import JoinedFleet
from vcasgd.schemas.fleet import MachineState

BOOT = Boot(("vcasgd", "join", "https://hub:1", "--machine", MACHINE_ID))
SECRET = "a-token-that-nobody-sees"
NOTHING = """echo '{"machines": []}'"""
Make = Callable[..., ExecProvider]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    (tmp_path / "token").write_text(f"{SECRET}\n")

    def make(cluster: str = "c", **scripts: Any) -> ExecProvider:
        template: dict[str, Any] = {"token_file": str(tmp_path / "token")}
        for name in ("list", "launch", "terminate"):
            script = scripts.pop(name, NOTHING)
            template[name] = ["sh", "-c", script, str(tmp_path / name)]
        row = {"name": "any", "provider": "exec", "template": {**template, **scripts}}
        spec = parse_pool(row, "pools.0")
        assert isinstance(spec, ExecPoolSpec)
        return ExecProvider(cluster, [spec], JoinedFleet())

    return make


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("no_capacity", NoCapacity),
        ("quota", QuotaExceeded),
        ("denied", CloudDenied),
        ("throttled", Throttled),
        ("invalid", InvalidRequest),
        ("unavailable", CloudUnavailable),
        ("something else", CloudUnavailable),
    ],
)
def test_a_command_says_why_it_refuses(make: Make, error: str, kind: type[FleetError]) -> None:
    said = json.dumps({"error": error, "message": "none left"})
    with pytest.raises(kind, match="any: launch: none left"):
        make(launch=f"echo '{said}'; exit 1").launch("any", 1, BOOT, "t")


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("echo 'no such region' >&2; exit 3", "launch: no such region"),
        ("seq 200 >&2; echo KeyError: KEY >&2; exit 1", "launch: KeyError: KEY"),
        ("exit 4", "exit status 4"),
        ("sleep 60", "took over 0.2 s"),
        ("cat", "isn't in the contract"),
        ("echo hello", "isn't in the contract"),
        ("""echo '{"machines": ["strange"]}'""", "names 'strange', unasked"),
    ],
    ids=["message", "traceback", "silence", "too long", "echo", "no JSON", "other machines"],
)
def test_a_launch_that_is_not_understood_is_tried_again(
    make: Make, script: str, shown: str
) -> None:
    provider = make(launch=script, timeout=0.2 if "sleep" in script else 30)
    with pytest.raises(CloudUnavailable) as caught:
        provider.launch("any", 1, BOOT, "t")
    assert shown in str(caught.value)
    assert caught.value.retryable


def test_a_command_that_hangs_leaves_no_process(make: Make, tmp_path: Path) -> None:
    provider = make(list="sleep 600 & echo $! > $0; wait", timeout="1s")

    with pytest.raises(CloudUnavailable, match="took over 1 s"):
        provider.machines()

    child = int((tmp_path / "list").read_text())
    await_truth(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")


def test_the_token_is_in_no_error(make: Make) -> None:
    with pytest.raises(CloudUnavailable) as caught:
        make(launch="cat >&2; exit 1").launch("any", 1, BOOT, "t")
    assert "VCASGD_TOKEN" in str(caught.value)
    assert SECRET not in f"{caught.value} {caught.value.details}"


@pytest.mark.parametrize(
    "row",
    [
        {"state": "alive"},
        {"launched_at": "now"},
        {"launched_at": -1},
        {"price_per_hour": -1},
        {"surprise": 1},
        {"name": "x" * 256},
        {"launched_at": None},
    ],
    ids=str,
)
def test_no_machine_is_lost_by_a_list_that_is_not_understood(
    make: Make, row: dict[str, Any]
) -> None:
    whole = {"name": "join-any-0-0", "state": "running", "launched_at": 1.0, **row}
    said = json.dumps({"machines": [whole]})
    with pytest.raises(CloudUnavailable, match=r"list printed .*machines\.0\."):
        make(list=f"echo '{said}'").machines()


def test_launch_gets_what_a_machine_runs(make: Make, tmp_path: Path) -> None:
    provider = make(launch=f"cat > $0.in; {NOTHING}")
    with pytest.raises(NoCapacity):
        provider.launch("any", 2, BOOT, "t")
    given = json.loads((tmp_path / "launch.in").read_text())
    first, second = given["machines"]
    assert first["command"] == ["vcasgd", "join", "https://hub:1", "--machine", first["name"]]
    assert first["name"] != second["name"]
    assert given["env"] == {"VCASGD_TOKEN": SECRET}
    assert (given["cluster"], given["pool"], given["spot"]) == ("c", "any", True)
    assert (given["zones"], given["machine_types"]) == (["any"], ["machine"])


def test_terminate_gets_machines_as_they_are_listed(make: Make, tmp_path: Path) -> None:
    # Given machines of this cluster, of another one, and of nobody
    names = {}
    for cluster in ("c", "other"):
        with pytest.raises(NoCapacity):
            make(cluster, launch=f"cat > $0.in; {NOTHING}").launch("any", 1, BOOT, "t")
        (asked,) = json.loads((tmp_path / "launch.in").read_text())["machines"]
        names[cluster] = asked["name"]
    rows = [
        {"name": name, "id": f"i-{name}", "state": "running", "launched_at": 1,
         "price_per_hour": 0.3, "notice_at": 7, "problem": "a\nb"}
        for name in (*names.values(), "web-1")
    ]  # fmt: skip
    (tmp_path / "rows").write_text(json.dumps({"machines": rows}))

    # When its own ones are listed, and all are terminated
    provider = make(list=f"cat {tmp_path}/rows", terminate="cat > $0.in")
    (machine,) = provider.machines()
    provider.terminate(*names.values(), "web-1")

    # Then only its own one is, as it is listed
    assert (machine.id, machine.price_per_hour, machine.notice_at) == (names["c"], 0.3, 7)
    assert machine.state is MachineState.RUNNING
    assert provider.boot_error(machine.id) == "a b"
    (ended,) = json.loads((tmp_path / "terminate.in").read_text())["machines"]
    assert ended["id"] == f"i-{names['c']}"


def test_commands_get_only_the_variables_that_the_pool_names(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VCASGD_LEDGER_URL", "redis://:password@host")
    monkeypatch.setenv("CLOUD_KEY", "k")
    make(list=f"env > $0.env; {NOTHING}", env=["CLOUD_KEY"]).machines()
    shown = (tmp_path / "list.env").read_text()
    assert "CLOUD_KEY=k" in shown
    assert "VCASGD" not in shown


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "p" * 21}, "pools.0"),
        ({"template": {"list": []}}, "pools.0.template.list"),
        ({"template": {"timeout": "31s"}}, "pools.0.template.timeout"),
        ({"template": {"env": "KEY"}}, "pools.0.template.env"),
    ],
)
def test_a_pool_that_can_not_work_is_refused(changes: dict[str, Any], field: str) -> None:
    template = {"list": ["l"], "launch": ["a"], "terminate": ["t"], "token_file": "/t"}
    row = {"name": "any", "provider": "exec", **changes}
    row["template"] = {**template, **changes.get("template", {})}
    with pytest.raises(SpecError) as caught:
        parse_pool(row, "pools.0")
    assert caught.value.details["field"] == field


def test_a_command_that_does_not_exist_is_named() -> None:
    template = {"list": ["/no/cloud"], "launch": ["a"], "terminate": ["t"], "token_file": "/t"}
    pool = parse_pool({"name": "any", "provider": "exec", "template": template}, "pools.0")
    assert isinstance(pool, ExecPoolSpec)
    with pytest.raises(InvalidRequest, match=r"template\.list: /no/cloud can't be run"):
        ExecProvider("c", [pool], JoinedFleet()).machines()
