"""Termination of machines when a stack stops."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.harness import RedisServer
from support.provider_backends import aws_backend, gcp_backend, sleeper
from typer.testing import CliRunner

from vcasgd.chaos.faults import small_disk
from vcasgd.cli.commands import app
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.errors import StackError
from vcasgd.fleet.pools import LocalPoolSpec
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.settings import Settings
from vcasgd.stack import PartState, StackHome, StackState
from vcasgd.stack.cleanup import KnownMachines, Unended, destroy_machines
from vcasgd.store.ledger.control import Control

BOOT = sleeper()


def settings_of(home: Path, *pools: dict[str, Any], **fields: Any) -> Settings:
    (home / "pools.yaml").write_text(yaml.safe_dump({"pools": [*pools]}))
    return Settings(home=home, cluster="mine", pools=home / "pools.yaml", **fields)


def destroy(settings: Settings, *parts: str, **options: Any) -> list[Unended]:
    home = StackHome(settings.home)
    return destroy_machines(home, settings, ["ledger", *parts], look_seconds=0.05, **options)


@pytest.mark.ci
def test_destroy_terminates_the_machines_of_the_cluster_only(tmp_path: Path) -> None:
    with aws_backend() as aws, gcp_backend() as gcp:
        side = {"name": "side", "provider": "local", "max_machines": 2}
        settings = settings_of(tmp_path, side, aws.document(), gcp.document(), compute_url=gcp.url)
        for world in (aws, gcp):
            world.provider("mine").launch(world.pool, 2, BOOT, "t1")
        (stranger,) = aws.provider("stranger").launch(aws.pool, 1, BOOT, "t1")
        pool = LocalPoolSpec.model_validate(side)
        local = LocalProvider(tmp_path, "mine", pool, owner_grace_seconds=None)
        local.launch("side", 1, BOOT, "t1")

        unended = destroy(settings, "controller")

        assert unended == []
        assert aws.alive() == {stranger}
        assert all(row["status"] == "STOPPING" for row in gcp.compute.alive())
        assert local.machines() == []


@pytest.mark.ci
def test_destroy_ends_a_machine_that_appears_later(tmp_path: Path) -> None:
    with aws_backend() as aws:
        settings = settings_of(tmp_path, aws.document())
        looks, doing = [0], []

        def launch_after_the_first_look() -> bool:
            looks[0] += 1
            if looks[0] == 1:
                aws.provider("mine").launch(aws.pool, 1, BOOT, "in-flight")
            return False

        unended = destroy(
            settings, "controller", give_up=launch_after_the_first_look, progress=doing.append
        )

        assert unended == []
        assert aws.alive() == set()
        (text,) = doing
        assert text.startswith("aws: ending i-")


@pytest.mark.ci
def test_destroy_ends_machines_of_removed_pools(tmp_path: Path) -> None:
    with aws_backend() as aws:
        aws.provider("mine").launch(aws.pool, 1, BOOT, "t1")
        known = KnownMachines({"a": aws.document(name="a")})
        settings = Settings(home=tmp_path, cluster="mine")

        assert destroy(settings, "controller", known=known) == []
        assert aws.alive() == set()


@pytest.mark.ci
def test_destroy_ends_machines_of_a_pool_that_has_moved(tmp_path: Path) -> None:
    (pools := tmp_path / "pools.yaml").touch()
    with aws_backend() as aws:
        pools.write_text(yaml.safe_dump({"pools": [aws.moved()]}))
        aws.provider("mine").launch(aws.pool, 1, BOOT, "t1")
        settings = Settings(home=tmp_path, cluster="mine", pools=pools)

        known = KnownMachines({aws.pool: aws.document()})

        assert destroy(settings, "controller", known=known) == []
        assert aws.alive() == set()


def test_destroy_names_machines_that_may_still_run(tmp_path: Path) -> None:
    with aws_backend() as aws, gcp_backend() as gcp:
        # Given one cloud that can't be reached, and one that refuses to end a machine
        removed = {"gone": gcp.document(name="gone")}
        settings = settings_of(tmp_path, aws.document(), compute_url="http://127.0.0.1:9")
        (machine,) = aws.provider("mine").launch(aws.pool, 1, BOOT, "t1")
        aws.ec2.refuse("TerminateInstances", "OperationNotPermitted")

        known = KnownMachines(removed, {"m-1": "gone", "m-2": "local"})
        unended = destroy(settings, "controller", known=known, give_up=lambda: True)

        found = {each.where: each.machines for each in unended}
        assert found == {"gcp": ("m-1",), "aws": (machine,)}


def test_destroy_ends_all_machines_but_the_one_that_is_protected(tmp_path: Path) -> None:
    with gcp_backend() as gcp:
        # Given more machines than one call ends, of which the cloud refuses to end the first
        settings = settings_of(tmp_path, gcp.document(), compute_url=gcp.url)
        machines = sorted(gcp.provider("mine").launch(gcp.pool, 25, BOOT, "t1"))
        for _ in range(9):
            gcp.compute.refuse(f"instances/{machines[0]}$", 400, "invalid")
        launches = iter(["in-flight"])

        def launch_after_the_first_look() -> bool:
            for token in launches:
                gcp.provider("mine").launch(gcp.pool, 1, BOOT, token)
            return False

        (unended,) = destroy(settings, "controller", give_up=launch_after_the_first_look)

        # Then a machine that appears later ends, too, and only the protected one is reported
        assert unended.machines == (machines[0],)
        assert "invalid" in unended.why
        running = {row["name"] for row in gcp.compute.alive() if row["status"] == "RUNNING"}
        assert running == {machines[0]}


def test_down_fails_if_machines_may_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pools := tmp_path / "pools.yaml").write_text("pools: [{name: a, provider: local}]")
    monkeypatch.setenv("VCASGD_POOLS", str(pools))
    # Given a stack that was killed, and a machine of a pool that is not valid any more
    StackState(parts={"controller": PartState()}, known_machines={"i-1": "gone"}).write(tmp_path)
    used = {"cluster": "c", "pools": {"gone": {"name": "gone", "provider": "aws"}}}
    (tmp_path / "used-pools.json").write_text(json.dumps(used))

    result = CliRunner().invoke(app, ["down", "--home", str(tmp_path)])

    assert result.exit_code == 1
    text = f"{result.exception}{result.output}"
    assert "pool gone (i-1) may still run" in text


@pytest.mark.ci
def test_down_without_ledger_and_settings_ends_machines_of_removed_pools(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    with aws_backend() as aws, ExitStack() as ends:
        server = RedisServer(tmp_path / "ledger", durable=False)
        ends.callback(server.end)
        # Given a machine of a pool that was removed from the file, and a stack that was killed
        settings = settings_of(tmp_path, aws.document())
        pools = PoolRegistry(settings, Control(server.connection))
        pools.remember([aws.pool])
        pools.providers[aws.pool].launch(aws.pool, 1, BOOT, "t1")
        settings_of(tmp_path, {"name": "local", "provider": "local"})
        assert pools.refresh()
        StackState(parts={"controller": PartState()}).write(tmp_path)

        # When it is stopped in a shell without its settings
        result = CliRunner().invoke(app, ["down", "--home", str(tmp_path)])

        # Then the machine ends, and is not asked for again
        assert result.exit_code == 0, result.output
        assert aws.alive() == set()
        assert not (tmp_path / "used-pools.json").exists()


def test_destroy_without_a_controller_keeps_cloud_machines(tmp_path: Path) -> None:
    with aws_backend() as aws:
        settings = settings_of(tmp_path, aws.document())
        granted = aws.provider("mine").launch(aws.pool, 1, BOOT, "t1")

        assert destroy(settings, "api") == []

        assert aws.alive() == set(granted)


def test_up_names_a_full_disk(tmp_path: Path) -> None:
    try:
        disk = ExitStack()
        disk.enter_context(small_disk(home := tmp_path / "home"))
    except StackError as error:
        pytest.skip(str(error))
    with disk:
        with suppress(OSError), (home / "data").open("wb", buffering=0) as file:
            while file.write(b"0" * 4096):
                pass

        result = CliRunner().invoke(app, ["up", "--home", str(home), "--port", "0"])

        assert result.exit_code == 1
        text = f"{result.exception}{result.output}"
        assert f"the disk of {home} is full: 0.0 MB are free" in text
