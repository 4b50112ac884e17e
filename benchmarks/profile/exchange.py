"""Measure the processor time of small exchanges: a push and a fetch for each local step.

    python benchmarks/profile/exchange.py [--seconds 30] [--image-ms 10] [--push-every 1] [--hold]

Starts a stack with three workers that train the digits and push each local step, and prints the
processor time of each kind of process for each round. Steps are paced, so processors are no
limit. ``--hold`` prints the processes to profile and waits for Enter before it ends.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from vcasgd.client import Client
from vcasgd.fleet.pools import LocalPoolSpec
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running
from vcasgd.store.connection import RedisClient, connect

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits"
WORKERS = 3
#: Updates after which all workers train and their rounds have their final length.
WARM_UPDATES = 100


@dataclass(frozen=True)
class Options:
    seconds: float
    image_ms: float
    push_every: int
    hold: bool


def job(options: Options) -> JobSpec:
    return JobSpec.parse(
        {
            "name": "exchange",
            "task": "paced:PacedDigits",
            "working_dir": str(EXAMPLE),
            "args": {"image_seconds": options.image_ms / 1000},
            "epochs": 100_000,
            "workers": {"min": WORKERS, "max": WORKERS},
            "push_every": options.push_every,
        }
    )


def measure(options: Options) -> dict[str, float]:
    """Return processor milliseconds for each round by kind of process; a worker's is the mean."""
    with tempfile.TemporaryDirectory(prefix="vcasgd-exchange-") as folder:
        settings = Settings(home=Path(folder), api_port=0, local_capacity=WORKERS)
        with running(settings) as state:
            home = StackHome(settings.home_path)
            with Client(state.api_url, home.token() or "") as client:
                name = client.submit_directory(job(options)).id
                await_updates(client, name)
                provider = LocalProvider(
                    home.path,
                    settings.cluster,
                    LocalPoolSpec(
                        name="local", provider="local", max_machines=settings.local_capacity
                    ),
                )
                kinds = processes(state, provider)
                if options.hold:
                    for pid, kind in kinds.items():
                        print(kind, pid, flush=True)
                    input()
                servers = {name: server(home, state, name) for name in ("ledger", "tensors")}
                for each in servers.values():
                    each.config_resetstat()
                updates, before = client.job(name).totals.updates, seconds(kinds)
                time.sleep(options.seconds)
                updates, after = client.job(name).totals.updates - updates, seconds(kinds)
                calls = {name: each.info("commandstats") for name, each in servers.items()}
                client.job(name).cancel()
    rounds = updates / WORKERS
    used = {kind: 1000 * (after[kind] - before[kind]) / rounds for kind in after}
    used["worker"] /= WORKERS
    print(f"{rounds / options.seconds:.2f} rounds per second")
    for name, commands in calls.items():
        counts = {each.partition("_")[2]: one["calls"] / rounds for each, one in commands.items()}
        listed = sorted(counts.items(), key=lambda each: -each[1])
        text = ", ".join(f"{count:.1f} {each}" for each, count in listed if count >= 0.05)
        print(f"{name}: {sum(counts.values()):.1f} commands per round: {text}")
    return used


def server(home: StackHome, state: StackState, name: str) -> RedisClient:
    return connect(f"redis://:{home.ensure_password(name)}@127.0.0.1:{state.ports[name]}/0")


def await_updates(client: Client, name: str) -> None:
    deadline = time.monotonic() + 120
    while (view := client.job(name)).totals.updates < WARM_UPDATES:
        if time.monotonic() > deadline or view.over:
            raise SystemExit(f"the job {view.state} with {view.totals.updates} updates")
        time.sleep(0.5)


def processes(state: StackState, provider: LocalProvider) -> dict[int, str]:
    """Return the kind of each process that takes part in an exchange, by process ID."""
    kinds = {part.pid: name for name, part in state.parts.items()}
    for machine in provider.machines():
        trains = max(provider.processes(machine.id), key=lambda each: processor_seconds(each.pid))
        kinds[trains.pid] = "worker"
    return kinds


def processor_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def seconds(kinds: dict[int, str]) -> dict[str, float]:
    used: defaultdict[str, float] = defaultdict(float)
    for pid, kind in kinds.items():
        used[kind] += processor_seconds(pid)
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--image-ms", type=float, default=10.0)
    parser.add_argument("--push-every", type=int, default=1)
    parser.add_argument("--hold", action="store_true")
    for kind, value in measure(Options(**vars(parser.parse_args()))).items():
        print(f"{kind:12} {value:6.2f} ms per round")


if __name__ == "__main__":
    main()
