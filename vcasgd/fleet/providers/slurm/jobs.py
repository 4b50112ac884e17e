"""Jobs of Slurm as machines: how they are submitted, and how ``squeue`` lists them.

The name of a job says whose it is, so that no other record is needed to find the machines again.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence

from vcasgd.errors import CloudUnavailable
from vcasgd.fleet.pools import SlurmPoolSpec
from vcasgd.fleet.providers.base import MACHINE_ID, MachineState
from vcasgd.fleet.providers.joining import OrderedMachine, ordered_name

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

_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
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


def parse_queue(text: str, cluster: str) -> list[OrderedMachine]:
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


def _job(row: dict[str, str], pool: str) -> OrderedMachine:
    state, preempted_at = row["State"].upper(), _time(row["PreemptTime"])
    index = row["ArrayTaskID"]
    if index == "N/A" and state in _ENDED:
        # An array that was cancelled before any of its jobs began: one stands for all of them.
        index = "0"
    submitted_at, started_at = float(int(row["SubmitTime"])), _time(row["StartTime"])
    stuck = state == "PENDING" and row["Reason"].startswith(_STUCK)
    id_ = ordered_name(pool, str(int(row["ArrayJobID"])), int(index))
    return OrderedMachine(
        id=id_,
        pool=pool,
        launch=row["Name"],
        state=_state(state, preempted_at),
        # The start of a job that waits is an estimate.
        launched_at=submitted_at if state in _WAITING else started_at or submitted_at,
        notice_at=preempted_at,
        host=row["NodeList"],
        zone=row["Partition"],
        problem=f"Slurm doesn't start job {job_of(id_)}: {row['Reason']}" if stuck else None,
    )


def _state(state: str, preempted_at: float | None) -> MachineState:
    """Return the state of a machine. Unknown ones are those of machines that may run."""
    if state in _ENDED:
        return MachineState.GONE
    if preempted_at is not None or state in _LEAVING:
        return MachineState.LEAVING
    return MachineState.BOOTING if state in _WAITING else MachineState.RUNNING


def _time(text: str) -> float | None:
    return None if text in _NO_TIME else float(int(text))
