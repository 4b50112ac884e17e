"""What a worker may do on the servers: users of theirs, with commands and keys of one job.

On the ledger each job has a user, on a tensors server each worker of a job has one, so that no
worker can touch another's payloads. Passwords are derived from a secret: nobody stores or sends
them, and after a restart, which servers without an ACL file come out of without any user,
whoever has the secret makes the same ones again.

A worker can run scripts that are loaded already, and load none: one that never ends would stop
the server for everybody. The servers check a script's commands against the rules of the user
that runs it (Redis 7 and newer, Valkey), so scripts can do no more than what is granted here.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from vcasgd.errors import StoreDenied
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import CLEARANCES, LedgerKeys, TensorKeys

#: that workers run
LEDGER_SCRIPTS = ("ledger/acquire", "ledger/renew", "ledger/release", "ledger/report")
TENSORS_SCRIPTS = (
    "tensors/begin",
    "tensors/reserve",
    "tensors/push",
    "tensors/status",
    "tensors/install",
)
#: names of users, on the ledger and on the tensors servers, which may be one and the same
LEDGER_USERS, TENSORS_USERS = re.compile("vcasgd-job-[^/]+"), re.compile("vcasgd-job-[^/]+/.+")
#: what needs no key
_KEYLESS = ("ping", "select", "time", "multi", "exec", "discard", "wait", "hello")
_NEW_USER = ("reset", "on", "-@all")


@dataclass(frozen=True)
class Grant:
    """Commands on keys (patterns as in ``KEYS``). ``mode``: ``R``, ``W`` or ``RW``."""

    mode: str
    commands: str
    keys: tuple[str, ...]

    @property
    def selector(self) -> str:
        """As ``ACL SETUSER`` takes it; selectors don't add up, each stands for itself."""
        allowed = [f"+{command}" for command in self.commands.split()]
        return f"({' '.join([*allowed, *(f'%{self.mode}~{key}' for key in self.keys)])})"


@dataclass(frozen=True)
class User:
    """A user of one server; ``repr`` does not show the password."""

    name: str
    password: str
    grants: tuple[Grant, ...]

    def __repr__(self) -> str:
        return f"User(name={self.name!r})"

    @property
    def rules(self) -> tuple[str, ...]:
        """The arguments of ``ACL SETUSER`` behind the name; they replace what was there."""
        digest = hashlib.sha256(self.password.encode()).hexdigest()
        keyless = (f"+{command}" for command in _KEYLESS)
        return (*_NEW_USER, f"#{digest}", *keyless, *(grant.selector for grant in self.grants))

    def url(self, url: str) -> str:
        """The server's URL with this user in place of whoever is in it."""
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        query = [pair for pair in parse_qsl(parts.query) if pair[0] not in ("username", "password")]
        return urlunsplit(
            parts._replace(
                netloc=f"{quote(self.name, safe='')}:{self.password}@{host}",
                query=urlencode(query),
            )
        )


def ledger_user(secret: str, job: str) -> User:
    """For all workers of a job: leases, heartbeats, results, and their words."""
    return User(f"vcasgd-job-{job}", _derived(secret, "ledger", job), _on_ledger(LedgerKeys(job)))


def tensors_user(secret: str, job: str, worker: str, *, first_snapshot: bool = False) -> User:
    """For one worker on the store nodes, with payloads of its own.

    ``first_snapshot``: the job has no model yet, and it may be the one who makes it.
    """
    grants = _on_tensors(TensorKeys(job), worker)
    if first_snapshot:
        grants += _for_first_snapshot(TensorKeys(job))
    return User(f"vcasgd-job-{job}/{worker}", _derived(secret, "tensors", job, worker), grants)


def worker_key(secret: str, job: str, worker: str) -> str:
    """With which a worker signs the headers of its updates."""
    return _derived(secret, "header", job, worker)


def lease_pass(key: str) -> str:
    """With which a worker shows the ledger that it is who it says; from its :func:`worker_key`."""
    return _derived(key, "lease")


def _derived(secret: str, *names: str) -> str:
    return hmac.new(secret.encode(), "\0".join(names).encode(), hashlib.sha256).hexdigest()


def _on_ledger(keys: LedgerKeys) -> tuple[Grant, ...]:
    return (
        # a script's keys count as written, whatever it does with them; what it does is checked
        Grant("RW", "evalsha", (*keys.all(), CLEARANCES)),
        Grant(
            "R",
            "hget hmget hgetall hexists hvals sismember zrange zrangebyscore",
            (keys.record, keys.facts, keys.work, keys.shards, keys.counters, keys.evaluations,
             keys.vanished, keys.leases, keys.holders, keys.open, keys.done, keys.draining,
             keys.quarantine, keys.placed, keys.refused, keys.tuning, CLEARANCES),
        ),
        Grant("W", "zadd zrem", (keys.leases, keys.open)),
        Grant("W", "hset hdel", (keys.holders,)),
        Grant("RW", "hset hincrby", (keys.counters,)),
        Grant("W", "hset", (keys.workers, keys.evaluations, keys.facts, keys.refused)),
        Grant("W", "xadd", (keys.events, keys.logs)),
        Grant("W", "rpush ltrim", (keys.failures,)),
    )  # fmt: skip


