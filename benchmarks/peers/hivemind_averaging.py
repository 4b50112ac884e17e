"""hivemind: rounds of averaging between peers with ``DecentralizedAverager``.

https://learning-at-home.readthedocs.io/en/latest/modules/averaging.html

Each peer is a process with its own DHT node and averager, as on separate machines; their bytes go
through hivemind's p2p daemons. There is no compression and no training. All peers call ``step``
repeatedly. One round averages the vectors of all peers, and each peer's vector is in the result,
so a round of two peers counts as two updates.

A group is complete when it has all peers; all other settings have their defaults.
"""

from __future__ import annotations

import sys

import hivemind
import torch
from hivemind.averaging.partition import AllreduceException

from common import Count, measure, options, others, show

#: Seconds for one round, including the search for the group.
ROUND_SECONDS = 20.0


class Peer:
    """One averager and the number of its rounds."""

    def __init__(self, floats: int, peers: int, initial: list[str]) -> None:
        # The peers share the processors of one machine.
        torch.set_num_threads(1)
        self.dht = hivemind.DHT(
            initial_peers=initial, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True
        )
        self._averager = hivemind.DecentralizedAverager(
            [torch.randn(floats)],
            self.dht,
            start=True,
            prefix="bench",
            target_group_size=peers,
            min_group_size=peers,
        )
        self.rounds = 0
        self.failed = 0

    def step(self) -> None:
        try:
            self._averager.step(timeout=ROUND_SECONDS)
        except AllreduceException as error:
            print(f"round failed: {error!r}", file=sys.stderr)
            self.failed += 1
        else:
            self.rounds += 1

    def close(self) -> None:
        self._averager.shutdown()
        self.dht.shutdown()


def main() -> None:
    opts = options(__doc__ or "")
    peer = Peer(opts.floats, opts.workers, [opts.join] if opts.join else [])
    while opts.join:
        peer.step()  # The parent kills this process.
    address = str(peer.dht.get_visible_maddrs()[0])
    with others(opts, __file__, address, opts.workers - 1):
        figures = measure(peer.step, lambda: Count.of(peer.rounds * opts.workers), opts.seconds)
    rounds = figures["updates_per_s"] / opts.workers
    show(
        figures,
        ["hivemind", "torch"],
        rounds_per_s=rounds,
        updates_per_round=opts.workers,
        rounds_failed=peer.failed,
    )
    peer.close()


if __name__ == "__main__":
    main()
