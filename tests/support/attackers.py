"""Attackers of a stack, one for each kind of credential, as one process of their own.

    python -m support.attackers FILE

The file is JSON: ``api`` and ``gateway`` (addresses), ``tokens`` by scope, ``worker`` (the
environment of a worker) and ``job`` (its job). The process attacks until it is terminated, and
writes what it did to the file with the suffix ``.did``. Its connections come from
:data:`SOURCE`, which is on this machine like all others.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import resource
import signal
import socket
import ssl
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from support.fuzzer import Fuzzer
from support.hostile import Hostile
from vcasgd.gateway.relay import PROTOCOL, first_line
from vcasgd.store.connection import connect
from vcasgd.store.ledger.jobs import Jobs

#: Address of the attackers, so that limits for each address leave that of the honest alone.
SOURCE = "127.0.0.66"
#: Connections that a visitor holds open at each port, of each kind.
HELD = 300
#: Event streams that a reader opens, more than a token may have.
STREAMS = 150
#: Seconds between two attacks of one attacker: a flood of requests is a matter for the network.
PAUSE_SECONDS = 0.2
#: Seconds that an attacker waits for an answer.
ANSWER_SECONDS = 15.0

#: Lists of aliases that grow tenfold at each level, and merge keys that double.
ALIASES = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(10 * [f'*{chr(ord(name) - 1)}'])}]\n" for name in "bcdefg"
)
MERGES = "m0: &m0 {a: 1}\nm1: &m1 {b: 1}\n" + "".join(
    f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 2}, *m{n - 1}]}}\n" for n in range(2, 26)
)
JOB = "name: x\ntask: train:X\nworkers: {pools: [volunteers]}\n"
BOMBS = [
    ALIASES,
    MERGES,
    f"{JOB}epochs: 0x{'f' * 6000}\n",
    f"{JOB}epochs: {'9' * 6000}\n",
    f"{JOB}args: {{a: {'[' * 500}{']' * 500}}}\n",
    f"{JOB}args: {{a: {'x' * 2_000_000}}}\n",
    "[" * 100_000,
]


class Attack:
    """Requests of one attacker, and how often each kind was made, accepted, and refused."""

    def __init__(self, plan: dict[str, Any], token: str = "") -> None:
        self.plan = plan
        self.did: Counter[str] = Counter()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(
            base_url=plan["api"],
            headers=headers,
            timeout=ANSWER_SECONDS,
            transport=httpx.HTTPTransport(
                local_address=SOURCE, limits=httpx.Limits(max_connections=None)
            ),
        )

    def request(self, method: str, path: str, **body: Any) -> httpx.Response | None:
        self.did["requests"] += 1
        with suppress(httpx.HTTPError):
            response = self.http.request(method, f"/api/v1/{path}", **body)
            self.did[str(response.status_code)] += 1
            return response
        self.did["unanswered"] += 1
        return None

    def connect(self, port: str, protocol: str | None = None) -> socket.socket:
        """Connect to a port of the plan; with ``protocol``, by TLS that offers it."""
        host, _, number = self.plan[port].rpartition("/")[2].partition(":")
        plain = socket.create_connection((host, int(number)), ANSWER_SECONDS, (SOURCE, 0))
        self.did["connections"] += 1
        if protocol is None:
            return plain
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if protocol:
            context.set_alpn_protocols([protocol])
        try:
            return context.wrap_socket(plain)
        except OSError:
            plain.close()
            raise


class Held:
    """Connections that an attacker keeps open. Those that the other side closed are replaced."""

    def __init__(self, did: Counter[str], most: int, connect: Callable[[], socket.socket]) -> None:
        self._did, self._most, self._connect = did, most, connect
        self._open: list[socket.socket] = []

    def refill(self) -> None:
        for held in list(self._open):
            held.setblocking(False)
            with suppress(BlockingIOError, ssl.SSLWantReadError):
                with suppress(OSError):
                    if held.recv(1 << 10):
                        continue
                held.close()
                self._open.remove(held)
                self._did["closed"] += 1
        for _ in range(min(50, self._most - len(self._open))):
            try:
                self._open.append(self._connect())
            except OSError:
                self._did["refused"] += 1
                return


def visitor(plan: dict[str, Any]) -> Iterator[Counter[str]]:
    """Hold silent, half-open, and slow connections, and send bombs without a token."""
    attack = Attack(plan)

    def begun(port: str, protocol: str | None, data: bytes) -> Callable[[], socket.socket]:
        def connect() -> socket.socket:
            connection = attack.connect(port, protocol)
            connection.sendall(data)
            return connection

        return connect

    request = b"GET /api/v1/jobs HTTP/1.1\r\nHost: x\r\n"
    # Their answers are read by nobody.
    unread = b"GET /api/v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60
    kinds = [
        begun("api", None, b""), begun("api", None, request), begun("api", None, unread),
        begun("gateway", None, b""), begun("gateway", "", b""), begun("gateway", PROTOCOL, b""),
        begun("gateway", PROTOCOL, b"x" * 100), begun("gateway", "http/1.1", request),
        begun("gateway", "http/1.1", unread),
    ]  # fmt: skip
    held = [Held(attack.did, HELD, kind) for kind in kinds]
    while True:
        for each in held:
            each.refill()
        for bomb in BOMBS:
            attack.request("POST", "jobs/validate", json={"yaml": bomb})
        attack.request("GET", "jobs", headers={"X-Long": "x" * 100_000})
        yield attack.did


def reader(plan: dict[str, Any]) -> Iterator[Counter[str]]:
    """Open streams that are never read, send bombs, and read pages by the dozen."""
    token = plan["tokens"]["read"]
    attack = Attack(plan, token)

    def stream() -> socket.socket:
        connection = attack.connect("api")
        head = "GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        connection.sendall(f"{head}{token}\r\n\r\n".encode())
        return connection

    held = Held(attack.did, STREAMS, stream)
    while True:
        held.refill()
        for bomb in BOMBS:
            attack.request("POST", "jobs/validate", json={"yaml": bomb})
        for path in ("jobs?limit=100000", "machines", "workers", "openapi.json", "jobs/none"):
            attack.request("GET", path)
        yield attack.did


def submitter(plan: dict[str, Any]) -> Iterator[Counter[str]]:
    """Submit what breaks listings, packages of many entries, and jobs that come and go."""
    attack = Attack(plan, plan["tokens"]["submit"])
    entries = io.BytesIO()
    with zipfile.ZipFile(entries, "w") as archive:
        for number in range(20_000):
            archive.writestr(str(number), b"")
    digest = hashlib.sha256(entries.getvalue()).hexdigest()
    nested: Any = "x"
    for _ in range(230):
        nested = [nested]
    while True:
        attack.request("PUT", f"packages/{digest}", content=entries.getvalue())
        for value in (nested, "x" * 500_000, "\x1b[2J[/b]\u202e", 10**400):
            spec = {"name": "x" * 64, "task": "a:B", "args": {"a": value}, "epochs": 10**9}
            attack.request("POST", "jobs", json={"spec": spec, "package": digest})
            attack.request("POST", "jobs/validate", json={"yaml": json.dumps(spec)})
        yield attack.did


def joiner(plan: dict[str, Any]) -> Iterator[Counter[str]]:
    """Join as many machines, report nonsense, and hold connections to servers unread."""
    token = plan["tokens"]["join"]
    attack = Attack(plan, token)

    def guest(service: str, then: bytes) -> Callable[[], socket.socket]:
        def connect() -> socket.socket:
            connection = attack.connect("gateway", PROTOCOL)
            connection.sendall(first_line(service, token) + then)
            return connection

        return connect

    held = [
        Held(attack.did, 60, guest("ledger", b"")),
        Held(attack.did, 60, guest("ledger", b"*1\r\n$4\r\nPING\r\n" * 10_000)),
        Held(attack.did, 60, guest("ledger", b"*1\r\n$1000000000\r\n")),
        Held(attack.did, 10, guest("link", b"\xff" * 8)),
        Held(attack.did, 10, guest("nothing", b"")),
    ]
    text = "[/b]\x1b]52;c;eA==\x07"
    machine = {"version": "0", "host": text, "cpus": 1, "memory_mb": 1, "gpu": text}
    while True:
        for each in held:
            each.refill()
        for body in (machine, {**machine, "version": plan["version"]}, {**machine, "cpus": 1e308}):
            attack.request("POST", "join", json=body)
        workers = {f"w{number}": {"start": text, "ended": text} for number in range(64)}
        for name in ("join-x-1", plan["machine"], "../jobs"):
            attack.request("POST", f"machines/{name}/report", json={"workers": workers})
            attack.request("GET", f"machines/{name}/packages/{'0' * 64}")
        yield attack.did


def worker(plan: dict[str, Any]) -> Iterator[Counter[str]]:
    """Call every command and script that the credentials of a worker allow."""
    ledger = connect(plan["worker"]["VCASGD_LEDGER_URL"])
    hostile = Hostile(Jobs(ledger), plan["job"], plan["worker"])
    fuzzer, did = Fuzzer(hostile, random.Random(7)), Counter[str]()
    while True:
        for _ in range(20):
            did["requests"] += 1
            if not fuzzer.call():
                did["expelled"] += 1
        did["accepted"] = fuzzer.accepted
        yield did


ATTACKERS = {each.__name__: each for each in (visitor, reader, submitter, joiner, worker)}


def main(file: Path) -> int:
    plan = json.loads(file.read_text())
    # The attackers stand for other machines, whose processors the stack doesn't share.
    os.nice(15)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    did: dict[str, Counter[str]] = {}

    def run(name: str) -> None:
        for counts in ATTACKERS[name](plan):
            did[name] = counts
            if stopped.wait(PAUSE_SECONDS):
                return

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in ATTACKERS]
    for thread in threads:
        thread.start()
    stopped.wait()
    # An attacker that failed is missing.
    alive = [name for name, thread in zip(ATTACKERS, threads, strict=True) if thread.is_alive()]
    file.with_suffix(".did").write_text(json.dumps({name: did.get(name, {}) for name in alive}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
