"""Diagnosis of an installation: ``vcasgd doctor``. Reads only, and every wait is bounded."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from packaging.requirements import Requirement

from vcasgd import __version__
from vcasgd.api import STATIC
from vcasgd.client.transport import Transport, find_api
from vcasgd.container_limits import memory_bytes
from vcasgd.errors import SpecError, StackError, VcasgdError
from vcasgd.fleet.estimate import MAX_PRICE_DAYS
from vcasgd.fleet.pools import FREE_PROVIDERS, AwsPoolSpec, GcpPoolSpec, PoolSpec, load_pools
from vcasgd.fleet.prices import PriceTable
from vcasgd.fleet.providers.registry import ask_account
from vcasgd.gpus import Gpu, visible_gpus
from vcasgd.schemas.fleet import PoolRow, StatusView
from vcasgd.settings import Settings, load_settings
from vcasgd.stack import StackHome, is_running, missing_libraries
from vcasgd.stack.control import EXTRA, REMEDY
from vcasgd.store.embedded import server_binary

MEGABYTE = 1_000_000
#: Ray and both servers need about this much; jobs need more.
MIN_MEMORY = 2_000 * MEGABYTE
#: Checkpoints, unpacked code, and logs of a small job.
MIN_DISK = 2_000 * MEGABYTE
#: Ray keeps its objects here and becomes slow on a disk.
MIN_SHARED_MEMORY = 200 * MEGABYTE
#: The stack's processes together keep several hundred connections and files open.
MIN_OPEN_FILES = 1024
#: Seconds; clouds refuse requests whose time is wrong by five minutes, and leases expire early.
MAX_CLOCK_ERROR = 10.0
#: Limit for a request to the API in seconds.
API_SECONDS = 10.0
_DAY = 86_400.0


class Severity(StrEnum):
    """An error keeps something from working. A warning may be intended."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """Something wrong, and what to do about it. ``check`` identifies the kind of finding."""

    check: str
    severity: Severity
    message: str
    remedy: str


Findings = Iterator[Finding]


def findings(url: str | None = None, token: str | None = None) -> list[Finding]:
    """Return all findings, errors first.

    ``url`` and ``token`` replace those of the settings; without either, the API is that of a
    running stack on this machine.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = hard if soft == resource.RLIM_INFINITY else soft
    checks = [
        packages(),
        libraries(missing_libraries()),
        dashboard(STATIC),
        memory(memory_bytes()),
        shared_memory(_usage(Path("/dev/shm"), "total")),
        open_files(None if files == resource.RLIM_INFINITY else files),
        gpus(visible_gpus(), _installed("torch")),
    ]
    try:
        settings = load_settings()
    except SpecError as error:
        checks.append(_known("settings", error, "correct or unset this environment variable"))
    else:
        home = settings.home_path
        checks += [
            redis(settings.redis_server),
            secrets(home),
            writable(home),
            disk(home, _usage(_existing(home), "free")),
            port(settings, url),
            pools(settings),
            api(settings, url, token),
        ]
    found = list(chain.from_iterable(checks))
    return sorted(found, key=lambda finding: finding.severity is not Severity.ERROR)


def knows_api(url: str | None = None) -> bool:
    """Return False if there is no API that :func:`findings` could check."""
    try:
        settings = load_settings()
    except SpecError:
        return False
    return _knows_api(settings, url)


def _error(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, Severity.ERROR, message, remedy)


def _warning(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, Severity.WARNING, message, remedy)


def _known(check: str, error: VcasgdError, remedy: str, place: str = "") -> Findings:
    """Yield an error that a part of vcasgd raised; ``remedy`` if it has none."""
    yield _error(check, f"{place}{error.message}", error.remedy or remedy)


def describe_gpus() -> list[str]:
    """Return a line of text for each GPU that workers of this machine can use."""
    return [
        f"GPU {place}: {gpu.name}, {_used(gpu)} in use"
        + ("" if gpu.utilization is None else f", {gpu.utilization:.0f} % busy")
        for place, gpu in enumerate(visible_gpus())
    ]


def _used(gpu: Gpu) -> str:
    used, total = gpu.memory_bytes - gpu.memory_free_bytes, gpu.memory_bytes
    return f"{used / 1e9:.1f} of {total / 1e9:.1f} GB"


# -- this installation and machine -----------------------------------------------------------------


def packages() -> Findings:
    """Check the packages that vcasgd requires."""
    try:
        lines = importlib.metadata.requires("vcasgd") or []
    except importlib.metadata.PackageNotFoundError:
        return  # run from a source folder
    # A part of the stack's libraries says nothing: other programs need some of them, too.
    extras = ("",) if missing_libraries() else ("", "worker", EXTRA)
    for line in sorted(lines):
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            yield from package(requirement, _installed(requirement.name))


