"""hivemind: local steps, and an average of all peers' parameters in each of its epochs.

https://learning-at-home.readthedocs.io/en/latest/modules/optim.html

The coordinator is the peer of the DHT that new peers contact first.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import hivemind

from common import Notice, Reporter, Training, WorkerOptions, worker_options

ADDRESS_FILE, IDENTITY_FILE = "dht-address", "dht-identity"


def run_first_peer(options: WorkerOptions) -> None:
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{options.host}/tcp/{options.port}"],
        identity_path=str(options.folder / IDENTITY_FILE),
        start=True,
    )
    part = options.folder / f"{ADDRESS_FILE}.part"
    part.write_text(str(dht.get_visible_maddrs()[0]))
    part.rename(options.folder / ADDRESS_FILE)
    while True:
        signal.pause()


def await_address(path: Path) -> str:
    while not path.exists():
        time.sleep(0.1)
    return path.read_text()


def main() -> None:
    options = worker_options()
    if options.role == "coordinator":
        run_first_peer(options)
    training, reporter = Training(options), Reporter(options)
    dht = hivemind.DHT(
        initial_peers=[await_address(options.folder / ADDRESS_FILE)],
        host_maddrs=[f"/ip4/{options.address}/tcp/0"],
        start=True,
    )
    target = options.batch * options.sync_every * options.workers
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="race",
        optimizer=training.optimizer,
        params=list(training.model.parameters()),
        batch_size_per_step=options.batch,
        target_batch_size=target,
        use_local_updates=True,
        # An epoch takes seconds, so the defaults would be far too long.
        matchmaking_time=0.5,
        averaging_timeout=options.patience + 3.0,
        load_state_timeout=options.patience + 8.0,
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5},
    )
    # After hivemind has set its own handlers.
    notice, epoch = Notice(), optimizer.local_epoch
    while not notice.given:
        training.backward()
        optimizer.step()
        reporter.step()
        if optimizer.local_epoch != epoch:
            epoch = optimizer.local_epoch
            reporter.commit(epoch * target, training.model)
    os._exit(0)


if __name__ == "__main__":
    main()
