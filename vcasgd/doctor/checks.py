"""Checks of an installation: pure functions from facts to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from vcasgd.doctor.facts import Facts
from vcasgd.stack.libraries import REMEDY

MEGABYTE = 1_000_000
OLDEST_PYTHON = (3, 11)
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
#: Prices of clouds change rarely, but budgets rely on them.
MAX_PRICE_DAYS = 365.0


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


def findings(facts: Facts) -> list[Finding]:
    """Return all findings, errors first."""
    found = [finding for check in _CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: finding.severity is not Severity.ERROR)


def _error(check: str, message: str, remedy: str | None) -> Finding:
    return Finding(check, Severity.ERROR, message, remedy or "see the message")


def _warning(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, Severity.WARNING, message, remedy)


def _versions(facts: Facts) -> Iterator[Finding]:
    if facts.python < OLDEST_PYTHON:
        found = ".".join(map(str, facts.python))
        yield _error("python", f"this is Python {found}", "install Python 3.11 or newer")
    for requirement, installed in sorted(facts.unmet.items()):
        there = f"version {installed} is installed" if installed else "it is not installed"
        yield _error(
            "packages", f"vcasgd needs {requirement}, and {there}", f"pip install '{requirement}'"
        )
    if facts.missing:
        yield _warning(
            "stack", f"vcasgd up does not work here without {', '.join(facts.missing)}",
            f"to run a stack on this machine, {REMEDY}",
        )  # fmt: skip
    if facts.dashboard is False:
        yield _warning(
            "dashboard", "the dashboard is not built",
            "run make dashboard in the clone, or install a wheel",
        )  # fmt: skip


def _settings(facts: Facts) -> Iterator[Finding]:
    if facts.settings:
        remedy = facts.settings.remedy or "correct or unset this environment variable"
        yield _error("settings", facts.settings.message, remedy)
    if facts.redis_problem:
        yield _error(
            "redis", facts.redis_problem,
            "correct VCASGD_REDIS_SERVER, or unset it to use the embedded Valkey",
        )  # fmt: skip
    for path in facts.exposed:
        yield _error("secrets", f"other users can read {path}", f"chmod 600 {path}")


def _machine(facts: Facts) -> Iterator[Finding]:
    if facts.home_problem:
        yield _error(
            "home", f"{facts.home}: {facts.home_problem}",
            "set VCASGD_HOME to a folder where you can write",
        )  # fmt: skip
    if facts.disk_free is not None and facts.disk_free < MIN_DISK:
        yield _error(
            "disk", f"{facts.home} has {facts.disk_free // MEGABYTE} MB of free disk space",
            f"free at least {MIN_DISK // MEGABYTE} MB, or set VCASGD_HOME to another disk",
        )  # fmt: skip
    if facts.memory is not None and facts.memory < MIN_MEMORY:
        yield _error(
            "memory", f"this machine has {facts.memory // MEGABYTE} MB of memory",
            f"use one with at least {MIN_MEMORY // MEGABYTE} MB",
        )  # fmt: skip
    if facts.shared_memory is not None and facts.shared_memory < MIN_SHARED_MEMORY:
        yield _warning(
            "shared-memory", f"/dev/shm has {facts.shared_memory // MEGABYTE} MB",
            "in a container, start it with --shm-size=1g",
        )  # fmt: skip
    if facts.open_files is not None and facts.open_files < MIN_OPEN_FILES:
        yield _error(
            "open-files", f"a process may open {facts.open_files} files",
            f"run ulimit -n {MIN_OPEN_FILES} or more before vcasgd up",
        )  # fmt: skip
    if facts.port_taken:
        yield _error(
            "port", f"another program uses port {facts.port}, that of the stack's API",
            "end it, or run vcasgd up --port 0",
        )  # fmt: skip


def _pools(facts: Facts) -> Iterator[Finding]:
    if facts.pools:
        remedy = facts.pools.remedy or "correct the file that VCASGD_POOLS names"
        yield _error("pools", facts.pools.message, remedy)
    old: dict[float, list[str]] = {}
    for price in facts.prices:
        if price.missing:
            message = f"pool {price.pool}: {price.missing.message}"
            yield _error("prices", message, price.missing.remedy)
        elif price.age_days is not None and price.age_days > MAX_PRICE_DAYS:
            old.setdefault(price.age_days, []).append(price.machine_type)
    for days, types in sorted(old.items()):
        yield _warning(
            "prices",
            f"list prices of {', '.join(sorted(set(types)))} are {days:.0f} days old",
            "compare them with the cloud's, and put changed ones into a file (VCASGD_PRICES)",
        )


def _accounts(facts: Facts) -> Iterator[Finding]:
    for account in facts.accounts:
        if account.problem:
            yield _error(
                "account", f"pool {account.pool}: {account.problem.message}",
                account.problem.remedy or "check the cloud's credentials on this machine",
            )  # fmt: skip
        if account.denied:
            yield _error(
                "permissions",
                f"pool {account.pool}: no permission to launch machines: {account.denied}",
                "grant the permissions in docs/security.md to these credentials; Terraform does "
                "for the control plane",
            )


def _api(facts: Facts) -> Iterator[Finding]:
    api = facts.api
    if api is None:
        return
    if api.problem:
        yield _error("api", api.problem.message, api.problem.remedy or f"check {api.url}")
    if api.version is not None and api.version != facts.version:
        yield _error(
            "api-version", f"{api.url} runs vcasgd {api.version}, and this is {facts.version}",
            "install the same version on both sides",
        )  # fmt: skip
    if api.clock_ahead is not None and abs(api.clock_ahead) > MAX_CLOCK_ERROR:
        side = "behind" if api.clock_ahead > 0 else "ahead of"
        yield _error(
            "clock", f"this machine's clock is {abs(api.clock_ahead):.0f} s {side} the API's",
            "synchronize both with NTP, for example with timedatectl set-ntp true",
        )  # fmt: skip
    if api.controller is False:
        yield _error(
            "controller", f"{api.url} has no running controller, so no machines are bought",
            "read its log: vcasgd status names it, or journalctl -u vcasgd-controller",
        )  # fmt: skip
    for pool in api.pools:
        if pool.quota is not None:
            yield _warning(
                "quota", f"pool {pool.name} reached the account's quota of {pool.quota} machines",
                "raise the quota in the cloud's console; docs/deploy names those that matter",
            )  # fmt: skip
        elif pool.reason:
            yield _warning(
                "pool", f"pool {pool.name} backs off: {pool.reason}",
                "see When a cloud refuses in docs/costs.md",
            )  # fmt: skip


_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _versions, _settings, _machine, _pools, _accounts, _api,
)  # fmt: skip
