"""Ctrl-C before a machine has joined."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from support.children import Process
from support.gateways import running_gateway
from support.waiting import await_truth


@pytest.mark.ci
def test_ctrl_c_while_a_machine_is_measured_ends_the_command(tmp_path: Path) -> None:
    log = tmp_path / "join.log"
    with running_gateway(tmp_path) as gateway:
        gateway.publish_pool()
        # Given a machine whose own torch is being imported, in a process of its own
        argv = [sys.executable, "-m", "vcasgd.cli", "join", gateway.url, "--sandbox", "off"]
        agent = Process(argv, log, {"VCASGD_TOKEN": gateway.token("ann")})
        await_truth(lambda: psutil.Process(agent.pid).children(), interval=0.005)

        # When a terminal sends the signal to both
        os.killpg(agent.pid, signal.SIGINT)

        # Then no error names torch
        assert agent.wait() == 0, log.read_text()
        assert "measures this machine" in log.read_text()
        assert "error" not in log.read_text()
