"""Names, ports, URLs and secrets of a stack; they are the same after a restart."""

from __future__ import annotations

import contextlib
import random
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from vcasgd.cluster.commands import TEMP_DIR_BYTES
from vcasgd.container_limits import memory_bytes
from vcasgd.errors import PortInUse, StackError
from vcasgd.gateway.relay import ensure_certificate
from vcasgd.settings import Settings
from vcasgd.stack.home import StackHome, StackState
from vcasgd.store.embedded import SENTINELS, ServerFiles, Service
from vcasgd.store.role_at_start import last_primary

#: Kinds of parts of which each store node has its own.
PER_NODE = ("tensors", "server")
#: Kinds of parts that can have a replica.
REPLICATED = ("ledger", "tensors")
_REPLICA = "-replica"
#: Name of the gateway, which exists if the stack has a port for it.
GATEWAY = "gateway"

HOST = "127.0.0.1"
#: Fraction of the memory of the machine or container for all tensors servers together.
MEMORY_SHARE = 0.5
#: Part of the machine's memory for the ledger, which can need as much again while it rewrites its
#: file. Histories of a thousand jobs take 2 GB.
LEDGER_MEMORY_SHARE = 1 / 8
API_PORT = 8700
#: Below the kernel's range for outgoing connections; a reconnecting client could otherwise occupy
#: the port of a server during its restart.
FREE_PORTS = range(20_000, 32_000)
#: Longest path that leaves room for a node's folder, which is named after its local machine.
SCRATCH_BYTES = TEMP_DIR_BYTES - len("/local-0123456789ab")


def part_names(kind: str, nodes: int) -> list[str]:
    """Return the names of a kind's parts in the order of the store nodes.

    Names have no number if there is only one.
    """
    if kind not in PER_NODE or nodes == 1:
        return [kind]
    return [f"{kind}-{node}" for node in range(nodes)]


def replica_of(name: str) -> str:
    """Return the name of the second server of ``ledger`` or ``tensors-2``.

    Either of the two servers can be the primary.
    """
    return f"{name}{_REPLICA}"


def service_of(name: str) -> str:
    """Return ``tensors-2`` for ``tensors-2`` and for ``tensors-2-replica``."""
    return name.removesuffix(_REPLICA)


def kind_of(name: str) -> str:
    """Return ``tensors`` for ``tensors-2``."""
    return name.partition("-")[0]


def node_of(name: str) -> int:
    """Return 2 for ``tensors-2``."""
    return int(service_of(name).partition("-")[2] or 0)


@dataclass(frozen=True)
class StackLayout:
    """Addresses and secrets of a stack; ``repr`` hides the secrets."""

    home: StackHome
    settings: Settings
    #: Number of store nodes.
    nodes: int
    #: Number of replicas of each of the stack's servers.
    replicas: int
    ports: Mapping[str, int]
    #: Folder for Ray's sockets and all temporary files; paths of sockets must be short.
    scratch: Path
    #: Servers that the stack runs, by part name; excludes servers of the user.
    servers: Mapping[str, ServerFiles]
    #: Sentinels by part name; empty without replicas.
    sentinels: Mapping[str, ServerFiles]
    #: Replicated services that the Sentinels monitor, by name; empty without replicas.
    services: Mapping[str, Service]
    #: URLs of the ledger and of each tensors server.
    urls: Mapping[str, str] = field(repr=False)
    token: str = field(repr=False)
    #: Token for Ray; without it, anyone who reaches Ray's ports could run code here.
    ray_token: str = field(repr=False)
    #: Secret from which the workers' passwords are derived, or None if they share one.
    job_secret: str | None = field(repr=False)
    #: Key that the secrets of jobs are encrypted with.
    secrets_key: str = field(repr=False)

    @classmethod
    def plan(cls, home: StackHome, settings: Settings, before: StackState) -> StackLayout:
        """Plan a layout from the settings and the last state.

        Raises :class:`PortInUse` if the API's port is taken, and :class:`StackError` if the
        settings disagree on the number of store nodes.
        """
        nodes = _nodes(settings, before)
        tensors = part_names("tensors", nodes)
        external = _external_urls(settings, tensors)
        own = [name for name in ("ledger", *tensors) if name not in external]
        replicas = before.replicas if settings.replicas is None else settings.replicas
        replicas = replicas if own else 0
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
            urls=external
            | {name: servers[name].url for name in own}
            | {name: each.url(list(sentinels.values())) for name, each in services.items()},
            token=token,
            ray_token=home.ensure_password("ray"),
            job_secret=_secret(home, "jobs", settings.job_secret) if settings.job_users else None,
            secrets_key=_secret(home, "job-secrets", settings.secrets_key),
        )

    @property
    def api_url(self) -> str:
        return f"http://{HOST}:{self.ports['api']}"

    @property
    def join_env(self) -> dict[str, str]:
        """Variables of the gateway, and of the API behind it; empty without a gateway."""
        if GATEWAY not in self.ports:
            return {}
        port, host = self.ports[GATEWAY], self.settings.join_host
        address = _own_address() if host in ("0.0.0.0", "::") else host
        env = {
            "VCASGD_API_SOCKET": str(self.scratch / "api.sock"),
            "VCASGD_JOIN_PORT": str(port),
            "VCASGD_JOIN_URL": self.settings.join_url or f"https://{address}:{port}",
        }
        if self.settings.join_certificate is None:
            folder = self.home.path / GATEWAY
            certificate, key = folder / "certificate.pem", folder / "key.pem"
            env["VCASGD_JOIN_PIN"] = ensure_certificate(certificate, key)
            env["VCASGD_JOIN_CERTIFICATE"], env["VCASGD_JOIN_KEY"] = str(certificate), str(key)
        return env

    @property
    def ledger_memory_mb(self) -> int:
        """Memory limit of the ledger; from then on it takes no new jobs."""
        whole = memory_bytes() * LEDGER_MEMORY_SHARE / 1e6
        return self.settings.ledger_memory_mb or max(256, int(whole))

    @property
    def tensors_memory_mb(self) -> int:
        """Memory limit of each tensors server; back-pressure starts before the machine swaps."""
        whole = memory_bytes() * MEMORY_SHARE / 1e6
        servers = self.nodes * (2 if self.services else 1)
        return self.settings.tensors_memory_mb or max(16, int(whole / servers))

    @property
    def tensors_url(self) -> str:
        """Value of ``VCASGD_TENSORS_URL``: the URLs of all store nodes in order."""
        return " ".join(self.urls[name] for name in part_names("tensors", self.nodes))

    @property
    def ray_address(self) -> str:
        return f"{HOST}:{self.ports['head']}"

    @property
    def storage_url(self) -> str:
        return self.settings.storage_url or self.home.storage.as_uri()

    @property
    def temporary(self) -> Path:
        """Folder for temporary files; removed with the stack."""
        return self.scratch / "tmp"


