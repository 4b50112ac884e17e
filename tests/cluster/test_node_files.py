"""Files of a machine's node that has no folder of its own, as on machines of clouds."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
from support.children import Process
from support.ports import free_port
from support.waiting import await_truth

from vcasgd.cluster.commands import node_command


def test_killed_node_without_a_folder_leaves_no_files(tmp_path: Path) -> None:
    # Given a node that waits for its head, and the process that its workers are forks of
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = node_command(
        address=f"127.0.0.1:{free_port()}",
        machine_id="a-machine",
        cpus=1,
        temp_dir=None,
        heartbeat=1.0,
        preload=("json",),
        token="a-token-that-is-long-enough",
    )
    env = {**command.env, "TMPDIR": str(temporary), "RAY_TMPDIR": str(temporary)}
    node = Process(list(command.argv), tmp_path / "log", env)
    try:
        await_truth(lambda: list(temporary.glob("vcasgd-*/forks")))
        await_truth(psutil.Process(node.pid).children)
        # When the node is killed
        assert node.alive, "the fault did not fire: the node was dead already"
        os.kill(node.pid, signal.SIGKILL)
        assert node.wait() == -signal.SIGKILL
    finally:
        node.end()
    # Then its folder is removed
    await_truth(lambda: not list(temporary.glob("vcasgd-*")))
