"""Where the parts of a stack are: ports, URLs, secrets; the same after a restart."""

from __future__ import annotations

import contextlib
import random
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from vcasgd.cluster import TEMP_DIR_BYTES
from vcasgd.errors import PortInUse, StackError
from vcasgd.settings import Settings
from vcasgd.stack.home import StackHome
from vcasgd.stack.names import kind_of, part_names, replica_of, service_of
from vcasgd.stack.replica_restart import last_primary
from vcasgd.stack.state import StackState
from vcasgd.store.embedded.replicas import SENTINELS, Service
from vcasgd.store.embedded.server import ServerFiles

HOST = "127.0.0.1"
#: of the machine's memory, for all tensors servers together
MEMORY_SHARE = 0.5
API_PORT = 8700
#: below the range from which the kernel takes ports for outgoing connections: else a client
#: that tries again could sit on a server's port while the server is being restarted
FREE_PORTS = range(20_000, 32_000)
#: the longest folder in which there is room for that of a node, named as its local instance
SCRATCH_BYTES = TEMP_DIR_BYTES - len("/local-0123456789ab")


@dataclass(frozen=True)
class StackLayout:
    """A stack's addresses and secrets; ``repr`` shows none of the latter."""

    home: StackHome
    settings: Settings
    #: how many store nodes there are
    nodes: int
    #: how many each of our own servers has
    replicas: int
    ports: Mapping[str, int]
    #: Ray's sockets and all temporary files; a short path, because that of a socket must be
    scratch: Path
    #: our own servers by the names of their parts; those that the user brings are not among them
    servers: Mapping[str, ServerFiles]
    #: who watches over them, where they have replicas
    sentinels: Mapping[str, ServerFiles]
    #: by name, where they have replicas: what the Sentinels watch
    services: Mapping[str, Service]
    #: of the ledger and of each tensors server, whoever brings them
    urls: Mapping[str, str] = field(repr=False)
    token: str = field(repr=False)
    #: without it, whoever reaches Ray's ports could run code here
    ray_token: str = field(repr=False)
    #: from which the workers' passwords are derived; None where they have none of their own
    job_secret: str | None = field(repr=False)

    @classmethod
    def plan(cls, home: StackHome, settings: Settings, before: StackState) -> StackLayout:
        """From the settings and from what was used before.

        Raises :class:`PortInUse` when the API's port is taken, and :class:`StackError` where the
        settings disagree about the store nodes.
        """
        nodes = _nodes(settings, before)
        tensors = part_names("tensors", nodes)
        given = _given(settings, tensors)
        own = [name for name in ("ledger", *tensors) if name not in given]
        replicas = _replicas(settings, before) if own else 0
        members = [*own, *(replica_of(name) for name in own[: len(own) * replicas])]
        watchers = [f"sentinel-{index}" for index in range(SENTINELS * replicas)]
        ports = _ports(settings, before.ports, ["ledger", *tensors, *members, *watchers])
        servers = {
            name: ServerFiles(home.path / name, ports[name], home.ensure_password(service_of(name)))
            for name in members
        }
        sentinels = {
            name: ServerFiles(home.path / name, ports[name], home.ensure_password("sentinel"))
            for name in watchers
        }
        services = _services(home, own, servers, sentinels)
        token = settings.token.get_secret_value() if settings.token else home.ensure_token()
        return cls(
            home=home,
            settings=settings,
            nodes=nodes,
            replicas=replicas,
            ports=ports,
            scratch=_scratch(home, before),
            servers=servers,
            sentinels=sentinels,
            services=services,
            urls=given
            | {name: servers[name].url for name in own}
            | {name: each.url(list(sentinels.values())) for name, each in services.items()},
            token=token,
            ray_token=home.ensure_password("ray"),
            job_secret=_job_secret(home, settings),
        )

    @property
    def api_url(self) -> str:
        return f"http://{HOST}:{self.ports['api']}"

    @property
    def tensors_memory_mb(self) -> int:
        """Of each tensors server, so that back-pressure begins before the machine swaps."""
        whole = psutil.virtual_memory().total * MEMORY_SHARE / 1e6
        servers = self.nodes * (2 if self.services else 1)
        return self.settings.tensors_memory_mb or max(16, int(whole / servers))

    @property
    def tensors_url(self) -> str:
        """As in ``VCASGD_TENSORS_URL``: of all store nodes, in order."""
        return " ".join(self.urls[name] for name in part_names("tensors", self.nodes))

    @property
    def ray_address(self) -> str:
        return f"{HOST}:{self.ports['head']}"

    @property
    def storage_url(self) -> str:
        return self.settings.storage_url or self.home.storage.as_uri()

    @property
    def temporary(self) -> Path:
        """For temporary files, so that they are gone when the stack is."""
        return self.scratch / "tmp"