def _installed(package: str) -> str | None:
    """Return the version of a package that is installed, else None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package(requirement: Requirement, version: str | None) -> Findings:
    """Check a version that is installed; None: it is not installed."""
    if version is not None and requirement.specifier.contains(version, prereleases=True):
        return
    needed = f"{requirement.name}{requirement.specifier}"
    there = f"version {version} is installed" if version else "it is not installed"
    yield _error("packages", f"vcasgd needs {needed}, and {there}", f"pip install '{needed}'")


def libraries(missing: Sequence[str]) -> Findings:
    """Check the libraries that only a stack needs."""
    if missing:
        yield _warning(
            "stack", f"vcasgd up does not work here without {', '.join(missing)}",
            f"to run a stack on this machine, {REMEDY}",
        )  # fmt: skip


def dashboard(static: Path) -> Findings:
    """Check that the dashboard is built."""
    if not (static / "index.html").is_file():
        yield _warning(
            "dashboard", "the dashboard is not built",
            "run make dashboard in the clone, or install a wheel",
        )  # fmt: skip


def memory(available: int | None) -> Findings:
    """Check the bytes of memory; None: unknown."""
    if available is not None and available < MIN_MEMORY:
        yield _error(
            "memory", f"this machine has {available // MEGABYTE} MB of memory",
            f"use one with at least {MIN_MEMORY // MEGABYTE} MB",
        )  # fmt: skip


def gpus(found: Sequence[Gpu], torch: str | None) -> Findings:
    """Check that this version of torch can use the GPUs; None: it is not installed."""
    if found and torch is not None and torch.endswith("+cpu"):
        yield _warning(
            "gpus",
            f"this machine has {len(found)} GPUs, and torch {torch} computes on processors only",
            "install a torch with CUDA (https://pytorch.org/get-started), or set "
            "VCASGD_LOCAL_GPUS=0",
        )


def shared_memory(size: int | None) -> Findings:
    """Check the bytes of ``/dev/shm``; None: unknown."""
    if size is not None and size < MIN_SHARED_MEMORY:
        yield _warning(
            "shared-memory", f"/dev/shm has {size // MEGABYTE} MB",
            "in a container, start it with --shm-size=1g",
        )  # fmt: skip


def open_files(limit: int | None) -> Findings:
    """Check the files that a process may open; None: any number."""
    if limit is not None and limit < MIN_OPEN_FILES:
        yield _error(
            "open-files", f"a process may open {limit} files",
            f"run ulimit -n {MIN_OPEN_FILES} or more before vcasgd up",
        )  # fmt: skip


def redis(program: Path | None) -> Findings:
    """Check the program of the servers that the settings name."""
    if program is None:
        return
    try:
        server_binary(program)
    except StackError as error:
        yield from _known("redis", error, "")


def secrets(home: Path) -> Findings:
    """Check that other users can't read secrets."""
    for path in (StackHome(home).token_file, home / "secrets.json"):
        try:
            exposed = path.stat().st_mode & 0o077
        except OSError:
            continue
        if exposed:
            yield _error("secrets", f"other users can read {path}", f"chmod 600 {path}")


def writable(home: Path) -> Findings:
    """Check that this user can write to the home."""
    place = _existing(home)
    if not place.is_dir():
        problem = f"{place} is not a folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        problem = f"{place} is not writable"
    else:
        return
    remedy = "set VCASGD_HOME to a folder where you can write"
    yield _error("home", f"{home}: {problem}", remedy)


def disk(home: Path, free: int | None) -> Findings:
    """Check the free bytes of the home's disk; None: unknown."""
    if free is not None and free < MIN_DISK:
        yield _error(
            "disk", f"{home} has {free // MEGABYTE} MB of free disk space",
            f"free at least {MIN_DISK // MEGABYTE} MB, or set VCASGD_HOME to another disk",
        )  # fmt: skip


def port(settings: Settings, url: str | None) -> Findings:
    """Check the port of the stack's API.

    A program that listens on it is no problem if it is the API that the settings or ``url`` name:
    on the control plane of a cluster, it has the port and no stack.
    """
    number = settings.api_port if settings.api_port is not None else 8700
    try:
        named = urlsplit(url or _configured(settings) or "")
        is_api = named.hostname in ("127.0.0.1", "localhost", "::1") and named.port == number
    except ValueError:
        is_api = False  # the check of the API reports it
    if _is_running(settings) or is_api:
        return
    with socket.socket() as probe:
        probe.settimeout(1)
        taken = probe.connect_ex(("127.0.0.1", number)) == 0
    if taken:
        yield _error(
            "port", f"another program uses port {number}, that of the stack's API",
            "end it, or run vcasgd up --port 0",
        )  # fmt: skip


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _usage(path: Path, what: str) -> int | None:
    try:
        return int(getattr(shutil.disk_usage(path), what))
    except OSError:
        return None


def _is_running(settings: Settings) -> bool:
    return settings.home_path.is_dir() and is_running(settings.home_path)


def _configured(settings: Settings) -> str | None:
    return settings.api_url if "api_url" in settings.model_fields_set else None


def _knows_api(settings: Settings, url: str | None) -> bool:
    return bool(url or _configured(settings) or _is_running(settings))


# -- pools and their accounts ----------------------------------------------------------------------


