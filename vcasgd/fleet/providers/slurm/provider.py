"""Provider of machines that are jobs of a Slurm cluster, and join through the gateway.

The only module that runs Slurm's commands, for the cluster that ``SLURM_CONF`` or Slurm's own way
to find it chooses. Only jobs of this user count, so that no other user can add machines to a pool.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    NoCapacity,
    QuotaExceeded,
    Throttled,
)
from vcasgd.fleet.pools import SlurmPoolSpec
from vcasgd.fleet.providers.base import MachineState
from vcasgd.fleet.providers.errors import fleet_error, kind_of
from vcasgd.fleet.providers.joining import OrderedMachine, OrderedProvider, ordered_name
from vcasgd.fleet.providers.pooled import LaunchOrder
from vcasgd.fleet.providers.slurm.jobs import (
    MAX_LAUNCHED,
    QUEUE_ARGUMENTS,
    QUEUE_ENVIRONMENT,
    job_name,
    job_of,
    parse_queue,
    script,
    submission,
)

#: Seconds for one command. Slurm's own limit for a message is 10.
COMMAND_SECONDS = 20.0
#: Variables that commands and jobs get from this process, whose others may be secrets.
_PASSED = ("PATH", "HOME", "USER", "LOGNAME", "SLURM_CONF")
#: Messages of scancel about jobs that have ended.
_GONE = ("invalid job id", "already completing or completed")

#: Patterns of messages, which are those of ``slurm_strerror`` (``src/common/slurm_errno.c``).
_MESSAGES: dict[type[FleetError], str] = {
    QuotaExceeded: "qos policy|qosmax|qosgrp|assoc(max|grp)|accounting policy|exceeds limits"
    "|maxsubmit",
    Throttled: "unable to accept job|too many|rate limit",
    NoCapacity: "not available|required for job are down|partition is down|no partition specified"
    "|nodes are busy",
    CloudDenied: "denied|invalid account|invalid user id|user not found|authentication|munge"
    "|not permitted",
    InvalidRequest: "invalid|unrecognized option|time limit|memory specification"
    "|more processors|(cpu|node) count",
}
_REMEDIES: dict[type[FleetError], str] = {
    QuotaExceeded: "ask the cluster's administrator for a higher limit, or set max_machines",
    NoCapacity: "see sinfo; other partitions (zones) or pools may have machines",
    CloudDenied: "check the pool's account and zones with scontrol show partition",
    InvalidRequest: "check the pool's zones and template against sinfo and sbatch",
    CloudUnavailable: "check with sinfo whether this machine reaches Slurm's controller",
}


class SlurmProvider(OrderedProvider[SlurmPoolSpec]):
    """Provider for pools of one cluster. A machine that waits in Slurm's queue is ``BOOTING``.

    Slurm lists the jobs of a launch until some minutes after their end (``MinJobAge``). For an
    array that was cancelled before any of its jobs began, the answer to the same launch is its
    first machine, which never appears.
    """

    name = "slurm"
    max_terminated = 200

    def terminate(self, *machine_ids: str) -> None:
        """See the contract. Ignores jobs of others."""
        if own := self._own(*machine_ids):
            _cancel(own)

    def evict(self, machine_id: str, notice_seconds: float | None = None) -> None:  # noqa: ARG002
        """Send the signal that Slurm sends at a preemption. The agent then leaves in its time."""
        if own := self._own(machine_id):
            _cancel(own, "--signal=TERM")

    def kill(self, machine_id: str) -> None:
        """Kill the steps of a job, whose script then ends, or remove it from the queue."""
        for job in self._own(machine_id):
            # Slurm would first ask the processes of a job that it ends to leave.
            _cancel([f"{job}.0"], "--signal=KILL")
            _cancel([job], "--state=PENDING")

    def _launch_key(self, pool: str, token: str) -> str:
        return job_name(self._cluster, pool, token)

    def _listed(self) -> list[OrderedMachine]:
        done = _run("squeue", QUEUE_ARGUMENTS, env=QUEUE_ENVIRONMENT)
        return parse_queue(_output(done), self._cluster)

    def _order(self, order: LaunchOrder[SlurmPoolSpec], launch: str) -> list[str]:
        """Submit one array; Slurm starts its jobs when it has room."""
        spec, count = order.spec, min(order.count, MAX_LAUNCHED)
        arguments = submission(spec, launch, order.zones, count)
        done = _run("sbatch", arguments, given=script(spec, order.boot.argv))
        # The id of the array, and perhaps the cluster.
        array = _output(done, spec.name).strip().partition(";")[0]
        if not array.isdecimal():
            raise CloudUnavailable(f"sbatch prints no job id: {done.stdout[:100]!r}")
        return [ordered_name(spec.name, array, index) for index in range(count)]

    def _own(self, *machine_ids: str) -> list[str]:
        """Return the jobs of machines of this cluster that have not ended."""
        return [
            job_of(one.id)
            for one in self._listed()
            if one.id in machine_ids and one.state is not MachineState.GONE
        ]


def _cancel(jobs: Sequence[str], *options: str) -> None:
    """Cancel or signal jobs. Ignores those that have ended."""
    done = _run("scancel", [*options, *jobs])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    others = [line for line in lines if not any(gone in line.lower() for gone in _GONE)]
    if done.returncode and others:
        raise error_of("scancel", "\n".join(others))


def _output(done: subprocess.CompletedProcess[str], pool: str | None = None) -> str:
    if done.returncode:
        raise error_of(done.args[0], done.stderr or done.stdout, pool=pool)
    return done.stdout


def error_of(command: str, output: str, *, pool: str | None = None) -> FleetError:
    """Convert the output of a command that failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    text = "; ".join(line.removeprefix(f"{command}: ").removeprefix("error: ") for line in lines)
    message = f"{command}: {text[:300] or 'it failed without a message'}"
    return fleet_error(kind_of(text, _MESSAGES), message, remedies=_REMEDIES, pool=pool)


def _run(
    command: str,
    arguments: Sequence[str],
    *,
    given: str = "",
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    inherited = {name: os.environ[name] for name in _PASSED if name in os.environ}
    try:
        return subprocess.run(
            [command, *arguments],
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
            check=False,
            env={**inherited, "LC_ALL": "C.UTF-8", **(env or {})},
        )
    except FileNotFoundError as error:
        raise InvalidRequest(
            f"there is no command {command}",
            remedy="run the controller on a machine with Slurm's commands in PATH",
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CloudUnavailable(f"{command}: {error}") from error