def _job_secret(home: StackHome, settings: Settings) -> str | None:
    if not settings.job_users:
        return None
    given = settings.job_secret
    return given.get_secret_value() if given else home.ensure_password("jobs")


def service_urls(home: StackHome, state: StackState) -> dict[str, str]:
    """Of a stack that runs: the URLs of its own servers that have a replica, by name."""
    watchers = [
        ServerFiles(home.path / name, state.ports[name], home.ensure_password("sentinel"))
        for name in sorted(state.parts)
        if kind_of(name) == "sentinel"
    ]
    names = {service_of(name) for name in state.parts if name != service_of(name)}
    return {
        name: Service(name, state.ports[name], home.ensure_password(name)).url(watchers)
        for name in sorted(names)
    }


def _nodes(settings: Settings, before: StackState) -> int:
    """As asked for, else as many as the last time."""
    if settings.tensors_url is None:
        return settings.store_nodes or before.store_nodes
    named = len(settings.tensors_urls())
    if settings.store_nodes not in (None, named):
        raise StackError(
            f"{settings.store_nodes} store nodes were asked for, and VCASGD_TENSORS_URL names "
            f"{named}",
            remedy="leave out one of the two",
        )
    return named


def _replicas(settings: Settings, before: StackState) -> int:
    """As asked for, else as the last time."""
    return before.replicas if settings.replicas is None else settings.replicas


def _services(
    home: StackHome,
    own: list[str],
    servers: Mapping[str, ServerFiles],
    sentinels: Mapping[str, ServerFiles],
) -> dict[str, Service]:
    """Each with the primary that it had last; none without replicas.

    Raises :class:`StackError` where a replica has the newest data, and is to be left out.
    """
    found = {}
    # also those of an earlier life that are not wanted any more
    watchers = [ServerFiles(home.path / f"sentinel-{each}", 0, "") for each in range(SENTINELS)]
    for name in own:
        files = servers[name]
        port = last_primary(watchers, name)
        if sentinels:
            members = {servers[each].port for each in (name, replica_of(name))}
            port = port if port in members else files.port
            found[name] = Service(name, port or files.port, files.password)
        elif port not in (None, files.port) and name == "ledger":
            raise StackError(
                "the ledger's newest data are with its replica",
                remedy="start the stack with --replicas 1",
            )
    return found


def _given(settings: Settings, tensors: list[str]) -> dict[str, str]:
    """The URLs of servers that the user brings."""
    given = {}
    if settings.ledger_url is not None:
        given["ledger"] = settings.secret("ledger_url")
    if settings.tensors_url is not None:
        given |= dict(zip(tensors, settings.tensors_urls(), strict=True))
    return given


def _ports(settings: Settings, before: Mapping[str, int], servers: list[str]) -> dict[str, int]:
    taken: set[int] = set()
    ports = {"api": _api_port(settings.api_port, before.get("api"))}
    for name in (*dict.fromkeys(servers), "head"):
        taken.update(ports.values())
        known = before.get(name)
        ports[name] = known if known and _is_free(known, "") else _free_port(taken)
    return ports


def _api_port(wanted: int | None, before: int | None) -> int:
    """``wanted`` 0 means any, ``None`` the one of the last time."""
    if wanted == 0 and (before is None or not _is_free(before, HOST)):
        return _free_port(set())
    port = wanted or before or API_PORT
    if not _is_free(port, HOST):
        raise PortInUse(
            f"port {port} is in use, and the API was to listen there",
            remedy="stop whatever listens there, or choose another: vcasgd up --port PORT",
        )
    return port


def _free_port(taken: set[int]) -> int:
    for port in random.sample(FREE_PORTS, 200):
        if port not in taken and _is_free(port, ""):
            return port
    raise StackError(f"no free port between {FREE_PORTS.start} and {FREE_PORTS.stop}")


def _is_free(port: int, host: str) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        # what servers do: connections of the last life that linger are no obstacle
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return True
    return False


def _scratch(home: StackHome, before: StackState) -> Path:
    path = home.path / "tmp"
    if len(bytes(path)) <= SCRATCH_BYTES:
        return path
    if before.scratch and Path(before.scratch).is_dir():
        return Path(before.scratch)
    return Path(tempfile.mkdtemp(prefix="vc-", dir="/tmp"))
