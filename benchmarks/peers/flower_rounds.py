"""Flower: rounds of federated averaging over gRPC, with clients that don't train.

https://flower.ai/docs/framework/

A server with the strategy ``FedAvg`` and ``NumPyClient`` processes, started with ``start_server``
and ``start_numpy_client``. These functions run without the deployment engine, which adds a
database and more processes to each message. A round sends the parameters to all clients, each
returns as many, and the server averages them. A round of two clients counts as two updates.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Any

import numpy as np
from flwr.client import NumPyClient
from flwr.common import ndarrays_to_parameters
from flwr.compat.client.app import start_numpy_client
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg

from common import WARM_UP_ROUNDS, WARM_UP_SECONDS, Count, options, others, rate, show

#: Larger than any measured model; the default is 512 MiB.
MESSAGE_BYTES = (1 << 31) - 1


class Idle(NumPyClient):
    """Client that returns the same parameters each time."""

    def __init__(self, floats: int) -> None:
        self._vector = np.random.default_rng(0).standard_normal(floats, np.float32)

    def fit(self, parameters: list[np.ndarray], _config: dict[str, Any]) -> Any:
        assert len(parameters[0]) == len(self._vector)
        return [self._vector], 1, {}


class Finished(Exception):
    """Raised when the measurement is complete."""


class Counted(FedAvg):
    """Federated averaging that counts rounds and stops after ``seconds``."""

    def __init__(self, floats: int, clients: int, seconds: float) -> None:
        super().__init__(
            fraction_evaluate=0.0,
            min_fit_clients=clients,
            min_available_clients=clients,
            initial_parameters=ndarrays_to_parameters([np.zeros(floats, np.float32)]),
        )
        self._clients, self._seconds = clients, seconds
        self._started, self._rounds = time.monotonic(), 0
        self.first: Count | None = None
        self.last: Count | None = None

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        assert not failures, failures
        averaged = super().aggregate_fit(server_round, results, failures)
        now = Count.of(server_round * self._clients)
        if server_round == 1:
            self._started = now.at
        if self.first is None:
            if server_round > WARM_UP_ROUNDS and now.at > self._started + WARM_UP_SECONDS:
                self.first = now
        elif now.at > self.first.at + self._seconds:
            self.last = now
            raise Finished
        return averaged


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    opts = options(__doc__ or "")
    if opts.join:
        start_numpy_client(
            server_address=opts.join,
            client=Idle(opts.floats),
            grpc_max_message_length=MESSAGE_BYTES,
        )
        return
    address = f"127.0.0.1:{free_port()}"
    strategy = Counted(opts.floats, opts.workers, opts.seconds)
    with others(opts, __file__, address, opts.workers), suppress(Finished):
        start_server(
            server_address=address,
            config=ServerConfig(num_rounds=1_000_000),
            strategy=strategy,
            grpc_max_message_length=MESSAGE_BYTES,
        )
    assert strategy.first is not None
    assert strategy.last is not None
    figures = rate(strategy.first, strategy.last)
    rounds = figures["updates_per_s"] / opts.workers
    show(figures, ["flwr", "numpy"], rounds_per_s=rounds, updates_per_round=opts.workers)
    # The server's threads would wait for the clients.
    os._exit(0)


if __name__ == "__main__":
    main()