def _secret(home: StackHome, name: str, given: SecretStr | None) -> str:
    """Return a secret of the settings, or else one of the stack."""
    return given.get_secret_value() if given else home.ensure_password(name)


def service_urls(home: StackHome, state: StackState) -> dict[str, str]:
    """Return the URLs of a running stack's replicated servers, by name."""
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
    """Return the number of store nodes in the settings, else that of the last start."""
    if settings.tensors_url is None:
        return settings.store_nodes or before.store_nodes
    named = len(settings.tensors_urls())
    if settings.store_nodes not in (None, named):
        raise StackError(
            f"the settings ask for {settings.store_nodes} store nodes, and VCASGD_TENSORS_URL "
            f"names {named}",
            remedy="remove one of the two settings",
        )
    return named


def _services(
    home: StackHome,
    own: list[str],
    servers: Mapping[str, ServerFiles],
    sentinels: Mapping[str, ServerFiles],
) -> dict[str, Service]:
    """Return each replicated service with its last primary; empty without replicas.

    Raises :class:`StackError` if the settings remove a replica that has the ledger's newest data.
    """
    services = {}
    # Includes the Sentinels of an earlier start that had replicas.
    watchers = [ServerFiles(home.path / f"sentinel-{each}", 0, "") for each in range(SENTINELS)]
    for name in own:
        files = servers[name]
        port = last_primary(watchers, name)
        if sentinels:
            members = {servers[each].port for each in (name, replica_of(name))}
            port = port if port in members else files.port
            services[name] = Service(name, port or files.port, files.password)
        elif port not in (None, files.port) and name == "ledger":
            raise StackError(
                "the ledger's replica has its newest data",
                remedy="start the stack with --replicas 1",
            )
    return services


def _external_urls(settings: Settings, tensors: list[str]) -> dict[str, str]:
    """Return the URLs of the user's own servers, by part name."""
    urls = {}
    if settings.ledger_url is not None:
        urls["ledger"] = settings.required("ledger_url")
    if settings.tensors_url is not None:
        urls |= dict(zip(tensors, settings.tensors_urls(), strict=True))
    return urls


def _ports(settings: Settings, before: Mapping[str, int], servers: list[str]) -> dict[str, int]:
    taken: set[int] = set()
    ports = {"api": _api_port(settings.api_port, before.get("api"))}
    if settings.join_port is not None:
        ports[GATEWAY] = _join_port(settings, before.get(GATEWAY), ports["api"])
    for name in (*dict.fromkeys(servers), "head"):
        taken.update(ports.values())
        last = before.get(name)
        ports[name] = last if last and _is_free(last, "") else _free_port(taken)
    return ports


def _api_port(requested: int | None, before: int | None) -> int:
    """Return the API's port; 0 requests any free port, None the last one."""
    if requested == 0 and (before is None or not _is_free(before, HOST)):
        return _free_port(set())
    port = requested or before or API_PORT
    if not _is_free(port, HOST):
        raise PortInUse(
            f"the API's port {port} is in use",
            remedy="stop the process that uses it, or choose another port: vcasgd up --port PORT",
        )
    return port


def _join_port(settings: Settings, before: int | None, api: int) -> int:
    """Return the gateway's port; 0 requests the last one or any free port."""
    port, host = settings.join_port or before, settings.join_host
    if settings.join_port == 0 and (port is None or not _is_free(port, host)):
        return _free_port({api})
    assert port is not None
    if port == api or not _is_free(port, host):
        raise PortInUse(
            f"the port {port} for machines that join is in use",
            remedy="choose another port: vcasgd up --join-port PORT",
        )
    return port


def _own_address() -> str:
    """Return this machine's address in its network, as far as it is known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # sends nothing; the address is one for documentation (RFC 5737)
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return HOST


def _free_port(taken: set[int]) -> int:
    for port in random.sample(FREE_PORTS, 200):
        if port not in taken and _is_free(port, ""):
            return port
    raise StackError(f"no free port between {FREE_PORTS.start} and {FREE_PORTS.stop}")


def _is_free(port: int, host: str) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        # As servers do; lingering connections of the last process don't block the port.
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
