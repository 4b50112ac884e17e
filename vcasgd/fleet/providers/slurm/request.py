"""A launch as arguments of ``sbatch``, and the script of its jobs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from vcasgd.fleet.pools import SlurmPoolSpec
from vcasgd.fleet.providers.base import MACHINE_ID
from vcasgd.fleet.providers.slurm.names import Label, machine_name

#: Machines of one launch; sites limit arrays to 1,001 elements by default.
MAX_LAUNCHED = 500
#: Seconds before the end of the time limit at which the agent gets notice.
NOTICE_SECONDS = 60

#: Reads the token on the node, where neither Slurm nor a list of processes shows it.
_WITH_TOKEN = 'VCASGD_TOKEN=$(cat -- "$0") && export VCASGD_TOKEN && exec "$@"'


def submission(spec: SlurmPoolSpec, label: Label, partition: str, count: int) -> list[str]:
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
        f"--job-name={label}",
        f"--array=0-{count - 1}",
        f"--partition={partition}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={spec.cpus or 1}",
        *(f"--{name}={value}" for name, value in optional.items() if value is not None),
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
    cpus = spec.cpus or 1
    step = ["srun", "--export=ALL", "--ntasks=1", f"--cpus-per-task={cpus}"]
    step += ["bash", "-c", _WITH_TOKEN, spec.template.token_file]
    machine = machine_name(spec.name, "${SLURM_ARRAY_JOB_ID}", "${SLURM_ARRAY_TASK_ID}")
    command = [*map(shlex.quote, step), *(_argument(each, machine) for each in argv)]
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


def _argument(text: str, machine: str) -> str:
    return f'"{machine}"' if text == MACHINE_ID else shlex.quote(text)


def submitted(output: str) -> int:
    """Parse the output of ``sbatch --parsable``: the id of the array, and perhaps the cluster.

    Raises :class:`ValueError`.
    """
    return int(output.strip().partition(";")[0])
