"""Slurm's commands. The only module that runs them."""

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
from vcasgd.fleet.providers.errors import fleet_error, kind_of
from vcasgd.fleet.providers.slurm.queue import QUEUE_ARGUMENTS, QUEUE_ENVIRONMENT

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


class SlurmClient:
    """Commands of one Slurm cluster, which ``SLURM_CONF`` or Slurm's own way to find it chooses.

    Methods raise :class:`~vcasgd.errors.FleetError`.
    """

    def queue(self) -> str:
        """Return the output of squeue: the jobs of this user."""
        done = _run("squeue", QUEUE_ARGUMENTS, env=QUEUE_ENVIRONMENT)
        return _output(done)

    def submit(self, arguments: Sequence[str], script: str, pool: str) -> str:
        """Submit a script, and return the output of sbatch.

        After :class:`~vcasgd.errors.CloudUnavailable`, it may have been submitted.
        """
        return _output(_run("sbatch", arguments, given=script), pool)

    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel jobs. Ignores those that have ended."""
        _cancel(jobs)

    def signal(self, job: str, name: str) -> None:
        """Send a signal to the steps of a running job."""
        _cancel([job], f"--signal={name}")

    def kill(self, job: str) -> None:
        """Kill the steps of a job, whose script then ends, or remove it from the queue."""
        # Slurm would first ask the processes of a job that it ends to leave.
        _cancel([f"{job}.0"], "--signal=KILL")
        _cancel([job], "--state=PENDING")


def _cancel(jobs: Sequence[str], *options: str) -> None:
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
