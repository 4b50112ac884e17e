"""What the parts of a stack are: how each is started, what it needs, and when it is ready."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from vcasgd.fleet.providers.local_processes import MARKER
from vcasgd.runtime.cluster import Command, head_command
from vcasgd.stack import probes
from vcasgd.stack.home import StackHome
from vcasgd.stack.layout import HOST, Layout
from vcasgd.stack.names import PER_NODE, kind_of, node_of, part_names
from vcasgd.stack.probes import Probe
from vcasgd.store.embedded import server_command, write_configuration
from vcasgd.store.servers import node_name

#: what each kind of part needs to be ready before it is started, at every start; in order of
#: start. A parameter server needs the tensors server of its own store node only.
NEEDS = {
    "ledger": (),
    "tensors": (),
    "server": ("ledger", "tensors"),
    "head": ("ledger",),
    "api": ("ledger", "tensors"),
    "controller": ("ledger", "tensors", "head"),
}
PARTS = tuple(NEEDS)
#: how long a part may take to end in an orderly way
STOP_SECONDS = 8.0
#: the controller writes a checkpoint of each running job before it ends
CONTROLLER_STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Part:
    """A process of the stack."""

    name: str
    command: Command
    ready: Probe
    needs: tuple[str, ...] = ()
    stop_seconds: float = STOP_SECONDS


def mark(home: StackHome, name: str) -> str:
    """Leads to all processes of a part, as an instance's id leads to those of a machine."""
    return f"stack:{home.path}:{name}"


def make_parts(layout: Layout, kinds: Iterable[str] = PARTS) -> list[Part]:
    """The parts of these kinds, in order of start; a server that the user brings is none.

    Raises :class:`~vcasgd.errors.StackError` if there is no server to start.
    """
    wanted = set(kinds)
    names = [
        name
        for kind in PARTS
        if kind in wanted
        for name in part_names(kind, layout.nodes)
        if name not in layout.urls or name in layout.servers
    ]
    return [_part(layout, name, names) for name in names]


def _part(layout: Layout, name: str, present: Sequence[str]) -> Part:
    make: Callable[[Layout, str], Part] = {
        "ledger": _ledger,
        "tensors": _tensors,
        "server": _server,
        "head": _head,
        "api": _api,
        "controller": _controller,
    }[kind_of(name)]
    part = make(layout, name)
    common = {MARKER: mark(layout.home, name), "TMPDIR": str(layout.temporary)}
    return Part(
        name=name,
        command=Command(part.command.argv, {**part.command.env, **common}),
        ready=part.ready,
        needs=tuple(other for other in present if _needs(name, other)),
        stop_seconds=part.stop_seconds,
    )


def _needs(name: str, other: str) -> bool:
    if kind_of(other) not in NEEDS[kind_of(name)]:
        return False
    beside = {kind_of(name), kind_of(other)} == set(PER_NODE)
    return not beside or node_of(name) == node_of(other)


def _ledger(layout: Layout, name: str) -> Part:
    return _redis(layout, name, durable=True)


def _tensors(layout: Layout, name: str) -> Part:
    return _redis(layout, name, durable=False)


def _redis(layout: Layout, name: str, *, durable: bool) -> Part:
    files = layout.servers[name]
    write_configuration(files, durable=durable)
    argv = server_command(files, layout.settings.redis_server)
    return Part(name, Command(tuple(argv), {}), probes.redis_server(name, files.url))


def _server(layout: Layout, name: str) -> Part:
    node = node_of(name)
    tensors = part_names("tensors", layout.nodes)[node]
    ready = probes.parameter_server(layout.urls["ledger"], node_name(node))
    env = {**_common(layout), **_admits_workers(layout), "VCASGD_NODE": str(node)}
    if tensors in layout.servers:
        # it is beside its tensors server, so the bytes need not go through TCP
        env["VCASGD_NODE_URL"] = layout.servers[tensors].nearest_url
    return Part(name, _module("vcasgd.runtime.server", env), ready)


def _head(layout: Layout, name: str) -> Part:
    ledger = urlsplit(layout.urls["ledger"])
    tls = ledger.scheme == "rediss"
    command = head_command(
        host=HOST,
        port=layout.ports["head"],
        ledger_address=f"{'rediss://' if tls else ''}{ledger.hostname}:{ledger.port or 6379}",
        ledger_files=dict(parse_qsl(ledger.query)) if tls else {},
        ledger_password=unquote(ledger.password) if ledger.password else None,
        namespace=layout.settings.cluster,
        temp_dir=layout.scratch / "head",
        heartbeat=layout.settings.heartbeat,
        token=layout.ray_token,
    )
    ready = probes.listening(HOST, layout.ports["head"])
    # all that it knows is in the ledger; its own farewell waits for nodes that are gone
    return Part(name, command, ready, stop_seconds=0.0)


def _api(layout: Layout, name: str) -> Part:
    env = {**_common(layout), "VCASGD_TOKEN": layout.token}
    ready = probes.http(f"{layout.api_url}/readyz")
    return Part(name, _module("vcasgd.api", env), ready)


def _controller(layout: Layout, name: str) -> Part:
    return Part(
        name,
        _module(
            "vcasgd.runtime.controller",
            {
                **_common(layout),
                **_admits_workers(layout),
                "VCASGD_RAY_TOKEN": layout.ray_token,
            },
        ),
        probes.controller(layout.urls["ledger"], layout.settings.lease_seconds),
        stop_seconds=CONTROLLER_STOP_SECONDS,
    )


def _module(name: str, env: dict[str, str]) -> Command:
    return Command((sys.executable, "-m", name), env)


def _admits_workers(layout: Layout) -> dict[str, str]:
    return {"VCASGD_JOB_SECRET": layout.job_secret} if layout.job_secret else {}


def _common(layout: Layout) -> dict[str, str]:
    """What our own processes must know beside the settings that they inherit."""
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
