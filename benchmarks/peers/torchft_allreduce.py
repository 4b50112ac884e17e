"""torchft: a fault-tolerant all-reduce between replica groups, with Gloo, on a lighthouse.

https://docs.pytorch.org/torchft/

Each replica group is one process with its own manager. A step does what torchft's examples do in
each training step: start a quorum, all-reduce the vector, and vote on the commit. There is no
training. A step averages the vectors of all groups, so a step of two groups counts as two updates.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from common import Count, measure, options, others, show

STEP_TIMEOUT = timedelta(seconds=30)


class Replica:
    """One replica group with its number of committed steps."""

    def __init__(self, floats: int, groups: int, lighthouse: str) -> None:
        # The groups share the processors of one machine.
        torch.set_num_threads(1)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._vector = torch.randn(floats)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=STEP_TIMEOUT),
            load_state_dict=lambda _state: None,
            state_dict=dict,
            min_replica_size=groups,
            # All groups start with the same state, so none needs recovery.
            init_sync=False,
            use_async_quorum=False,
            timeout=STEP_TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica-{os.getpid()}",
            hostname="127.0.0.1",
        )
        self.committed = 0
        self.groups = 0

    def step(self) -> None:
        self.manager.start_quorum()
        self.manager.allreduce(self._vector).wait()
        self.groups = self.manager.num_participants()
        if self.manager.should_commit():
            self.committed += self.groups


def main() -> None:
    opts = options(__doc__ or "")
    if opts.join:
        replica = Replica(opts.floats, opts.workers, opts.join)
        while True:
            replica.step()  # The parent kills this process.
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=opts.workers, join_timeout_ms=100, quorum_tick_ms=10
    )
    address = lighthouse.address()
    with others(opts, __file__, address, opts.workers - 1):
        replica = Replica(opts.floats, opts.workers, address)
        figures = measure(replica.step, lambda: Count.of(replica.committed), opts.seconds)
        steps = figures["updates_per_s"] / opts.workers
        show(figures, ["torchft", "torch"], steps_per_s=steps, updates_per_step=replica.groups)
    # The threads of the manager would wait for the other groups.
    os._exit(0)


if __name__ == "__main__":
    main()
