"""torchrun: elastic data parallelism that restarts from a checkpoint when a machine is lost.

https://docs.pytorch.org/docs/stable/elastic/run.html

Each machine is an agent with one trainer. The coordinator is the store of the rendezvous.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch.distributed as dist
from torch import nn

from checkpoints import load, save
from common import Reporter, Training, WorkerOptions, worker_options

#: Losses are noticed after three missed heartbeats of a second, instead of five.
RENDEZVOUS = "is_host=false,last_call_timeout=2,keep_alive_interval=1,read_timeout=20"


def run_store(options: WorkerOptions) -> None:
    store = dist.TCPStore(options.host, options.port, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    while True:
        signal.pause()


def become_agent(options: WorkerOptions) -> None:
    """Replace this process by the agent, which starts this script as a trainer."""
    arguments = ["trainer" if each == "worker" else each for each in sys.argv[1:]]
    torchrun = [
        *("-m", "torch.distributed.run"),
        *("--nnodes", f"1:{options.workers + 1}", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", options.coordinator),
        *("--rdzv-id", "race", "--rdzv-conf", RENDEZVOUS),
        *("--max-restarts", "100000", "--monitor-interval", "0.1", "--local-addr", options.address),
    ]
    os.execv(sys.executable, [sys.executable, *torchrun, sys.argv[0], *arguments])


def train(options: WorkerOptions) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    training, reporter = Training(options), Reporter(options)
    path = options.folder / "checkpoint.pt"
    state = load(path, training)
    model = nn.parallel.DistributedDataParallel(training.model)
    while True:
        training.backward(model)
        training.optimizer.step()
        reporter.step()
        state.steps += 1
        state.samples += options.batch * dist.get_world_size()
        if state.steps % options.sync_every == 0:
            if dist.get_rank() == 0:
                save(path, training, state)
            dist.barrier()
            reporter.commit(state.samples, training.model)


def main() -> None:
    options = worker_options()
    if options.role == "coordinator":
        run_store(options)
    elif options.role == "worker":
        become_agent(options)
    else:
        train(options)


if __name__ == "__main__":
    main()
