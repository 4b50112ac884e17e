"""Parts of a stack: command, dependencies and readiness of each."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import httpx

from vcasgd.cluster import Command
from vcasgd.cluster.head import head_command
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
from vcasgd.stack.replica_restart import ReplicatedServer
from vcasgd.store.connection import RedisClient, check_server, connect
from vcasgd.store.embedded.server import (
    sentinel_command,
    server_command,
    watches,
    write_configuration,
    write_sentinel_configuration,
)
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.servers import Servers, node_name

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
#: Seconds for an orderly shutdown of a part.
STOP_SECONDS = 8.0
#: Seconds for the controller, which writes a checkpoint of each running job first.
CONTROLLER_STOP_SECONDS = 20.0


#: Seconds for an answer. The supervisor does nothing else meanwhile, but a busy machine easily
#: takes more than one second.
PROBE_SECONDS = 3.0

#: Called with the Unix time at which the part's process started. Raises
#: :class:`~vcasgd.errors.VcasgdError` if the part can never become ready.
Probe = Callable[[float], bool]


@dataclass(frozen=True)
class StackPart:
    """A process of the stack.

    ``command`` is called before each start, and returns None while the part must not start.
    """

    name: str
    command: Callable[[], Command | None]
    ready: Probe
    needs: tuple[str, ...] = ()
    stop_seconds: float = STOP_SECONDS


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
    make: Callable[[StackLayout, str], StackPart] = {
        "ledger": _ledger,
        "tensors": _tensors,
        "sentinel": _sentinel,
        "server": _server,
        "head": _head,
        "api": _api,
        "controller": _controller,
        GATEWAY: _gateway,
    }[kind_of(name)]
    part = make(layout, name)
    common = {MARKER: mark(layout.home, name), "TMPDIR": str(layout.temporary)}
    return StackPart(
        name=name,
        command=lambda: _with(part.command(), common),
        ready=part.ready,
        needs=tuple(other for other in present if _needs(layout, name, other)),
        stop_seconds=part.stop_seconds,
    )


def _with(command: Command | None, env: dict[str, str]) -> Command | None:
    return command and Command(command.argv, {**command.env, **env})


def _needs(layout: StackLayout, name: str, other: str) -> bool:
    if kind_of(other) not in NEEDS[kind_of(name)]:
        return False
    if service_of(other) in layout.services:
        # One of the two is enough; the Sentinels are ready when they know the primary.
        return False
    same_node = {kind_of(name), kind_of(other)} == set(PER_NODE)
    return not same_node or node_of(name) == node_of(other)


def _ledger(layout: StackLayout, name: str) -> StackPart:
    return _redis(layout, name, durable=True, memory_mb=layout.ledger_memory_mb)


def _tensors(layout: StackLayout, name: str) -> StackPart:
    return _redis(layout, name, durable=False, memory_mb=layout.tensors_memory_mb)


def _redis(layout: StackLayout, name: str, *, durable: bool, memory_mb: int) -> StackPart:
    files, service = layout.servers[name], layout.services.get(service_of(name))
    command = Command(tuple(server_command(files, layout.settings.redis_server)), {})
    if service is None:
        write_configuration(files, durable=durable, memory_mb=memory_mb)
        return StackPart(name, lambda: command, redis_server(name, files.url))
    server = ReplicatedServer(
        files, layout.urls[service.name], durable=durable, memory_mb=memory_mb
    )
    server.configure(service.port)

    def start() -> Command | None:
        return command if server.may_start() else None

    return StackPart(name, start, replicated_server(name, files.url))


def _sentinel(layout: StackLayout, name: str) -> StackPart:
    files, services = layout.sentinels[name], list(layout.services.values())
    write_sentinel_configuration(files, services)
    command = Command(tuple(sentinel_command(files, layout.settings.redis_server)), {})
    return StackPart(name, lambda: command, lambda _at: watches(files, services))


def _server(layout: StackLayout, name: str) -> StackPart:
    node = node_of(name)
    tensors = part_names("tensors", layout.nodes)[node]
    ready = parameter_server_probe(layout.urls["ledger"], node_name(node))
    env = {**_common(layout), **_job_secret(layout), "VCASGD_NODE": str(node)}
    if tensors in layout.servers and tensors not in layout.services:
        # Both run on this machine, so they use a Unix socket instead of TCP.
        env["VCASGD_NODE_URL"] = layout.servers[tensors].nearest_url
    return StackPart(name, _module("vcasgd.parameter_server.main", env), ready)


def _head(layout: StackLayout, name: str) -> StackPart:
    def command() -> Command | None:
        return head_command(
            layout.settings,
            address=layout.ray_address,
            ledger_url=layout.urls["ledger"],
            temp_dir=layout.scratch / "head",
            token=layout.ray_token,
        )

    ready = listening(HOST, layout.ports["head"])
    # Kill it: its state is in the ledger, and its own shutdown waits for lost nodes.
    return StackPart(name, command, ready, stop_seconds=0.0)


def _api(layout: StackLayout, name: str) -> StackPart:
    env = {
        **_common(layout),
        **_secrets_key(layout),
        **layout.join_env,
        "VCASGD_TOKEN": layout.token,
    }
    ready = answering(f"{layout.api_url}/readyz")
    return StackPart(name, _module("vcasgd.api", env), ready)


def _controller(layout: StackLayout, name: str) -> StackPart:
    return StackPart(
        name,
        _module(
            "vcasgd.controller",
            {
                **_common(layout),
                **_job_secret(layout),
                **_secrets_key(layout),
                **_webhook(layout),
                "VCASGD_RAY_TOKEN": layout.ray_token,
                **_join_url(layout),
            },
        ),
        controller_probe(layout.urls["ledger"]),
        stop_seconds=CONTROLLER_STOP_SECONDS,
    )


def _join_url(layout: StackLayout) -> dict[str, str]:
    return {name: url for name, url in layout.join_env.items() if name == "VCASGD_JOIN_URL"}


def _gateway(layout: StackLayout, name: str) -> StackPart:
    env = {**_common(layout), **layout.join_env}
    # it may listen on one address only
    host = layout.settings.join_host
    ready = listening(HOST if host in ("", "0.0.0.0", "::") else host, layout.ports[name])
    return StackPart(name, _module("vcasgd.gateway.main", env), ready)


def _module(name: str, env: dict[str, str]) -> Callable[[], Command]:
    command = Command((sys.executable, "-m", name), env)
    return lambda: command


def _job_secret(layout: StackLayout) -> dict[str, str]:
    return {"VCASGD_JOB_SECRET": layout.job_secret} if layout.job_secret else {}


def _secrets_key(layout: StackLayout) -> dict[str, str]:
    return {"VCASGD_SECRETS_KEY": layout.secrets_key}


def _webhook(layout: StackLayout) -> dict[str, str]:
    names = ("webhook_url", "webhook_secret")
    values = {name: getattr(layout.settings, name) for name in names}
    return {
        f"VCASGD_{name.upper()}": value.get_secret_value()
        for name, value in values.items()
        if value is not None
    }


def _common(layout: StackLayout) -> dict[str, str]:
    """Return the variables of all vcasgd processes besides the inherited settings."""
    return {
        "VCASGD_HOME": str(layout.home.path),
        "VCASGD_LEDGER_URL": layout.urls["ledger"],
        "VCASGD_TENSORS_URL": layout.tensors_url,
        "VCASGD_STORAGE_URL": layout.storage_url,
        "VCASGD_RAY_ADDRESS": layout.ray_address,
        "VCASGD_RAY_DIR": str(layout.scratch),
        "VCASGD_API_URL": layout.api_url,
        "VCASGD_API_PORT": str(layout.ports["api"]),
    }


# -- readiness: each probe returns within seconds --------------------------------------------------


def redis_server(name: str, url: str) -> Probe:
    """Return a probe for a supported Redis server that answers.

    The probe raises :class:`~vcasgd.errors.StoreUnsupported` for other servers.
    """
    client = _connect(url)

    def probe(_started_at: float) -> bool:
        try:
            check_server(client, name)
        except StoreUnavailable:
            return False
        return True

    return probe


def replicated_server(name: str, url: str) -> Probe:
    """Return a probe for a primary, or for a replica that has caught up with its primary."""
    client, answers = _connect(url), redis_server(name, url)

    def probe(started_at: float) -> bool:
        if not answers(started_at):
            return False
        try:
            info = client.info("replication")
        except StoreUnavailable:
            return False
        return "master" in info["role"] or "up" in info.get("master_link_status", "")

    return probe


def parameter_server_probe(ledger_url: str, node: str) -> Probe:
    """Return a probe for a parameter server that has sent a heartbeat to the ledger."""
    ledger = _connect(ledger_url)
    servers = Servers(ledger)

    def probe(started_at: float) -> bool:
        try:
            return bool(servers.all().get(node, {}).get("at", 0.0) >= started_at)
        except StoreUnavailable:
            return False

    return probe


def controller_probe(ledger_url: str) -> Probe:
    """Return a probe for a controller that has its lease and has published its pools."""
    control = Control(_connect(ledger_url))

    def probe(started_at: float) -> bool:
        try:
            return control.last_round_at() >= started_at
        except StoreUnavailable:
            return False

    return probe


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
