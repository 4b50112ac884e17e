"""Names and dependencies of parts with several store nodes, and the state of a stack."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from vcasgd.errors import SpecError, StackError
from vcasgd.settings import Settings
from vcasgd.stack.home import PartState, StackHome, StackState
from vcasgd.stack.layout import StackLayout, kind_of, node_of, part_names
from vcasgd.stack.parts import StackPart, make_parts


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make folders of homes with long paths where the test's others are."""
    make = tmp_path_factory.mktemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: str(make("scratch")))


@pytest.mark.parametrize(
    ("kind", "nodes", "expected"),
    [
        ("tensors", 1, ["tensors"]),
        ("tensors", 3, ["tensors-0", "tensors-1", "tensors-2"]),
        ("server", 2, ["server-0", "server-1"]),
        ("ledger", 3, ["ledger"]),
    ],
)
def test_part_names_number_the_store_nodes(kind: str, nodes: int, expected: list[str]) -> None:
    names = part_names(kind, nodes)

    assert names == expected
    assert {kind_of(name) for name in names} == {kind}
    assert [node_of(name) for name in names] == list(range(len(names)))


def plan(home: Path, before: StackState | None = None, **options: Any) -> StackLayout:
    stack_home = StackHome(home)
    stack_home.create()
    settings = Settings(home=home, api_port=0, **options)
    return StackLayout.plan(stack_home, settings, before or StackState())


def environment_of(part: StackPart) -> Mapping[str, str]:
    command = part.command()
    assert command is not None
    return command.env


def test_parameter_server_needs_only_the_tensors_server_of_its_node(tmp_path: Path) -> None:
    parts = {part.name: part for part in make_parts(plan(tmp_path, store_nodes=2))}

    assert list(parts) == [
        *("ledger", "tensors-0", "tensors-1", "server-0", "server-1", "head", "api", "controller")
    ]
    assert parts["server-1"].needs == ("ledger", "tensors-1")
    assert environment_of(parts["server-1"])["VCASGD_NODE"] == "1"
    assert parts["controller"].needs == ("ledger", "tensors-0", "tensors-1", "head")
    urls = environment_of(parts["controller"])["VCASGD_TENSORS_URL"].split()
    assert len(set(urls)) == 2


def test_machines_of_slurm_need_a_port_to_join_and_no_ray(tmp_path: Path) -> None:
    pools = tmp_path / "pools.yaml"
    pools.write_text(
        "pools: [{name: hpc, provider: slurm, zones: [spot], template: {token_file: /token}}]\n"
    )
    with pytest.raises(SpecError, match="no address where they can join"):
        make_parts(plan(tmp_path, pools=pools))

    layout = plan(tmp_path, pools=pools, join_port=0, join_url="https://stack:1")
    parts = {part.name: part for part in make_parts(layout)}

    assert "head" not in parts
    assert environment_of(parts["controller"])["VCASGD_JOIN_URL"] == "https://stack:1"
    assert "VCASGD_JOIN_KEY" not in environment_of(parts["controller"])


def test_machines_join_where_the_gateway_listens(tmp_path: Path) -> None:
    environment = plan(tmp_path, join_port=0, join_host="127.0.0.1").join_env

    port = environment["VCASGD_JOIN_PORT"]
    assert environment["VCASGD_JOIN_URL"] == f"https://127.0.0.1:{port}"


def test_number_of_nodes_defaults_to_the_last_start(tmp_path: Path) -> None:
    assert plan(tmp_path).nodes == 1
    assert plan(tmp_path, StackState(store_nodes=3)).nodes == 3
    assert plan(tmp_path, StackState(store_nodes=3), store_nodes=2).nodes == 2


def test_external_tensors_servers_define_the_nodes(tmp_path: Path) -> None:
    urls = SecretStr("redis://a:1/0 redis://b:2/0")

    layout = plan(tmp_path, tensors_url=urls)

    assert (layout.nodes, layout.tensors_url) == (2, urls.get_secret_value())
    names = [part.name for part in make_parts(layout)]
    assert names == ["ledger", "server-0", "server-1", "head", "api", "controller"]
    with pytest.raises(StackError, match="ask for 3 store nodes"):
        plan(tmp_path, tensors_url=urls, store_nodes=3)


def test_state_of_another_version_is_read(tmp_path: Path) -> None:
    # Given a state with everything that JSON doesn't know
    error = StackError("the port is taken", remedy="choose another one")
    state = StackState(supervisor=PartState(pid=7, ticks=8), parts={"api": PartState(restarts=2)})
    state.with_error(error).write(tmp_path)
    file = tmp_path / "stack.json"
    # When a newer version wrote it, then it is as it was
    file.write_text(json.dumps(json.loads(file.read_text()) | {"new": 1}))
    assert StackState.read(tmp_path) == state.with_error(error)
    with pytest.raises(StackError, match="the port is taken"):
        StackState.read(tmp_path).raise_error()


@pytest.mark.parametrize("text", ["{", "[]", '{"phase": "asleep"}', '{"parts": {"api": 3}}'])
def test_damaged_state_has_a_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "stack.json").write_text(text)
    with pytest.raises(StackError, match=r"stack\.json is damaged") as caught:
        StackState.read(tmp_path)
    assert caught.value.remedy == "remove it"
