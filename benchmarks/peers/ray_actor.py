"""Ray: the asynchronous parameter server of Ray's documentation, with a vector as the model.

https://docs.ray.io/en/latest/ray-core/examples/plot_parameter_server.html

The loop is the documented one: the driver waits for any gradient, passes its reference to
``apply_gradients`` of the parameter server, and the reference to the weights that this returns
to ``compute_gradients`` of the worker that computed the gradient. There is no training: a worker
returns the same gradient each time. NumPy arrays are read from Ray's object store
without a copy, and the parameter server adds in place.

Each worker and the parameter server run on separate Ray nodes. A node has its own object store,
so gradients and weights travel through a TCP connection between two nodes, as between machines.
With ``--shared``, all run on one node and share its memory, which a cluster can't do.
"""

from __future__ import annotations

import os
import tempfile
import time

import numpy as np
import ray
from ray.cluster_utils import Cluster

from common import Count, measure, options, show

OBJECT_STORE_BYTES = 2 << 30


@ray.remote(num_cpus=1, resources={"server": 1})
class ParameterServer:
    def __init__(self, floats: int) -> None:
        self._weights = np.zeros(floats, np.float32)
        self._applied = 0
        self._at = time.monotonic()

    def apply_gradients(self, gradient: np.ndarray) -> np.ndarray:
        self._weights += gradient
        self._applied += 1
        self._at = time.monotonic()
        return self._weights

    def get_weights(self) -> np.ndarray:
        return self._weights

    def applied(self) -> tuple[int, float]:
        """Return the number of applied gradients and the time of the last one."""
        return self._applied, self._at


@ray.remote(num_cpus=1)
class Worker:
    def __init__(self, floats: int) -> None:
        generator = np.random.default_rng(0)
        self._gradient = generator.standard_normal(floats, np.float32) * np.float32(1e-6)

    def compute_gradients(self, weights: np.ndarray) -> np.ndarray:
        assert len(weights) == len(self._gradient)
        return self._gradient


def start_cluster(workers: int, *, shared: bool) -> Cluster:
    """Start one node for the server and one per worker, or one node for all of them."""
    names = {f"worker-{number}": 1 for number in range(workers)}
    head = {
        "num_cpus": 1 + (workers if shared else 0),
        "resources": {"server": 1, **(names if shared else {})},
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    if not shared:
        for name in names:
            cluster.add_node(
                num_cpus=1, resources={name: 1}, object_store_memory=OBJECT_STORE_BYTES
            )
    return cluster


def main() -> None:
    opts = options(__doc__ or "")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray writes its logs to the temporary folder of the run.
    os.environ["RAY_TMPDIR"] = tempfile.gettempdir()
    cluster = start_cluster(opts.workers, shared=opts.shared)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        stores = {node["ObjectStoreSocketName"] for node in ray.nodes()}
        assert len(stores) == (1 if opts.shared else 1 + opts.workers)
        server = ParameterServer.remote(opts.floats)
        workers = [
            Worker.options(resources={f"worker-{number}": 1}).remote(opts.floats)
            for number in range(opts.workers)
        ]
        weights = server.get_weights.remote()
        gradients = {worker.compute_gradients.remote(weights): worker for worker in workers}

        def turn() -> None:
            nonlocal weights
            (ready, *_), _ = ray.wait(list(gradients))
            worker = gradients.pop(ready)
            weights = server.apply_gradients.remote(ready)
            gradients[worker.compute_gradients.remote(weights)] = worker

        figures = measure(turn, lambda: Count.of(*ray.get(server.applied.remote())), opts.seconds)
        show(figures, ["ray", "numpy"], nodes=len(stores), object_stores=len(stores))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
