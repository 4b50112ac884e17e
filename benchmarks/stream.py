"""Measure the stream of changes with many readers: requests to the ledger, delays, the API's work.

    python benchmarks/stream.py [--readers 1 10 100 500] [--machines 1000] [--changes 30]

Starts a ledger and an API with a running job. For each number of readers, all of them receive the
state and then one event a second, at first alone and then beside other requests to the API. Writes
``benchmarks/results/stream.md``. Stop other programs before you run it.
"""

from __future__ import annotations

import argparse
import selectors
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

import machine
from markdown import table
from vcasgd.limits import MAX_REQUESTS_PER_TOKEN
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, running
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs

OUT = Path(__file__).resolve().parent / "results" / "stream.md"
#: Seconds for the state to reach all readers, and for one event.
PATIENCE_SECONDS = 300.0
CHANGE_SECONDS = 1.0
REQUEST_SECONDS = 0.1
ROUTES = ("status", "jobs", "overview", "pools")
KIND = "bench-change"
#: Longest text that can be cut by the end of what was received at a time.
TAIL_BYTES = 200
#: A part of the state that each reader receives at first.
STATE = b"event: fleet"

PAGE = """\
# Many readers of the stream of changes

    {command}

{options.machines:,} machines, one running job, and one event a second for {options.changes} s,
without other changes; and then the same beside up to {per_second:g} other requests a second to
{routes}. The readers and the other requests are one process on the
same machine.

{machine}

{table}

"Requests of the ledger" are all that it received during the changes, divided by their number: two
are the write of the event, and the API observes the platform twice a second, also without changes.
The delay is from before the write until the last reader has the event; up to half a second of it is
the wait for the next observation.
"""


@dataclass(frozen=True)
class Options:
    readers: Sequence[int]
    machines: int
    changes: int
    out: Path


