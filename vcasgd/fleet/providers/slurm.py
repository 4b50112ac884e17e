"""Provider of machines that are jobs of a Slurm cluster, and join through the gateway.

The only module that runs Slurm's commands, for the cluster that ``SLURM_CONF`` or Slurm's own way
to find it chooses. Only jobs of this user count, so that no other user can add machines to a pool.
A job's name says whose it is, so no other record is needed to find the machines again.
"""

from __future__ import annotations

import math
import os
import re
import shlex
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
from vcasgd.fleet.providers.base import MACHINE_ID, LaunchOrder, fleet_error, kind_of
from vcasgd.fleet.providers.joining import (
    FROM_POOL,
    Listed,
    OrderedProvider,
    ordered_name,
    run_command,
)
from vcasgd.schemas.fleet import Machine, MachineState

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
    """Provider for pools of one cluster.

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

    def _listed(self) -> list[Listed]:
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
            for one in (listed.machine for listed in self._listed())
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
        env = {**inherited, "LC_ALL": "C.UTF-8", **(env or {})}
        return run_command([command, *arguments], given, env, COMMAND_SECONDS)
    except FileNotFoundError as error:
        raise InvalidRequest(
            f"there is no command {command}",
            remedy="run the controller on a machine with Slurm's commands in PATH",
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CloudUnavailable(f"{command}: {error}") from error


#: Machines of one launch; sites limit arrays to 1,001 elements by default.
MAX_LAUNCHED = 500
#: Seconds before the end of the time limit at which the agent gets notice.
NOTICE_SECONDS = 60

#: Reads the token on the node, where neither Slurm nor a list of processes shows it.
_WITH_TOKEN = 'VCASGD_TOKEN=$(cat -- "$0") && export VCASGD_TOKEN && exec "$@"'
_JOB_NAME = re.compile(
    r"vcasgd/(?P<cluster>[a-z0-9-]{1,40})/(?P<pool>[a-z][a-z0-9-]{0,39})/[\w.:-]{1,64}"
)

#: Fields, each with its width. The name, which may contain anything, is the last one.
_FIELDS = {
    "ArrayJobID": 12,
    "ArrayTaskID": 12,
    "State": 20,
    "Reason": 80,
    "NodeList": 80,
    "SubmitTime": 16,
    "StartTime": 16,
    "PreemptTime": 16,
    "Partition": 80,
    "Name": 200,
}
#: Arguments of squeue. Ended jobs, which Slurm forgets after some minutes, are listed, too.
QUEUE_ARGUMENTS = (
    "--me",
    "--array",
    "--noheader",
    "--states=all",
    "--Format=" + ",".join(f"{name}:{width}|" for name, width in _FIELDS.items()),
)
#: Environment of squeue: times as Unix seconds.
QUEUE_ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s"}
#: Times that are not known, or have not come.
_NO_TIME = ("N/A", "NONE", "Unknown", "")

_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
_LEAVING = ("COMPLETING", "STOPPED", "SUSPENDED")
_ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip
#: Beginnings of the reasons for which a job waits until a person changes something, or its owner's
#: other jobs end.
_STUCK = (
    "Account", "Assoc", "BadConstraints", "InvalidAccount", "InvalidQOS", "JobHeld", "MaxMem",
    "Partition", "QOS", "ReqNodeNotAvail", "ReservationDeleted", "launch_failed", "launch failed",
)  # fmt: skip


def job_name(cluster: str, pool: str, token: str) -> str:
    """Return the name of the jobs of a launch."""
    return f"vcasgd/{cluster}/{pool}/{token}"


def job_of(machine_id: str) -> str:
    """Return the job of a machine: one element of an array."""
    return "_".join(machine_id.rsplit("-", 2)[1:])


def submission(spec: SlurmPoolSpec, name: str, zones: Sequence[str], count: int) -> list[str]:
    """Return the arguments of sbatch for ``count`` machines, without the script.

    Jobs are not requeued: the plan replaces machines that leave, perhaps elsewhere.
    """
    template = spec.template
    optional = {
        "account": template.account,
        "qos": template.qos,
        "constraint": template.constraint,
        "mem": template.memory,
        "gpus-per-node": spec.gpus or None,
        "time": template.time_limit and math.ceil(template.time_limit.total_seconds() / 60),
    }
    return [
        "--parsable",
        f"--job-name={name}",
        f"--array=0-{count - 1}",
        f"--partition={','.join(zones)}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={spec.cpus or 1}",
        *(f"--{option}={value}" for option, value in optional.items() if value is not None),
        "--no-requeue",
        f"--signal=TERM@{NOTICE_SECONDS}",
        f"--output={template.output}",
        "--export=ALL",
        # the folder of the controller may not exist on the nodes
        "--chdir=/tmp",
    ]


def script(spec: SlurmPoolSpec, argv: Sequence[str]) -> str:
    """Return the script of the jobs, which runs ``argv`` as a step.

    Slurm sends the notices of preemption and of the time limit to steps, and not to the script. At
    ``scancel``, the script gets the signal as well, and has to wait for the step.
    """
    step = ["srun", "--export=ALL", "--ntasks=1", f"--cpus-per-task={spec.cpus or 1}"]
    step += ["bash", "-c", _WITH_TOKEN, spec.template.token_file]
    machine = ordered_name(spec.name, "${SLURM_ARRAY_JOB_ID}", "${SLURM_ARRAY_TASK_ID}")
    own = [f'"{machine}"' if text == MACHINE_ID else shlex.quote(text) for text in argv]
    command = [*map(shlex.quote, step), *own]
    return "\n".join(
        [
            "#!/bin/bash",
            spec.template.setup,
            "trap : TERM",
            f"{' '.join(command)} &",
            "while kill -0 $! 2>/dev/null; do wait $!; status=$?; done",
            "exit ${status:-1}",
            "",
        ]
    )


def parse_queue(text: str, cluster: str) -> list[Listed]:
    """Parse the output of squeue, and return the jobs of a cluster.

    Raises :class:`~vcasgd.errors.CloudUnavailable` if a line isn't as requested: a list without
    some machines would mean that these are gone.
    """
    jobs = []
    for line in filter(str.strip, text.splitlines()):
        # The last field ends with the separator, too.
        fields = line.strip().removesuffix("|").split("|", len(_FIELDS) - 1)
        try:
            row = dict(zip(_FIELDS, map(str.strip, fields), strict=True))
            owner = _JOB_NAME.fullmatch(row["Name"])
            if owner is not None and owner["cluster"] == cluster:
                jobs.append(_job(row, owner["pool"]))
        except ValueError as error:
            raise CloudUnavailable(
                f"squeue prints what can't be read: {line[:100]!r}",
                remedy="check that squeue is Slurm's own, of version 20.11 or later",
            ) from error
    return jobs


def _job(row: dict[str, str], pool: str) -> Listed:
    state, preempted_at = row["State"].upper(), _time(row["PreemptTime"])
    index = row["ArrayTaskID"]
    if index == "N/A" and state in _ENDED:
        # An array that was cancelled before any of its jobs began: one stands for all of them.
        index = "0"
    submitted_at, started_at = float(int(row["SubmitTime"])), _time(row["StartTime"])
    stuck = state == "PENDING" and row["Reason"].startswith(_STUCK)
    id_ = ordered_name(pool, str(int(row["ArrayJobID"])), int(index))
    # The start of a job that waits is an estimate.
    launched_at = submitted_at if state in _WAITING else started_at or submitted_at
    return Listed(
        Machine(
            id=id_,
            pool=pool,
            state=_state(state, preempted_at),
            launched_at=launched_at,
            notice_at=preempted_at,
            host=row["NodeList"],
            zone=row["Partition"],
            **FROM_POOL,
        ),
        launch=row["Name"],
        boot_error=f"Slurm doesn't start job {job_of(id_)}: {row['Reason']}" if stuck else None,
    )


def _state(state: str, preempted_at: float | None) -> MachineState:
    """Return the state of a machine. Unknown ones are those of machines that may run."""
    if state in _ENDED:
        return MachineState.GONE
    if preempted_at is not None or state in _LEAVING:
        return MachineState.LEAVING
    if state == "CONFIGURING":
        return MachineState.BOOTING
    return MachineState.WAITING if state in _WAITING else MachineState.RUNNING


def _time(text: str) -> float | None:
    return None if text in _NO_TIME else float(int(text))