def _on_tensors(keys: TensorKeys, worker: str) -> tuple[Grant, ...]:
    snapshots, payloads = _any(keys, "s:*"), _any(keys, f"u:{worker}.*")
    fence, meta, applied, pushed, tokens, stream, rejected, pins, wanted, places, window, news = (
        _on_any_shard(keys, key)
        for key in (keys.fence, keys.meta, keys.applied, keys.pushed, keys.tokens, keys.stream,
                    keys.rejected, keys.pins, keys.wanted, keys.places, keys.window, keys.news)
    )  # fmt: skip
    return (
        Grant("RW", "evalsha", (_any(keys, "*"),)),
        Grant("R", "get mget", (fence, meta, snapshots, window)),
        Grant("R", "exists", (fence, meta, snapshots, payloads)),
        Grant("R", "hget hmget hgetall", (applied, pushed, tokens, rejected, pins)),
        Grant("R", "xrange", (stream,)),
        Grant("R", "xread", (news,)),
        Grant("R", "zscore zcard", (places,)),
        Grant("W", "zadd zrem", (places,)),
        Grant("W", "hset", (pushed, tokens)),
        Grant("W", "set persist unlink", (payloads,)),
        Grant("W", "xadd", (stream,)),
        Grant("W", "sadd", (wanted,)),
    )


def _for_first_snapshot(keys: TensorKeys) -> tuple[Grant, ...]:
    old = (keys.applied, keys.pushed, keys.tokens, keys.stream, keys.rejected, keys.places)
    return (
        Grant("W", "set", (_on_any_shard(keys, keys.meta), _any(keys, "s:*"))),
        Grant("W", "unlink", (_any(keys, "s:*"),)),
        Grant("W", "del", tuple(_on_any_shard(keys, key) for key in old)),
        Grant("W", "hset", (_on_any_shard(keys, keys.applied),)),
        Grant("W", "xadd", (_on_any_shard(keys, keys.news),)),
    )


def _any(keys: TensorKeys, rest: str) -> str:
    return _on_any_shard(keys, keys.prefix) + rest


def _on_any_shard(keys: TensorKeys, key: str) -> str:
    return key.replace(f"{{{keys.job}:{keys.shard}}}", f"{{{keys.job}:*}}", 1)


class AclUsers:
    """Sees to it that a server has the users that are wanted, and no others of our making.

    ``scripts``: those that the users run. ``linger_seconds``: a user that is wanted no more
    stays for so long, for those to hear of the end who still use it.
    """

    def __init__(
        self,
        server: RedisClient,
        scripts: Iterable[str],
        linger_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._scripts = [server.script(name) for name in scripts]
        self._linger = linger_seconds
        self._clock = clock
        #: rules as they were set, and when each user was wanted last
        self._made: dict[str, tuple[tuple[str, ...], float]] = {}

    def adopt(self, names: re.Pattern[str]) -> None:
        """Takes over the users with such names, which an earlier life of this process made: they
        go too once they are wanted no more.

        Raises as :meth:`keep`.
        """
        now = self._clock()
        for name in (each.decode() for each in self._ask("USERS")):
            if names.fullmatch(name):
                self._made.setdefault(name, ((), now))

    def keep(self, wanted: Iterable[User], banned: Collection[str] = ()) -> None:
        """Two round trips while nothing changes. ``banned``: names that have to go at once.

        Raises :class:`StoreUnavailable`, and :class:`StoreDenied` where the server lets nobody
        make users.
        """
        self._load_scripts()
        now = self._clock()
        rules = {user.name: user.rules for user in wanted}
        there = {name.decode() for name in self._ask("USERS")}
        for name, each in rules.items():
            if name not in there or self._made.get(name, ((), 0.0))[0] != each:
                self._ask("SETUSER", name, *each)
            self._made[name] = (each, now)
        self._remove(banned, now, there)

    def _load_scripts(self) -> None:
        loaded = self._server.script_exists(*(script.sha for script in self._scripts))
        for script, there in zip(self._scripts, loaded, strict=True):
            if not there:
                self._server.script_load(script.script)

    def _remove(self, banned: Collection[str], now: float, there: Collection[str]) -> None:
        gone = [
            name
            for name, (_, wanted_at) in self._made.items()
            if now - wanted_at > self._linger or name in banned
        ]
        # a banned user may be of an earlier life of this process
        if doomed := [name for name in {*gone, *banned} if name in there]:
            self._ask("DELUSER", *doomed)
        for name in gone:
            del self._made[name]

    def _ask(self, *words: str) -> list[bytes]:
        try:
            answer: list[bytes] = self._server.execute_command("ACL", *words)
        except StoreDenied as error:
            raise StoreDenied(
                f"users for the workers can't be made: {error.message}",
                remedy="let the user in this URL run ACL, or set VCASGD_JOB_USERS=false",
            ) from error
        return answer
