"""Parts of torchft that its three ways to train share."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from common import Training, WorkerOptions


def run_lighthouse(options: WorkerOptions) -> NoReturn:
    """Run the lighthouse until this process is killed."""
    lighthouse = LighthouseServer(
        bind=options.coordinator,
        min_replicas=1,
        join_timeout_ms=150,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=500,
    )
    print(lighthouse.address(), flush=True)
    while True:
        signal.pause()


def make_manager(
    options: WorkerOptions,
    training: Training,
    timeout: float,
    state: Callable[[], Any] | None = None,
    load: Callable[[Any], None] | None = None,
) -> Manager:
    """Return the manager of a replica group of one process; ``timeout`` is that of an exchange."""
    store = dist.TCPStore(options.address, 0, is_master=True, wait_for_workers=False)

    def state_dict() -> dict[str, Any]:
        return {
            "model": training.model.state_dict(),
            "optimizer": training.optimizer.state_dict(),
        }

    def load_state_dict(value: dict[str, Any]) -> None:
        training.model.load_state_dict(value["model"])
        training.optimizer.load_state_dict(value["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=timeout)),
        load_state_dict=load or load_state_dict,
        state_dict=state or state_dict,
        min_replica_size=1,
        # The default gives up a quorum when the lighthouse is away, and waits for a minute.
        quorum_retries=100,
        use_async_quorum=False,
        timeout=timedelta(seconds=timeout),
        rank=0,
        world_size=1,
        store_addr=options.address,
        store_port=store.port,
        lighthouse_addr=f"http://{options.coordinator}",
        replica_id=options.machine,
        hostname=options.address,
        heartbeat_interval=timedelta(milliseconds=50),
    )
    # The manager uses the store for as long as it lives.
    manager.race_store = store
    return manager
