"""Store nodes in the settings: several URLs, and the one of a parameter server."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcasgd.chaos.audited_job import own_settings
from vcasgd.errors import SpecError
from vcasgd.limits import MIN_SECRET
from vcasgd.settings import load_settings, separate_settings
from vcasgd.stack.control import environment

TWO = "redis://:first-secret@a:1/0 redis://:other-secret@b:2/0"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENSORS_URL", "NODE", "NODE_URL", "STORE_NODES"):
        monkeypatch.delenv(f"VCASGD_{name}", raising=False)


def test_several_urls_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCASGD_TENSORS_URL", TWO)

    assert load_settings().tensors_urls() == TWO.split()
    assert "first-secret" not in repr(load_settings())
    assert "other-secret" not in repr(load_settings())


@pytest.mark.parametrize("wrong", ["http://b:2", "redis://:other-secret@b:port/0", "b"])
def test_each_url_is_checked_and_not_shown(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("VCASGD_TENSORS_URL", f"redis://:first-secret@a:1/0 {wrong}")

    with pytest.raises(SpecError, match="VCASGD_TENSORS_URL") as caught:
        load_settings()
    assert "secret" not in str(caught.value)


def test_missing_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="VCASGD_TENSORS_URL is not set"):
        load_settings().tensors_urls()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NODE", "0", TWO.split()[0]),
        ("NODE", "1", TWO.split()[1]),
        ("STORE_NODES", "2", TWO.split()[0]),
        ("NODE_URL", "unix://:secret@/a.sock?db=0", "unix://:secret@/a.sock?db=0"),
    ],
)
def test_the_url_of_a_parameter_servers_own_node(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv("VCASGD_TENSORS_URL", TWO)
    monkeypatch.setenv(f"VCASGD_{name}", value)

    assert load_settings().own_tensors_url() == expected


def test_a_node_without_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCASGD_TENSORS_URL", TWO)
    monkeypatch.setenv("VCASGD_NODE", "2")

    with pytest.raises(SpecError, match="there is no store node 2; VCASGD_TENSORS_URL has 2"):
        load_settings().own_tensors_url()


@pytest.mark.parametrize("name", ["JOB_SECRET", "RAY_TOKEN", "WEBHOOK_SECRET"])
def test_a_short_secret_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"VCASGD_{name}", "s" * MIN_SECRET)
    load_settings()
    monkeypatch.setenv(f"VCASGD_{name}", "s" * (MIN_SECRET - 1))

    with pytest.raises(SpecError, match=f"VCASGD_{name}: .* at least {MIN_SECRET}") as caught:
        load_settings()
    assert "sss" not in str(caught.value)


def test_a_separate_stack_has_nothing_of_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A stack with these pools and this cluster's name would end the user's machines with its own
    of_user = {
        "POOLS": "pools.yaml", "CLUSTER": "production", "JOIN_PORT": "7600", "TOKEN": "t" * 32,
        "LEDGER_URL": "redis://ledger", "MONTHLY_BUDGET_USD": "9", "REDIS_SERVER": "/x/server",
    }  # fmt: skip
    for name, value in of_user.items():
        monkeypatch.setenv(f"VCASGD_{name}", value)

    for settings in (separate_settings(home=tmp_path), own_settings(tmp_path)):
        passed = environment(settings)
        assert passed["VCASGD_HOME"] == str(tmp_path)
        same = {name for name in of_user if passed.get(f"VCASGD_{name}") == of_user[name]}
        assert same == {"REDIS_SERVER"}


def test_paths_are_absolute_in_other_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("VCASGD_POOLS", "pools.yaml")
    monkeypatch.setenv("VCASGD_PRICES", "~/prices.json")
    program = tmp_path / "bin" / "some-server"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(program.parent))

    passed = environment(load_settings())
    for name in ("bin/some-server", "some-server"):
        monkeypatch.setenv("VCASGD_REDIS_SERVER", name)
        assert environment(load_settings())["VCASGD_REDIS_SERVER"] == str(program)

    assert passed["VCASGD_POOLS"] == f"{tmp_path}/pools.yaml"
    assert passed["VCASGD_PRICES"] == f"{tmp_path}/me/prices.json"