@dataclass
class Readers:
    """Readers of the stream, on plain sockets in one thread."""

    url: str
    #: Their tokens, each of which has enough places for all readers that open at the same time.
    tokens: list[str]
    count: int
    #: Bytes received by all.
    received: int = 0
    #: Number of readers that have each event, by its text.
    seen: dict[bytes, int] = field(default_factory=lambda: {STATE: 0})
    ended: bool = False

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._tails: dict[socket.socket, bytes] = {}
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Readers:
        where = urlsplit(self.url)
        for number in range(self.count):
            connection = socket.create_connection((where.hostname, where.port), PATIENCE_SECONDS)
            token = self.tokens[number // MAX_REQUESTS_PER_TOKEN]
            connection.sendall(
                (
                    "GET /api/v1/stream HTTP/1.1\r\n"
                    f"Host: {where.netloc}\r\nAuthorization: Bearer {token}\r\n"
                    "Accept: text/event-stream\r\n\r\n"
                ).encode()
            )
            connection.setblocking(False)
            self._tails[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(PATIENCE_SECONDS)
        for connection in self._tails:
            connection.close()
        self._selector.close()

    def expect(self, text: bytes) -> None:
        """Count the readers that receive an event with this text."""
        self.seen[text] = 0

    def wait(self, text: bytes) -> None:
        """Wait until all readers have an event. Raises :class:`TimeoutError`."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self.seen[text] >= self.count or self.ended, PATIENCE_SECONDS
            )
            if not done or self.ended:
                raise TimeoutError(f"{self.seen[text]} of {self.count} readers have {text!r}")

    def _read(self) -> None:
        while not self._stopped.is_set():
            for key, _ in self._selector.select(0.2):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                data = connection.recv(1 << 18)
                if not data:
                    # The API closed the stream.
                    with self._changed:
                        self.ended = True
                        self._changed.notify_all()
                    return
                self._take(connection, data)

    def _take(self, connection: socket.socket, data: bytes) -> None:
        tail = self._tails[connection]
        text = tail + data
        with self._changed:
            self.received += len(data)
            for wanted in list(self.seen)[-2:]:
                # An occurrence that was complete before has been counted.
                self.seen[wanted] += wanted in text and wanted not in tail
            self._changed.notify_all()
        self._tails[connection] = text[-TAIL_BYTES:]


class Requests(threading.Thread):
    """Other requests to the API, one after the other."""

    def __init__(self, http: httpx.Client) -> None:
        super().__init__(daemon=True)
        self._http = http
        self._stopped = threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        while not self._stopped.wait(REQUEST_SECONDS):
            began = time.perf_counter()
            route = ROUTES[len(self.seconds) % len(ROUTES)]
            self._http.get(route).raise_for_status()
            self.seconds.append(time.perf_counter() - began)

    def stop(self) -> None:
        """End the requests. Raises :class:`RuntimeError` if one failed."""
        if not self.is_alive():
            raise RuntimeError("a request to the API failed")
        self._stopped.set()
        self.join(PATIENCE_SECONDS)


class Bench:
    """A ledger and an API with a job, and measurements of them."""

    def __init__(self, options: Options, resources: ExitStack) -> None:
        folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="vcasgd-stream-"))
        settings = Settings(home=Path(folder), api_port=0)
        state = resources.enter_context(running(settings, names=("ledger", "api")))
        home = StackHome(settings.home_path)
        self.url, self.token = state.api_url or "", home.token() or ""
        self._options = options
        self._api = psutil.Process(state.parts["api"].pid)
        password = home.ensure_password("ledger")
        self._ledger = connect(f"redis://:{password}@127.0.0.1:{state.ports['ledger']}/0")
        self._jobs = Jobs(self._ledger)
        spec = {"name": "stream", "task": "t:T", "epochs": 1, "subtasks_per_epoch": 10}
        self._job = self._jobs.submit(JobSpec.parse(spec), "0" * 64).id
        self._http = resources.enter_context(
            httpx.Client(
                base_url=f"{self.url}/api/v1/",
                headers={"Authorization": f"Bearer {self.token}"},
                timeout=PATIENCE_SECONDS,
            )
        )
        Control(self._ledger).publish(_machines(options.machines), {})

    def measure(self, count: int) -> tuple[str, ...]:
        """Return a row of figures for a number of readers."""
        tokens = [
            self._http.post("tokens", json={"name": f"r-{count}-{first}", "scope": "read"}).json()[
                "token"
            ]
            for first in range(0, count, MAX_REQUESTS_PER_TOKEN)
        ]
        began = time.perf_counter()
        with Readers(self.url, tokens, count) as readers:
            readers.wait(STATE)
            opened = time.perf_counter() - began
            opening, requests = readers.received, Requests(self._http)
            before, busy = _requests(self._ledger), sum(self._api.cpu_times()[:2])
            began = time.perf_counter()
            delays = self._changes(readers, f"change-{count}")
            seconds = time.perf_counter() - began
            reads = _requests(self._ledger) - before
            busy = sum(self._api.cpu_times()[:2]) - busy
            requests.start()
            self._changes(readers, f"beside-requests-{count}")
            requests.stop()
        return (
            f"{count:,}",
            f"{opened:.1f} s, {opening / count / 1000:.0f} kB",
            f"{reads / self._options.changes:.1f}",
            _milliseconds(statistics.median(delays), max(delays)),
            _milliseconds(statistics.median(requests.seconds), _p99(requests.seconds)),
            f"{busy / seconds:.2f}",
            f"{self._api.memory_info().rss / 1e6:.0f} MB",
        )

    def _changes(self, readers: Readers, name: str) -> list[float]:
        """Write an event a second, and return the delay of each."""
        began, delays = time.perf_counter(), []
        for number in range(self._options.changes):
            delays.append(self._change(readers, f"{name}-{number}"))
            time.sleep(max(0.0, began + (number + 1) * CHANGE_SECONDS - time.perf_counter()))
        return delays

    def _change(self, readers: Readers, name: str) -> float:
        """Write an event, and return the seconds until all readers have it."""
        text = f'"{name}"'.encode()
        readers.expect(text)
        began = time.perf_counter()
        self._jobs.event(self._job, KIND, name)
        readers.wait(text)
        return time.perf_counter() - began


def _machines(count: int) -> dict[str, dict[str, object]]:
    row = {"pool": "aws", "state": "running", "joined": True, "price_per_hour": 0.1, "spot": True}
    return {f"i-{number:08d}": {**row, "launched_at": time.time()} for number in range(count)}


def _requests(ledger: RedisClient) -> int:
    return int(ledger.info("stats")["total_reads_processed"])


def _milliseconds(*seconds: float) -> str:
    return " / ".join(f"{1000 * each:.0f}" for each in seconds) + " ms"


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def measure(options: Options) -> str:
    heads = (
        "readers", "all have the state after, size", "requests of the ledger for a change",
        "delay, median / longest", "other requests, median / p99", "API, cores", "API, memory",
    )  # fmt: skip
    with ExitStack() as resources:
        bench = Bench(options, resources)
        rows = []
        for count in options.readers:
            rows.append(bench.measure(count))
            print(*rows[-1], sep=" | ", flush=True)
    command = (
        f"python benchmarks/stream.py --readers {' '.join(map(str, options.readers))} "
        f"--machines {options.machines} --changes {options.changes}"
    )
    return PAGE.format(
        command=command,
        options=options,
        per_second=1 / REQUEST_SECONDS,
        routes=", ".join(f"`{route}`" for route in ROUTES),
        machine=table(("", ""), machine.describe().items()),
        table=table(heads, rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 10, 100, 500])
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--changes", type=int, default=30)
    parser.add_argument("--out", type=Path, default=OUT)
    options = Options(**vars(parser.parse_args()))
    text = measure(options)
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
