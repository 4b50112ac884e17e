"""torchft: ``DiLoCo`` with one fragment and a lighthouse.

https://docs.pytorch.org/torchft/

The outer optimizer is that of the DiLoCo paper: momentum 0.9 and a learning rate of 0.7.
"""

from __future__ import annotations

import os

import torch
from torchft.local_sgd import DiLoCo

from common import Notice, Reporter, Training, worker_options
from torchft_parts import make_manager, run_lighthouse


def main() -> None:
    options = worker_options()
    if options.role == "coordinator":
        run_lighthouse(options)
    notice, training, reporter = Notice(), Training(options), Reporter(options)
    manager = make_manager(options, training, timeout=options.patience)
    outer = torch.optim.SGD(training.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    samples = options.batch * options.sync_every
    committed = 0
    with DiLoCo(manager, [training.model], training.optimizer, outer, options.sync_every):
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
