"""Provider of machines that are jobs of a Slurm cluster, and join through the gateway.

The name of each job says whose it is, so submissions need no other record. Only jobs of this user
count, so that no other user can add machines to a pool.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from vcasgd.errors import CloudUnavailable, InvalidRequest, NoCapacity
from vcasgd.fleet.pools import SlurmPoolSpec
from vcasgd.fleet.providers.base import Boot, Machine, MachineState, Offer, narrowed
from vcasgd.fleet.providers.join.provider import JoinedFleet
from vcasgd.fleet.providers.slurm.client import SlurmClient
from vcasgd.fleet.providers.slurm.names import Label, MachineName
from vcasgd.fleet.providers.slurm.queue import QueuedJob, parse_queue
from vcasgd.fleet.providers.slurm.request import MAX_LAUNCHED, script, submission, submitted


class SlurmProvider:
    """Implementation of :class:`~vcasgd.fleet.providers.base.Provider` for pools of one cluster.

    A machine that waits in Slurm's queue is ``BOOTING``. ``joined`` says which agents leave, before
    Slurm knows it.
    """

    name = "slurm"
    max_terminated = 200

    def __init__(self, cluster: str, pools: Sequence[SlurmPoolSpec], joined: JoinedFleet) -> None:
        self._cluster = cluster
        self._pools = {pool.name: pool for pool in pools}
        self._joined = joined
        self._slurm = SlurmClient()
        self._stuck: dict[str, str | None] = {}

    def offers(self, pool: str) -> list[Offer]:
        """See the contract. Slurm has no prices; that of the pools file counts."""
        spec = self._pool(pool)
        price = spec.template.price_per_hour
        return [
            Offer(
                pool=pool,
                zone=partition,
                machine_type=spec.machine_types[0],
                spot=spec.spot,
                price_per_hour=price,
                on_demand_price_per_hour=price,
                cpus=float(spec.cpus or 1),
                gpus=spec.gpus or 0,
                as_of=time.time(),
                source="the pools file",
            )
            for partition in spec.zones
        ]

    def launch(
        self,
        pool: str,
        count: int,
        boot: Boot,
        token: str,
        *,
        zones: Sequence[str] | None = None,
        machine_types: Sequence[str] | None = None,
        spot: bool | None = None,
    ) -> list[str]:
        """See the contract. Submits one array; Slurm starts its jobs when it has room.

        Slurm lists the jobs of a launch until some minutes after their end (``MinJobAge``). For an
        array that was cancelled before any of its jobs began, the answer to the same launch is its
        first machine, which never appears.
        """
        spec = self._pool(pool)
        narrowed(spec.machine_types, machine_types, pool, "machine type")
        partition = ",".join(narrowed(spec.zones, zones, pool, "zone"))
        if spot is not None and spot is not spec.spot:
            kind = "preemptible" if spec.spot else "not preemptible"
            raise NoCapacity(f"{pool}: its partitions are {kind}", pool=pool)
        label = Label(self._cluster, pool, token)
        if granted := [str(job.machine) for job in self._jobs() if job.label == label]:
            return sorted(granted)
        count = min(count, MAX_LAUNCHED)
        arguments = submission(spec, label, partition, count)
        answer = self._slurm.submit(arguments, script(spec, boot.argv), pool)
        try:
            array = submitted(answer)
        except ValueError as error:
            raise CloudUnavailable(f"sbatch prints no job id: {answer[:100]!r}") from error
        return [str(MachineName(pool, array, index)) for index in range(count)]

    def capacity(self, pool: str) -> int | None:
        """See the contract."""
        return self._pool(pool).max_machines

    def machines(self) -> list[Machine]:
        """See the contract."""
        present = [job for job in self._jobs() if job.machine_state is not MachineState.GONE]
        self._stuck = {str(job.machine): job.stuck for job in present}
        leaving = self._joined.leaving()
        return [self._machine(job, leaving.get(str(job.machine))) for job in present]

    def boot_error(self, machine_id: str) -> str | None:
        """Return why Slurm doesn't start a job, as last listed; None if it may start by itself."""
        return self._stuck.get(machine_id)

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

    def close(self) -> None:
        """Do nothing: each command has its own connection."""

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

    def _machine(self, job: QueuedJob, left_at: float | None) -> Machine:
        spec = self._pools.get(job.label.pool)
        price = spec.template.price_per_hour if spec else 0.0
        leaves = left_at is not None
        return Machine(
            id=str(job.machine),
            pool=job.label.pool,
            state=MachineState.LEAVING if leaves else job.machine_state,
            launched_at=job.started_at or job.submitted_at,
            notice_at=left_at if leaves else job.preempted_at,
            host=job.node,
            price_per_hour=price,
            spot=spec.spot if spec else True,
            zone=job.partition,
            machine_type=spec.machine_types[0] if spec else "",
            on_demand_price_per_hour=price,
        )

    def _pool(self, name: str) -> SlurmPoolSpec:
        if name not in self._pools:
            raise InvalidRequest(
                f"there is no pool {name!r}",
                remedy=f"known pools: {', '.join(self._pools)}",
                pool=name,
            )
        return self._pools[name]
