"""Ray's processes of one machine, without the parts that vcasgd doesn't use.

A machine needs none of Ray's agents: the dashboard, metrics, and runtime environments are not used.
Without them, a node needs 200 MB less and starts earlier, because Ray's node waits until its agents
run. It replaces private parts of Ray, so ``pyproject.toml`` caps Ray's version.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import ray._private.node
from ray._private import ray_constants, services
from ray._private.parameter import RayParams

from vcasgd.cluster.commands import PASSWORD_VARIABLE

#: Seconds that Ray has to clean up and to log what died.
CLEANUP_SECONDS = 3.0
#: Last line in the log of a head that lost its control service.
CONTROL_SERVICE_DIED = "Ray's control service died, and the head ends with it"
#: Stands for an agent, because the raylet ends with its agents.
NO_AGENT = Path(__file__).with_name("no_agent.py")
#: Port of an agent that is not there; unlike 0, the raylet does not wait for it.
NO_PORT = -1


class _LeanNode(ray._private.node.Node):
    """Ray's node without the dashboard."""

    def start_api_server(self, **_options: Any) -> None:
        """Start nothing: Ray would start a part of its dashboard even without one."""


def run(given: argparse.Namespace) -> NoReturn:
    """Start the processes, and end with them: with status 1 if one of them died."""
    _start_no_agents()
    params = _parameters(given)
    if given.head is not None:
        _end_with_the_control_service()
        password = os.environ.pop(PASSWORD_VARIABLE, None)
        if password is not None:
            params.redis_password = password
            _hide_password()
    node = _LeanNode(params, head=given.head is not None, shutdown_at_exit=True, spawn_reaper=True)
    _wait(node)


def _parameters(given: argparse.Namespace) -> RayParams:
    host = given.node_ip_address
    params = RayParams(
        node_ip_address=host,
        node_name=host,
        # With Ray's fixed range, several nodes of one host would compete for the same ports.
        min_worker_port=0,
        max_worker_port=0,
        object_store_memory=given.object_store_memory,
        num_cpus=int(given.num_cpus) if given.num_cpus.is_integer() else given.num_cpus,
        num_gpus=int(given.num_gpus),
        labels=dict(label.split("=", 1) for label in given.label),
        temp_dir=given.temp_dir,
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type]
        no_monitor=True,
    )
    if given.head is not None:
        params.gcs_server_port = given.head
    else:
        params.gcs_address = given.address
    return params


# -- agents ----------------------------------------------------------------------------------------


def _start_no_agents() -> None:
    """Change the raylet's command, so that it starts none of its agents."""
    start_process = services.start_ray_process
    agent = subprocess.list2cmdline([sys.executable, "-I", "-S", str(NO_AGENT)])
    replaced = {
        "--dashboard_agent_command": agent,
        "--runtime_env_agent_command": agent,
        "--metrics-agent-port": str(NO_PORT),
        "--metrics_export_port": str(NO_PORT),
        "--runtime_env_agent_port": str(NO_PORT),
        "--dashboard_agent_listen_port": str(NO_PORT),
    }

    def changed(command: list[str], process_type: str, *arguments: Any, **options: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            command = [part for part in command if part.partition("=")[0] not in replaced]
            command += [f"{name}={value}" for name, value in replaced.items()]
        return start_process(command, process_type, *arguments, **options)

    services.start_ray_process = changed


# -- head ------------------------------------------------------------------------------------------


def _end_with_the_control_service() -> None:
    """Make a head exit if its control service dies while the head starts.

    Ray's node then waits for the control service, dead or alive, for as long as a node may be
    without one.
    """
    start_process = services.start_ray_process

    def watched(command: list[str], process_type: str, *arguments: Any, **options: Any) -> Any:
        started = start_process(command, process_type, *arguments, **options)
        if process_type == ray_constants.PROCESS_TYPE_GCS_SERVER:
            threading.Thread(target=_end_after, args=(started.process,), daemon=True).start()
        return started

    services.start_ray_process = watched


def _end_after(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    time.sleep(CLEANUP_SECONDS)
    sys.stderr.write(f"{CONTROL_SERVICE_DIED}\n")
    sys.stderr.flush()
    os._exit(1)


def _hide_password() -> None:
    """Pass the ledger's password to Ray's children without showing it in ``ps``.

    Ray passes it as an argument. The raylet does not need it, and the control service also reads
    its flags from the environment.
    """
    start_raylet, start_process = services.start_raylet, services.start_ray_process

    def without_password(*arguments: Any, **options: Any) -> Any:
        return start_raylet(*arguments, **{**options, "redis_password": None})

    def by_environment(command: list[str], *arguments: Any, **options: Any) -> Any:
        marked = [part for part in command if part.startswith("--redis_password=")]
        for part in marked:
            command[command.index(part)] = "--fromenv=redis_password"
            options["env_updates"] = {"FLAGS_redis_password": part.partition("=")[2]}
        return start_process(command, *arguments, **options)

    services.start_raylet, services.start_ray_process = without_password, by_environment


# -- end -------------------------------------------------------------------------------------------


def _wait(node: Any) -> NoReturn:
    """Wait until one of Ray's processes dies; then end the others, and this one."""
    while not (dead := node.dead_processes()):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended is not None and not node.dead_processes():
            os.waitpid(ended.si_pid, 0)  # Not one of Ray's.
    for name, process in dead:
        sys.stderr.write(f"{name} ended with status {process.returncode}\n")
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    os._exit(1)