def pools(settings: Settings) -> Findings:
    """Check the pools file, and the prices and accounts of its pools."""
    try:
        specs = load_pools(settings.pools)
    except SpecError as error:
        yield from _known("pools", error, "correct the file that VCASGD_POOLS names")
        return
    ordered = any(pool.provider not in FREE_PROVIDERS for pool in specs)
    if ordered and "cluster" not in settings.model_fields_set:
        yield _warning(
            "cluster",
            f"stacks of one account that have the usual name, {settings.cluster}, end each "
            "other's machines",
            "set VCASGD_CLUSTER to a name of this stack's own before it has machines",
        )
    ages: dict[str, float] = {}
    for pool in specs:
        if isinstance(pool, AwsPoolSpec | GcpPoolSpec):
            for kind in pool.machine_types:
                try:
                    table = PriceTable.load(pool.provider, settings.prices)
                    ages[kind] = (time.time() - table.price(pool.region, kind).as_of) // _DAY
                except SpecError as error:
                    yield from _known("prices", error, "see the message", f"pool {pool.name}: ")
    yield from prices(ages)
    for pool in specs:
        yield from _account(settings, pool)


def prices(ages: dict[str, float]) -> Findings:
    """Check the ages of list prices, in days by machine type."""
    old = defaultdict(list)
    for kind, days in ages.items():
        if days > MAX_PRICE_DAYS:
            old[days].append(kind)
    for days, kinds in sorted(old.items()):
        yield _warning(
            "prices",
            f"list prices of {', '.join(sorted(kinds))} are {days:.0f} days old",
            "compare them with the cloud's, and put changed ones into a file (VCASGD_PRICES)",
        )


def _account(settings: Settings, pool: PoolSpec) -> Findings:
    place = f"pool {pool.name}: "
    try:
        answer = ask_account(settings, pool)
    except ImportError as error:
        remedy = f"pip install 'vcasgd[{pool.provider}]'"
        yield _error("account", f"{place}there is no library {error.name}", remedy)
        return
    except VcasgdError as error:
        remedy = "check the cloud's credentials on this machine"
        yield from _known("account", error, remedy, place)
        return
    if answer.denied:
        yield _error(
            "permissions",
            f"{place}no permission to launch machines: {answer.denied}",
            "grant the permissions in docs/security.md to these credentials; Terraform does "
            "for the control plane",
        )
    for quota in answer.quotas:
        if not quota.suffices:
            used = f", of which {quota.used:g} are used" if quota.used else ""
            yield _error(
                "quota",
                f"{place}the quota {quota.name} is {quota.limit:g} vCPUs{used}, and its smallest "
                f"machine needs {quota.least:g}",
                quota.remedy,
            )


# -- the API ---------------------------------------------------------------------------------------


def api(settings: Settings, url: str | None, token: str | None) -> Findings:
    """Check the API that ``url`` or the settings name, or that of a stack on this machine."""
    if not _knows_api(settings, url):
        return
    try:
        url, token = find_api(url or None, token or None, settings)
        with closing(Transport(url, token, API_SECONDS, settings.ca_file)) as transport:
            sent = time.time()
            answer = transport.call("GET", "status")
            ahead = _clock_ahead(answer, sent, time.time())
            status = transport.get(StatusView, "status")
            rows = transport.get(list[PoolRow], "pools")
    except VcasgdError as error:
        yield from _known("api", error, "check the URL and the token of the API")
        return
    if status.version != __version__:
        yield _error(
            "api-version", f"{url} runs vcasgd {status.version}, and this is {__version__}",
            "install the same version on both sides",
        )  # fmt: skip
    if ahead is not None and abs(ahead) > MAX_CLOCK_ERROR:
        side = "behind" if ahead > 0 else "ahead of"
        yield _error(
            "clock", f"this machine's clock is {abs(ahead):.0f} s {side} the API's",
            "synchronize both with NTP, for example with timedatectl set-ntp true",
        )  # fmt: skip
    if not status.controller:
        yield _error(
            "controller", f"{url} has no running controller, so no machines are bought",
            "read its log: vcasgd status names it, or journalctl -u vcasgd-controller",
        )  # fmt: skip
    for row in rows:
        yield from _pool(row)


#: Ends of reasons of pools that work as they should.
_USUAL = ("machines in use", "no machine has joined")


def _pool(row: PoolRow) -> Findings:
    quotas = (row.model_extra or {}).get("quotas")
    limits = quotas.values() if isinstance(quotas, dict) else ()
    quota = min((limit for limit in limits if isinstance(limit, int)), default=None)
    if quota is not None:
        yield _warning(
            "quota", f"pool {row.name} reached the account's quota of {quota} machines",
            "raise the quota in the cloud's console; docs/deploy names those that matter",
        )  # fmt: skip
    elif row.reason and not row.reason.endswith(_USUAL):
        yield _warning(
            "pool", f"pool {row.name} backs off: {row.reason}",
            "see When a cloud refuses in docs/costs.md",
        )  # fmt: skip


def _clock_ahead(answer: httpx.Response, sent: float, received: float) -> float | None:
    """Return the seconds that the API's clock is ahead; the time of transfer counts for it."""
    try:
        theirs = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None
    # Its header has whole seconds.
    return max(0.0, theirs - received) or min(0.0, theirs + 1 - sent)
