"""Provider of machines that are jobs of a Slurm cluster, and join through the gateway.

The name of each job says whose it is, so submissions need no other record. Only jobs of this user
count, so that no other user can add machines to a pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vcasgd.errors import CloudUnavailable
from vcasgd.fleet.pools import SlurmPoolSpec
from vcasgd.fleet.providers.base import Machine, MachineState
from vcasgd.fleet.providers.join.provider import JoinedFleet
from vcasgd.fleet.providers.pooled import LaunchOrder, OrderedProvider
from vcasgd.fleet.providers.slurm.client import SlurmClient
from vcasgd.fleet.providers.slurm.names import Label, MachineName
from vcasgd.fleet.providers.slurm.queue import QueuedJob, parse_queue
from vcasgd.fleet.providers.slurm.request import MAX_LAUNCHED, script, submission, submitted


class SlurmProvider(OrderedProvider[SlurmPoolSpec]):
    """Provider for pools of one cluster. A machine that waits in Slurm's queue is ``BOOTING``."""

    name = "slurm"
    max_terminated = 200

    def __init__(self, cluster: str, pools: Sequence[SlurmPoolSpec], joined: JoinedFleet) -> None:
        super().__init__(cluster, pools, joined)
        self._slurm = SlurmClient()

    def _launch(self, order: LaunchOrder[SlurmPoolSpec]) -> list[str]:
        """See the contract. Submits one array; Slurm starts its jobs when it has room.

        Slurm lists the jobs of a launch until some minutes after their end (``MinJobAge``). For an
        array that was cancelled before any of its jobs began, the answer to the same launch is its
        first machine, which never appears.
        """
        self._check_kind(order)
        pool = order.spec.name
        label = Label(self._cluster, pool, order.token)
        if granted := [str(job.machine) for job in self._jobs() if job.label == label]:
            return sorted(granted)
        count = min(order.count, MAX_LAUNCHED)
        arguments = submission(order.spec, label, ",".join(order.zones), count)
        answer = self._slurm.submit(arguments, script(order.spec, order.boot.argv), pool)
        try:
            array = submitted(answer)
        except ValueError as error:
            raise CloudUnavailable(f"sbatch prints no job id: {answer[:100]!r}") from error
        return [str(MachineName(pool, array, index)) for index in range(count)]

    def machines(self) -> list[Machine]:
        """See the contract."""
        present = [job for job in self._jobs() if job.machine_state is not MachineState.GONE]
        self._boot_errors = {str(job.machine): job.stuck for job in present}
        leaving = self._joined.leaving()
        return [
            self._machine(
                str(job.machine),
                job.label.pool,
                job.machine_state,
                launched_at=job.started_at or job.submitted_at,
                notice_at=job.preempted_at,
                host=job.node,
                zone=job.partition,
                left_at=leaving.get(str(job.machine)),
            )
            for job in present
        ]

    def terminate(self, *machine_ids: str) -> None:
        """See the contract. Ignores jobs of others."""
        if own := self._own(machine_ids):
            self._slurm.cancel([each.job for each in own])

    def evict(self, machine_id: str, notice_seconds: float | None = None) -> None:  # noqa: ARG002
        """Send the signal that Slurm sends at a preemption. The agent then leaves in its time."""
        for each in self._own([machine_id]):
            self._slurm.signal(each.job, "TERM")

    def kill(self, machine_id: str) -> None:
        """See the contract."""
        for each in self._own([machine_id]):
            self._slurm.kill(each.job)

    def _jobs(self) -> list[QueuedJob]:
        return parse_queue(self._slurm.queue(), self._cluster)

    def _own(self, machines: Iterable[str]) -> list[MachineName]:
        """Return the machines that are jobs of this cluster and have not ended."""
        wanted = set(machines)
        return [
            job.machine
            for job in self._jobs()
            if str(job.machine) in wanted and job.machine_state is not MachineState.GONE
        ]
