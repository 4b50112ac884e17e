"""Termination of machines when a stack stops."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml
from support.provider_backends import aws_backend, gcp_backend, sleeper

from vcasgd.fleet.providers.local.provider import LocalPool, LocalProvider
from vcasgd.settings import Settings
from vcasgd.stack import StackHome
from vcasgd.stack.cleanup import destroy_instances

BOOT = sleeper()


def test_destroy_terminates_the_machines_of_the_cluster_only(tmp_path: Path) -> None:
    pools = tmp_path / "pools.yaml"
    with aws_backend() as aws, gcp_backend() as gcp:
        side = {"name": "side", "provider": "local", "max_instances": 2}
        pools.write_text(yaml.safe_dump({"pools": [side, aws.document(), gcp.document()]}))
        settings = Settings(home=tmp_path, cluster="mine", pools=pools, compute_url=gcp.url)
        for world in (aws, gcp):
            world.provider("mine").launch(world.pool, 2, BOOT, "t1")
        (stranger,) = aws.provider("stranger").launch(aws.pool, 1, BOOT, "t1")
        local = LocalProvider(tmp_path, "mine", LocalPool("side", 2), owner_grace_seconds=None)
        local.launch("side", 1, BOOT, "t1")

        destroy_instances(StackHome(tmp_path), settings, ["ledger", "controller"])

        assert aws.alive() == {stranger}
        assert all(row["status"] == "STOPPING" for row in gcp.compute.alive())
        assert local.instances() == []


def test_destroy_logs_an_unreachable_cloud_and_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pools = tmp_path / "pools.yaml"
    with aws_backend() as aws, gcp_backend() as gcp:
        pools.write_text(yaml.safe_dump({"pools": [gcp.document(), aws.document()]}))
        settings = Settings(
            home=tmp_path, cluster="mine", pools=pools, compute_url="http://127.0.0.1:9"
        )
        aws.provider("mine").launch(aws.pool, 1, BOOT, "t1")

        with caplog.at_level(logging.ERROR):
            destroy_instances(StackHome(tmp_path), settings, ["ledger", "controller"])

        assert aws.alive() == set()
        assert "machines of gcp may still run" in caplog.text


def test_destroy_without_a_controller_keeps_cloud_machines(tmp_path: Path) -> None:
    pools = tmp_path / "pools.yaml"
    with aws_backend() as aws:
        pools.write_text(yaml.safe_dump({"pools": [aws.document()]}))
        settings = Settings(home=tmp_path, cluster="mine", pools=pools)
        granted = aws.provider("mine").launch(aws.pool, 1, BOOT, "t1")

        destroy_instances(StackHome(tmp_path), settings, ["ledger", "api"])

        assert aws.alive() == set(granted)
