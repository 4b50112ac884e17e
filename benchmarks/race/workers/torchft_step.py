"""torchft: data parallelism with an all-reduce of the gradients in each step, and a lighthouse.

https://docs.pytorch.org/torchft/

The gradients are reduced as one vector by the manager, because torchft's own
``DistributedDataParallel`` fails in the survivors when a group is killed.
"""

from __future__ import annotations

import os

import torch
from torch.nn.utils import parameters_to_vector

from common import Notice, Reporter, Training, worker_options
from torchft_parts import make_manager, run_lighthouse


def main() -> None:
    options = worker_options()
    if options.role == "coordinator":
        run_lighthouse(options)
    notice, training, reporter = Notice(), Training(options), Reporter(options)
    manager = make_manager(options, training, timeout=options.patience + 1.0)
    parameters = list(training.model.parameters())
    while not notice.given:
        manager.start_quorum()
        training.backward()
        gradients = [torch.empty(0) if each.grad is None else each.grad for each in parameters]
        flat = parameters_to_vector(gradients)
        manager.allreduce(flat).wait()
        reporter.step()
        if manager.should_commit():
            for gradient, part in zip(
                gradients, flat.split([each.numel() for each in gradients]), strict=True
            ):
                gradient.copy_(part.view_as(gradient))
            training.optimizer.step()
            reporter.commit(manager.batches_committed() * options.batch, training.model)
    # The threads of the manager would wait for the other groups.
    os._exit(0)


if __name__ == "__main__":
    main()
