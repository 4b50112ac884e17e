"""Ray Train: elastic data parallelism that restarts from a checkpoint when a machine is lost.

https://docs.ray.io/en/latest/train/train.html

Each machine is a Ray node for one worker. The coordinator is Ray's head with the driver, which
resumes the run of the same name when it restarts.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import Reporter, Training, WorkerOptions, worker_options

#: Ray's own defaults notice the loss of a node after about 14 s.
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "PYTHONUNBUFFERED": "1",
}
#: Any ports, because all nodes are on one computer.
PORTS = ("--min-worker-port", "0", "--max-worker-port", "0", "--object-store-memory", "100000000")
RESIZE_SECONDS = 2.0
#: Longest time that the first driver waits for all nodes, so that training begins on all of them.
NODES_SECONDS = 120.0
#: Line of ``ray start`` when the node runs.
STARTED = "Ray runtime started"


def ray_command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).parent / "ray"), "start", *arguments, *PORTS]


def run_head(options: WorkerOptions) -> None:
    """Start the head, and train until this process is killed."""
    subprocess.run(
        ray_command(
            *("--head", "--node-ip-address", options.host, "--port", str(options.port)),
            *("--num-cpus", "0", "--include-dashboard", "false"),
            *("--temp-dir", str(options.folder / "ray")),
        ),
        check=True,
    )
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address=options.coordinator)
    storage, deadline = options.folder / "storage", time.monotonic() + NODES_SECONDS
    while not storage.exists() and time.monotonic() < deadline:
        if ray.cluster_resources().get("CPU", 0) >= options.workers:
            break
        time.sleep(0.1)
    TorchTrainer(
        train,
        train_loop_config={"arguments": sys.argv[1:]},
        scaling_config=ScalingConfig(
            num_workers=(1, options.workers),
            elastic_resize_monitor_interval_s=RESIZE_SECONDS,
        ),
        run_config=RunConfig(
            name="race",
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=-1, controller_failure_limit=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def run_node(options: WorkerOptions) -> int:
    """Run a node once the head answers, and return its exit status."""
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((options.host, options.port)) == 0:
                break
        time.sleep(0.1)
    command = ray_command(
        *("--address", options.coordinator, "--node-ip-address", options.address),
        *("--num-cpus", "1", "--block"),
    )
    # Nodes of one computer that start together choose the same names of sockets, and fail.
    with (options.folder / "ray-start").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if STARTED in line:
                break
    for line in process.stdout:
        print(line, end="", flush=True)
    return process.wait()


def train(config: dict[str, Any]) -> None:
    """Train in a worker process of a node, which has the machine's environment."""
    import tempfile

    import ray.train
    from torch import nn

    from checkpoints import Done, load, save

    options = worker_options(config["arguments"])
    machine = os.environ["RACE_MACHINE"]
    training, reporter = Training(options, machine), Reporter(options, machine)
    done, context = Done(), ray.train.get_context()
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            done = load(Path(folder) / "checkpoint.pt", training)
    model = nn.parallel.DistributedDataParallel(training.model)
    while True:
        training.backward(model)
        training.optimizer.step()
        reporter.step()
        done.steps += 1
        done.samples += options.batch * context.get_world_size()
        if done.steps % options.sync_every:
            continue
        with tempfile.TemporaryDirectory() as folder:
            mine = None
            if context.get_world_rank() == 0:
                save(Path(folder) / "checkpoint.pt", training, done)
                mine = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"samples": done.samples}, checkpoint=mine)
        reporter.commit(done.samples, training.model)


def main() -> None:
    options = worker_options()
    os.environ.update(ENVIRONMENT, PYTHONPATH=str(Path(__file__).resolve().parent))
    if options.role == "coordinator":
        run_head(options)
    else:
        sys.exit(run_node(options))


if __name__ == "__main__":
    main()
