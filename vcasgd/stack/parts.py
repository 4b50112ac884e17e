"""Parts of a stack: command, dependencies and readiness of each."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import httpx

from vcasgd.cluster.commands import Command
from vcasgd.cluster.head import head_command
from vcasgd.controller import MAX_HAND_IN_SECONDS, STACK_STOPS
from vcasgd.errors import SpecError, StoreUnavailable
from vcasgd.fleet.pools import JOINING_PROVIDERS, ORDERED_PROVIDERS
from vcasgd.fleet.providers.local.processes import MARKER
from vcasgd.fleet.providers.registry import configured_pools
from vcasgd.stack.home import StackHome
from vcasgd.stack.layout import (
    GATEWAY,
    HOST,
    PER_NODE,
    REPLICATED,
    StackLayout,
    kind_of,
    node_of,
    part_names,
    service_of,
)
from vcasgd.store.connection import RedisClient, check_server, connect
from vcasgd.store.embedded import (
    sentinel_command,
    server_command,
    watches,
    write_configuration,
    write_sentinel_configuration,
)
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.servers import Servers, node_name
from vcasgd.store.role_at_start import ReplicatedServer

#: Kinds that must be ready before each start of a part, in order of start, which is the opposite of
#: that of shutdown. A parameter server needs only the tensors server of its own store node.
NEEDS = {
    "ledger": (),
    "tensors": (),
    "sentinel": (),
    "server": ("ledger", "tensors", "sentinel"),
    "head": ("ledger", "sentinel"),
    "api": ("ledger", "tensors", "sentinel"),
    GATEWAY: ("ledger", "tensors", "sentinel", "api"),
    "controller": ("ledger", "tensors", "sentinel", "head"),
}
PARTS = tuple(NEEDS)
#: Seconds for an orderly shutdown of a part. The controller first waits for what workers hand in,
#: and writes a checkpoint of each running job. The head is killed: its state is in the ledger, and
#: its own shutdown waits for lost nodes.
USUAL_STOP_SECONDS = 8.0
STOP_SECONDS = {"controller": MAX_HAND_IN_SECONDS + 20.0, "head": 0.0}
#: Signal that stops a part, where it isn't SIGTERM.
STOP_SIGNALS = {"controller": STACK_STOPS}

#: Seconds for an answer. The supervisor does nothing else meanwhile, but a busy machine easily
#: takes more than one second.
PROBE_SECONDS = 3.0

#: Called with the Unix time at which the part's process started. Raises
#: :class:`~vcasgd.errors.VcasgdError` if the part can never become ready.
Probe = Callable[[float], bool]
#: Returns the command of a part, before each start, or None while the part must not start.
Start = Callable[[], Command | None]


@dataclass(frozen=True)
class StackPart:
    """A process of the stack."""

    name: str
    command: Start
    ready: Probe
    needs: tuple[str, ...] = ()
    stop_seconds: float = USUAL_STOP_SECONDS
    stop_signal: signal.Signals = signal.SIGTERM


def mark(home: StackHome, name: str) -> str:
    """Return the marker in the environment of all processes of a part.

    A machine's ID marks those of a machine in the same way.
    """
    return f"stack:{home.path}:{name}"


def make_parts(layout: StackLayout, kinds: Iterable[str] = PARTS) -> list[StackPart]:
    """Return the parts of these kinds in order of start, without servers of the user.

    There is no gateway without a port for it, and no head if all machines join through it.
    Raises :class:`~vcasgd.errors.StackError` if there is no server program, and
    :class:`~vcasgd.errors.SpecError` if the pools file is invalid.
    """
    selected = set(kinds)
    if GATEWAY not in layout.ports:
        selected.discard(GATEWAY)
    providers = {pool.provider for pool in configured_pools(layout.settings)}
    ordered = sorted(providers.intersection(ORDERED_PROVIDERS))
    if ordered and "controller" in selected and GATEWAY not in layout.ports:
        raise SpecError(
            f"machines of {ordered[0]} pools have no address where they can join",
            remedy="use vcasgd up --join-port",
            field="VCASGD_JOIN_PORT",
        )
    if providers.issubset(JOINING_PROVIDERS):
        selected.discard("head")
    names = [name for kind in PARTS if kind in selected for name in _names(layout, kind)]
    return [_part(layout, name, names) for name in names]


def _names(layout: StackLayout, kind: str) -> list[str]:
    if kind == "sentinel":
        return list(layout.sentinels)
    if kind in REPLICATED:
        return [name for name in layout.servers if kind_of(name) == kind]
    return part_names(kind, layout.nodes)


def _part(layout: StackLayout, name: str, present: Sequence[str]) -> StackPart:
    start, ready = _MAKERS[kind_of(name)](layout, name)
    common = {MARKER: mark(layout.home, name), "TMPDIR": str(layout.temporary)}

    def command() -> Command | None:
        started = start()
        return started and Command(started.argv, {**started.env, **common})

    return StackPart(
        name=name,
        command=command,
        ready=ready,
        needs=tuple(other for other in present if _needs(layout, name, other)),
        stop_seconds=STOP_SECONDS.get(kind_of(name), USUAL_STOP_SECONDS),
        stop_signal=STOP_SIGNALS.get(kind_of(name), signal.SIGTERM),
    )


def _needs(layout: StackLayout, name: str, other: str) -> bool:
    if kind_of(other) not in NEEDS[kind_of(name)]:
        return False
    if service_of(other) in layout.services:
        # One of the two is enough; the Sentinels are ready when they know the primary.
        return False
    same_node = {kind_of(name), kind_of(other)} == set(PER_NODE)
    return not same_node or node_of(name) == node_of(other)


def _redis(layout: StackLayout, name: str) -> tuple[Start, Probe]:
    durable = kind_of(name) == "ledger"
    memory_mb = layout.ledger_memory_mb if durable else layout.tensors_memory_mb
    files, service = layout.servers[name], layout.services.get(service_of(name))
    command = Command(tuple(server_command(files, layout.settings.redis_server)), {})
    if service is None:
        write_configuration(files, durable=durable, memory_mb=memory_mb)
        return lambda: command, redis_server(name, files.url)
    server = ReplicatedServer(
        files, layout.urls[service.name], durable=durable, memory_mb=memory_mb
    )
    server.configure(service.port)
    start = lambda: command if server.may_start() else None  # noqa: E731
    return start, replicated_server(name, files.url)


def _sentinel(layout: StackLayout, name: str) -> tuple[Start, Probe]:
    files, services = layout.sentinels[name], list(layout.services.values())
    write_sentinel_configuration(files, services)
    command = Command(tuple(sentinel_command(files, layout.settings.redis_server)), {})
    return lambda: command, lambda _at: watches(files, services)


def _server(layout: StackLayout, name: str) -> tuple[Start, Probe]:
    node = node_of(name)
    tensors = part_names("tensors", layout.nodes)[node]
    env = {**_secrets(layout, "VCASGD_JOB_SECRET"), "VCASGD_NODE": str(node)}
    if tensors in layout.servers and tensors not in layout.services:
        # Both run on this machine, so they use a Unix socket instead of TCP.
        env["VCASGD_NODE_URL"] = layout.servers[tensors].nearest_url
    servers = Servers(_connect(layout.urls["ledger"]))
    ready = _available(lambda at: servers.all().get(node_name(node), {}).get("at", 0.0) >= at)
    return _module(layout, "vcasgd.parameter_server.main", env), ready


def _head(layout: StackLayout, _name: str) -> tuple[Start, Probe]:
    start = partial(
        head_command,
        layout.settings,
        address=layout.ray_address,
        ledger_url=layout.urls["ledger"],
        temp_dir=layout.scratch / "head",
        token=layout.ray_token,
    )
    return start, listening(HOST, layout.ports["head"])


def _api(layout: StackLayout, _name: str) -> tuple[Start, Probe]:
    env = {
        **_secrets(layout, "VCASGD_SECRETS_KEY"),
        **layout.join_env,
        "VCASGD_TOKEN": layout.token,
    }
    return _module(layout, "vcasgd.api", env), answering(f"{layout.api_url}/readyz")


def _controller(layout: StackLayout, _name: str) -> tuple[Start, Probe]:
    env = _secrets(
        layout,
        "VCASGD_JOB_SECRET",
        "VCASGD_SECRETS_KEY",
        "VCASGD_WEBHOOK_URL",
        "VCASGD_WEBHOOK_SECRET",
        "VCASGD_RAY_TOKEN",
    )
    if "VCASGD_JOIN_URL" in (join := layout.join_env):
        env["VCASGD_JOIN_URL"] = join["VCASGD_JOIN_URL"]
    control = Control(_connect(layout.urls["ledger"]))
    # It has its lease, and has published its pools.
    ready = _available(lambda at: control.last_round_at() >= at)
    return _module(layout, "vcasgd.controller.main", env), ready


def _gateway(layout: StackLayout, name: str) -> tuple[Start, Probe]:
    # It may listen on one address only.
    host = layout.settings.join_host
    ready = listening(HOST if host in ("", "0.0.0.0", "::") else host, layout.ports[name])
    return _module(layout, "vcasgd.gateway.main", layout.join_env), ready


_MAKERS: dict[str, Callable[[StackLayout, str], tuple[Start, Probe]]] = {
    "ledger": _redis,
    "tensors": _redis,
    "sentinel": _sentinel,
    "server": _server,
    "head": _head,
    "api": _api,
    GATEWAY: _gateway,
    "controller": _controller,
}


def _secrets(layout: StackLayout, *names: str) -> dict[str, str]:
    """Return those of these secrets that the stack has."""
    url, secret = layout.settings.webhook_url, layout.settings.webhook_secret
    values = {
        "VCASGD_JOB_SECRET": layout.job_secret,
        "VCASGD_SECRETS_KEY": layout.secrets_key,
        "VCASGD_RAY_TOKEN": layout.ray_token,
        "VCASGD_WEBHOOK_URL": url.get_secret_value() if url else None,
        "VCASGD_WEBHOOK_SECRET": secret.get_secret_value() if secret else None,
    }
    return {name: value for name in names if (value := values[name]) is not None}


def _module(layout: StackLayout, name: str, env: Mapping[str, str]) -> Start:
    """Return the command of a process of vcasgd, with ``env`` besides what all of them get."""
    common = {
        "VCASGD_HOME": str(layout.home.path),
        "VCASGD_LEDGER_URL": layout.urls["ledger"],
        "VCASGD_TENSORS_URL": layout.tensors_url,
        "VCASGD_STORAGE_URL": layout.storage_url,
        "VCASGD_RAY_ADDRESS": layout.ray_address,
        "VCASGD_RAY_DIR": str(layout.scratch),
        "VCASGD_API_URL": layout.api_url,
        "VCASGD_API_PORT": str(layout.ports["api"]),
    }
    command = Command((sys.executable, "-m", name), {**common, **env})
    return lambda: command


# -- readiness: each probe returns within seconds --------------------------------------------------


def _available(check: Probe) -> Probe:
    """Return a probe that also fails while a Redis server is unavailable."""

    def probe(started_at: float) -> bool:
        try:
            return check(started_at)
        except StoreUnavailable:
            return False

    return probe


def redis_server(name: str, url: str) -> Probe:
    """Return a probe for a supported Redis server that answers.

    The probe raises :class:`~vcasgd.errors.StoreUnsupported` for other servers.
    """
    client = _connect(url)

    def answers(_started_at: float) -> bool:
        check_server(client, name)
        return True

    return _available(answers)


def replicated_server(name: str, url: str) -> Probe:
    """Return a probe for a primary, or for a replica that has caught up with its primary."""
    client, answers = _connect(url), redis_server(name, url)

    def serves(started_at: float) -> bool:
        if not answers(started_at):
            return False
        info = client.info("replication")
        return "master" in info["role"] or "up" in info.get("master_link_status", "")

    return _available(serves)


def listening(host: str, port: int) -> Probe:
    """Return a probe for a port that accepts connections."""

    def probe(_started_at: float) -> bool:
        try:
            socket.create_connection((host, port), PROBE_SECONDS).close()
        except OSError:
            return False
        return True

    return probe


def answering(url: str) -> Probe:
    """Return a probe for a URL that answers with status 200."""

    def probe(_started_at: float) -> bool:
        try:
            # trust_env=False: a proxy can't reach this machine's loopback interface.
            return httpx.get(url, timeout=PROBE_SECONDS, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    return probe


def _connect(url: str) -> RedisClient:
    return connect(url, answer_seconds=PROBE_SECONDS)
