"""torchft: ``LocalSGD`` with a lighthouse.

https://docs.pytorch.org/torchft/

Each machine is a replica group of one process. These timeouts recover fastest from a kill on this
workload.
"""

from __future__ import annotations

import os

from torchft.local_sgd import LocalSGD

from common import Notice, Reporter, Training, worker_options
from torchft_parts import make_manager, run_lighthouse


def main() -> None:
    options = worker_options()
    if options.role == "coordinator":
        run_lighthouse(options)
    notice, training, reporter = Notice(), Training(options), Reporter(options)
    manager = make_manager(options, training, timeout=options.patience)
    samples = options.batch * options.sync_every
    committed = 0
    with LocalSGD(manager, training.model, training.optimizer, options.sync_every):
        while True:
            training.backward()
            training.optimizer.step()
            reporter.step()
            if manager.batches_committed() > committed:
                committed = manager.batches_committed()
                reporter.commit(committed * samples, training.model)
                if notice.given:
                    break
    # The threads of the manager would wait for the other groups.
    os._exit(0)


if __name__ == "__main__":
    main()
