"""Facts about this machine, its settings, and the API. Reads only; every wait is bounded."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from packaging.requirements import Requirement

from vcasgd import __version__
from vcasgd.api import STATIC
from vcasgd.client.transport import Transport
from vcasgd.container_limits import memory_bytes
from vcasgd.doctor.facts import AccountFact, ApiFact, Facts, KnownError, PoolFact, PriceFact
from vcasgd.errors import SpecError, StackError, VcasgdError
from vcasgd.fleet.pools import LocalPoolSpec, PoolSpec, load_pools
from vcasgd.fleet.prices import PriceTable
from vcasgd.fleet.providers.registry import missing_permission
from vcasgd.schemas.fleet import PoolRow, StatusView
from vcasgd.settings import Settings, load_settings
from vcasgd.stack import StackHome, StackState, is_running, missing_libraries
from vcasgd.stack.libraries import EXTRA

#: Limit for a request to the API in seconds.
API_SECONDS = 10.0
DAY = 86_400.0


def collect(url: str | None = None, token: str | None = None) -> Facts:
    """Collect the facts.

    ``url`` and ``token`` replace those of the settings; without either, the API is that of a
    running stack on this machine.
    """
    memory = memory_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = hard if soft == resource.RLIM_INFINITY else soft
    machine = Facts(
        version=__version__,
        python=(sys.version_info.major, sys.version_info.minor),
        unmet=dict(_unmet()),
        missing=tuple(missing_libraries()),
        dashboard=(STATIC / "index.html").is_file(),
        memory=memory,
        shared_memory=_free_of(Path("/dev/shm"), total=True),
        open_files=None if files == resource.RLIM_INFINITY else files,
    )
    try:
        settings = load_settings()
    except SpecError as error:
        return _with(machine, settings=_problem(error))
    home = settings.home_path
    pools, pool_problem = _pools(settings)
    return _with(
        machine,
        home=str(home),
        home_problem=_home_problem(home),
        disk_free=_free_of(_existing(home)),
        exposed=tuple(_exposed(home)),
        redis_problem=_redis_problem(settings),
        pools=pool_problem,
        prices=tuple(_prices(settings, pools)),
        accounts=tuple(_accounts(settings, pools)),
        api=_api(settings, url, token),
        **_port(settings, url),
    )


def _with(facts: Facts, **more: object) -> Facts:
    return Facts(**{**vars(facts), **more})


def _problem(error: VcasgdError) -> KnownError:
    return KnownError(error.message, error.remedy)


def _unmet() -> Iterator[tuple[str, str | None]]:
    try:
        lines = importlib.metadata.requires("vcasgd") or []
    except importlib.metadata.PackageNotFoundError:
        return  # run from a source folder
    # A part of them says nothing: other programs need some of them, too.
    extra = "" if missing_libraries() else EXTRA
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield wanted, None
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            yield wanted, installed


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _free_of(path: Path, *, total: bool = False) -> int | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total if total else usage.free


def _home_problem(home: Path) -> str | None:
    place = _existing(home)
    if not place.is_dir():
        return f"{place} is not a folder"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} is not writable"


def _exposed(home: Path) -> Iterator[str]:
    stack = StackHome(home)
    for path in (stack.token_file, home / "secrets.json"):
        try:
            open_to_others = path.stat().st_mode & 0o077
        except OSError:
            continue
        if open_to_others:
            yield str(path)


def _running(settings: Settings) -> bool:
    return settings.home_path.is_dir() and is_running(settings.home_path)


def _port(settings: Settings, url: str | None) -> dict[str, object]:
    """Return the port of the stack's API, and True if another program listens on it.

    The program is not another one if it is the API that the settings or ``url`` name: on the
    control plane of a cluster, it has the port and no stack.
    """
    port = settings.api_port if settings.api_port is not None else 8700
    if _running(settings) or _is_here(url or _configured(settings), port):
        return {}
    with socket.socket() as probe:
        probe.settimeout(1)
        return {"port": port, "port_taken": probe.connect_ex(("127.0.0.1", port)) == 0}


def _configured(settings: Settings) -> str | None:
    return settings.api_url if "api_url" in settings.model_fields_set else None


def _is_here(url: str | None, port: int) -> bool:
    parts = urlsplit(url or "")
    return parts.hostname in ("127.0.0.1", "localhost", "::1") and parts.port == port


def _redis_problem(settings: Settings) -> str | None:
    program = settings.redis_server
    if program is None or shutil.which(program):
        return None
    return f"VCASGD_REDIS_SERVER: there is no program {program}"


def _pools(settings: Settings) -> tuple[tuple[PoolSpec, ...], KnownError | None]:
    try:
        return load_pools(settings.pools), None
    except SpecError as error:
        return (), _problem(error)


def _prices(settings: Settings, pools: tuple[PoolSpec, ...]) -> Iterator[PriceFact]:
    for pool in pools:
        if isinstance(pool, LocalPoolSpec):
            continue
        for kind in pool.machine_types:
            try:
                table = PriceTable.load(pool.provider, settings.prices)
                price = table.price(pool.region, kind)
            except SpecError as error:
                yield PriceFact(pool.name, kind, missing=_problem(error))
            else:
                yield PriceFact(pool.name, kind, age_days=(time.time() - price.as_of) // DAY)


def _accounts(settings: Settings, pools: tuple[PoolSpec, ...]) -> Iterator[AccountFact]:
    for pool in pools:
        try:
            denied = missing_permission(settings, pool)
        except ImportError as error:
            remedy = f"pip install 'vcasgd[{pool.provider}]'"
            yield AccountFact(pool.name, KnownError(f"there is no library {error.name}", remedy))
        except VcasgdError as error:
            yield AccountFact(pool.name, _problem(error))
        else:
            yield AccountFact(pool.name, None, denied)


def _api(settings: Settings, url: str | None, token: str | None) -> ApiFact | None:
    try:
        local = StackState.read(settings.home_path).api_url if _running(settings) else None
    except StackError as error:
        return ApiFact("the local stack", _problem(error))
    url = url or _configured(settings) or local
    if url is None:
        return None
    token = token or (settings.token.get_secret_value() if settings.token else None)
    # The local stack's token is never sent to another host.
    token = token or (StackHome(settings.home).token() if url == local else None)
    if not token:
        return ApiFact(url, KnownError(f"no token for {url}", "set VCASGD_TOKEN, or use --token"))
    try:
        return _asked(url, token, settings.ca_file)
    except VcasgdError as error:
        return ApiFact(url, _problem(error))


def _asked(url: str, token: str, ca_file: Path | None) -> ApiFact:
    transport = Transport(url, token, API_SECONDS, ca_file)
    try:
        sent = time.time()
        answer = transport.call("GET", "status")
        ahead = _clock_ahead(answer, sent, time.time())
        status = transport.get(StatusView, "status")
        rows = transport.get(list[PoolRow], "pools")
    finally:
        transport.close()
    pools = tuple(PoolFact(row.name, row.reason, _reached_quota(row)) for row in rows)
    return ApiFact(transport.url, None, status.version, status.controller, ahead, pools)


def _clock_ahead(answer: httpx.Response, sent: float, received: float) -> float | None:
    """Return the seconds that the API's clock is ahead; the time of transfer counts for it."""
    try:
        theirs = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None
    # Its header has whole seconds.
    return max(0.0, theirs - received) or min(0.0, theirs + 1 - sent)


def _reached_quota(row: PoolRow) -> int | None:
    quotas = (row.model_extra or {}).get("quotas")
    if not isinstance(quotas, dict):
        return None
    limits = [most for most in quotas.values() if isinstance(most, int)]
    return min(limits, default=None)
