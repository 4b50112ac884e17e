"""What the parts of a stack are: how each is started, what it needs, and when it is ready."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from vcasgd.fleet.providers.local_processes import MARKER
from vcasgd.runtime.cluster import Command, head_command
from vcasgd.stack import probes
from vcasgd.stack.home import StackHome
from vcasgd.stack.layout import HOST, Layout
from vcasgd.stack.probes import Probe
from vcasgd.store.embedded import server_command, write_configuration

#: what each part needs to be ready before it is started, at every start; in order of start
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


def make_parts(layout: Layout, names: Iterable[str] = PARTS) -> list[Part]:
    """The parts of these names, in order of start; a server that the user brings is none.

    Raises :class:`~vcasgd.errors.StackError` if there is no server to start.
    """
    ours = set(names) - ({"ledger", "tensors"} - layout.servers.keys())
    return [_part(layout, name, ours) for name in PARTS if name in ours]


def _part(layout: Layout, name: str, present: set[str]) -> Part:
    make: Callable[[Layout], Part] = {
        "ledger": _ledger,
        "tensors": _tensors,
        "server": _server,
        "head": _head,
        "api": _api,
        "controller": _controller,
    }[name]
    part = make(layout)
    common = {MARKER: mark(layout.home, name), "TMPDIR": str(layout.temporary)}
    return Part(
        name=name,
        command=Command(part.command.argv, {**part.command.env, **common}),
        ready=part.ready,
        needs=tuple(need for need in NEEDS[name] if need in present),
        stop_seconds=part.stop_seconds,
    )


def _ledger(layout: Layout) -> Part:
    return _redis(layout, "ledger", durable=True)


def _tensors(layout: Layout) -> Part:
    return _redis(layout, "tensors", durable=False)


def _redis(layout: Layout, name: str, *, durable: bool) -> Part:
    files = layout.servers[name]
    write_configuration(files, durable=durable)
    argv = server_command(files, layout.settings.redis_server)
    return Part(name, Command(tuple(argv), {}), probes.redis_server(name, files.url))


def _server(layout: Layout) -> Part:
    ready = probes.parameter_server(layout.urls["ledger"], "0")
    env = {**_common(layout), **_admits_workers(layout)}
    if "tensors" in layout.servers:
        # it is beside its tensors server, so the bytes need not go through TCP
        env["VCASGD_NODE_URL"] = layout.servers["tensors"].nearest_url
    return Part("server", _module("vcasgd.runtime.server", env), ready)


def _head(layout: Layout) -> Part:
    ledger = urlsplit(layout.urls["ledger"])
    command = head_command(
        host=HOST,
        port=layout.ports["head"],
        ledger_address=f"{ledger.hostname}:{ledger.port or 6379}",
        ledger_password=unquote(ledger.password) if ledger.password else None,
        namespace=layout.settings.cluster,
        temp_dir=layout.scratch / "head",
        heartbeat=layout.settings.heartbeat,
        token=layout.ray_token,
    )
    ready = probes.listening(HOST, layout.ports["head"])
    # all that it knows is in the ledger; its own farewell waits for nodes that are gone
    return Part("head", command, ready, stop_seconds=0.0)


def _api(layout: Layout) -> Part:
    env = {**_common(layout), "VCASGD_TOKEN": layout.token}
    ready = probes.http(f"{layout.api_url}/readyz")
    return Part("api", _module("vcasgd.api", env), ready)


def _controller(layout: Layout) -> Part:
    return Part(
        "controller",
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
        "VCASGD_NODE": "0",
        "VCASGD_LEDGER_URL": layout.urls["ledger"],
        "VCASGD_TENSORS_URL": layout.urls["tensors"],
        "VCASGD_STORAGE_URL": layout.storage_url,
        "VCASGD_RAY_ADDRESS": layout.ray_address,
        "VCASGD_RAY_DIR": str(layout.scratch),
        "VCASGD_API_URL": layout.api_url,
        "VCASGD_API_PORT": str(layout.ports["api"]),
    }
