"""Access control lists: the Redis users that workers log in as.

On the ledger each job has one user, shared by its workers. On a tensors server each worker of a
job has its own user, so that no worker can change another's payloads. Passwords are derived from
a secret and are never stored or sent. A server without an ACL file loses its users at a restart;
any process with the secret can create the same users again.

A worker can run only the scripts that are named here and can't load any: an endless script would
block the server for everyone. They limit the number and the length of their arguments and of what
they read, and check the names of their keys. Servers (Redis 7 or newer, Valkey) check the commands
of a script against the rules of the user that runs it. So a script can't exceed the grants below,
and whatever a script writes, a worker can write without it, in any amount: readers use quotas.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from vcasgd.errors import StoreDenied
from vcasgd.steady_time import boot_time
from vcasgd.store.connection import RedisClient, script_source
from vcasgd.store.keys import CLEARANCES, LedgerKeys, TensorKeys

#: Scripts that workers run.
LEDGER_SCRIPTS = ("ledger/acquire", "ledger/renew", "ledger/end")
TENSORS_SCRIPTS = (
    "tensors/begin",
    "tensors/reserve",
    "tensors/push",
    "tensors/status",
    "tensors/install",
)
#: User names on the ledger and on tensors servers. They differ, because both can be one server.
LEDGER_USERS, TENSORS_USERS = re.compile("vcasgd-job-[^/]+"), re.compile("vcasgd-job-[^/]+/.+")
#: Commands that use no key. Not ``multi``, which would make many calls one that nothing interrupts,
#: and not ``select``: another database would escape from the quotas.
_KEYLESS = ("ping", "time", "wait")
_NEW_USER = ("reset", "on", "-@all")


@dataclass(frozen=True)
class Grant:
    """Permission for commands on keys.

    ``mode`` is ``R``, ``W`` or ``RW``; ``keys`` are patterns as in ``KEYS``.
    """

    mode: str
    commands: str
    keys: tuple[str, ...]

    @property
    def selector(self) -> str:
        """The argument of ``ACL SETUSER``. Selectors are checked one by one; they don't add up."""
        allowed = [f"+{command}" for command in self.commands.split()]
        return f"({' '.join([*allowed, *(f'%{self.mode}~{key}' for key in self.keys)])})"


@dataclass(frozen=True)
class User:
    """A user of one server, whose password and grants are computed when they are needed.

    Users with the same name and ``variant`` have the same rules under one secret. The ``repr``
    does not contain the password.
    """

    name: str
    variant: str
    make_password: Callable[[], str] = field(repr=False, compare=False)
    make_grants: Callable[[], tuple[Grant, ...]] = field(repr=False, compare=False)

    @property
    def password(self) -> str:
        """The password."""
        return self.make_password()

    @property
    def grants(self) -> tuple[Grant, ...]:
        """The permissions."""
        return self.make_grants()

    @property
    def rules(self) -> tuple[str, ...]:
        """The arguments of ``ACL SETUSER`` after the name. They replace all earlier rules."""
        digest = hashlib.sha256(self.password.encode()).hexdigest()
        keyless = (f"+{command}" for command in _KEYLESS)
        return (*_NEW_USER, f"#{digest}", *keyless, *(grant.selector for grant in self.grants))

    def url(self, url: str) -> str:
        """Return the server's URL with the credentials of this user."""
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
    """Return the ledger user of a job's workers: leases, heartbeats, results, logs."""
    return User(
        f"vcasgd-job-{job}",
        "ledger",
        lambda: _derived(secret, "ledger", job),
        lambda: _on_ledger(LedgerKeys(job)),
    )


def tensors_user(
    secret: str,
    job: str,
    worker: str,
    *,
    shards: range = range(1),
    first_snapshot: bool = False,
) -> User:
    """Return the user of one worker on a store node with some shards of its job.

    It can write only its own payloads.

    ``first_snapshot``: the job has no model yet, so the worker may install the first one.
    """

    def grants() -> tuple[Grant, ...]:
        keys = [TensorKeys(job, pattern) for pattern in shard_patterns(shards)]
        more = (_for_first_snapshot(each) for each in keys if first_snapshot)
        return _joined([*(_on_tensors(each, worker) for each in keys), *more])

    return User(
        f"vcasgd-job-{job}/{worker}",
        f"{'first snapshot' if first_snapshot else 'tensors'} {shards.start}-{shards.stop}",
        lambda: _derived(secret, "tensors", job, worker),
        grants,
    )


def shard_patterns(shards: range) -> list[str]:
    """Return patterns that match just the numbers of these shards, without gaps.

    There is one for each ten, because a server tries each pattern for each key of a command.
    """
    tens = sorted({number // 10 for number in shards})
    ends = [(max(shards.start, 10 * ten), min(shards.stop, 10 * ten + 10) - 1) for ten in tens]
    return [
        str(first) if first == last else f"{first // 10 or ''}[{first % 10}-{last % 10}]"
        for first, last in ends
    ]


def _joined(all_grants: Iterable[Iterable[Grant]]) -> tuple[Grant, ...]:
    """Return one grant for each permission, with the keys of all."""
    keys: dict[tuple[str, str], list[str]] = {}
    for grants in all_grants:
        for grant in grants:
            keys.setdefault((grant.mode, grant.commands), []).extend(grant.keys)
    return tuple(Grant(*permission, tuple(each)) for permission, each in keys.items())


@lru_cache(maxsize=4096)  # A parameter server needs one for each update.
def worker_key(secret: str, job: str, worker: str) -> str:
    """Return the key for the signatures of a worker's update headers."""
    return _derived(secret, "header", job, worker)


def lease_pass(key: str) -> str:
    """Return the credential that authenticates a worker to the ledger.

    It is derived from the worker's :func:`worker_key`.
    """
    return _derived(key, "lease")


def address_proof(lease_pass: str, address: str) -> str:
    """Return the proof that a public key belongs to the worker with this :func:`lease_pass`."""
    return _derived(lease_pass, "address", address)


def _derived(secret: str, *names: str) -> str:
    return hmac.new(secret.encode(), "\0".join(names).encode(), hashlib.sha256).hexdigest()


def _scripts(names: Iterable[str], keys: tuple[str, ...]) -> Grant:
    """Return the permission for some scripts only, which are named by their digests.

    ``EVALSHA`` counts all keys of a script as written; its commands are checked one by one.
    """
    digests = (hashlib.sha1(script_source(name).encode()).hexdigest() for name in names)
    return Grant("RW", " ".join(f"evalsha|{digest}" for digest in digests), keys)


def _on_ledger(keys: LedgerKeys) -> tuple[Grant, ...]:
    return (
        _scripts(LEDGER_SCRIPTS, (*keys.worker_script_keys, CLEARANCES)),
        Grant(
            "R",
            "hget hmget hstrlen",
            (keys.record, keys.facts, keys.work, keys.shards, keys.counters, keys.holders,
             keys.blocks, keys.placed, CLEARANCES),
        ),
        Grant("R", "hgetall", (keys.record, keys.shards, keys.evaluations, keys.tuning)),
        Grant("R", "hvals", (keys.vanished,)),
        Grant("R", "hexists", (keys.quarantine,)),
        Grant("R", "sismember", (keys.draining,)),
        # Not ``zrange``, which can skip any number of members without an answer.
        Grant("R", "zscore zrevrange", (keys.leases, keys.open)),
        Grant("W", "zadd zrem", (keys.leases, keys.open)),
        Grant("W", "hset hdel", (keys.holders,)),
        Grant("RW", "hset hincrby", (keys.counters,)),
        Grant("W", "hset", (keys.workers, keys.evaluations, keys.facts, keys.refused,
                            keys.secret_requests)),
        Grant("R", "hget", (keys.secret_answers,)),
        Grant("W", "xadd", (keys.logs,)),
        Grant("W", "rpush ltrim", (keys.failures,)),
    )  # fmt: skip


def _on_tensors(keys: TensorKeys, worker: str) -> tuple[Grant, ...]:
    prefix = keys.prefix
    snapshots, payloads = f"{prefix}s:*", f"{prefix}u:{worker}.*"
    moments, repetitions = f"{prefix}o:*", f"{prefix}r:*"
    # Uploaded by other workers, for one that repeats an interval of theirs.
    states = f"{prefix}u:*.states.*"
    return (
        _scripts(TENSORS_SCRIPTS, (f"{prefix}*",)),
        Grant("R", "get", (keys.fence, keys.meta, keys.window, snapshots, moments, repetitions,
                           states)),
        Grant("R", "exists", (keys.fence, keys.meta, snapshots, payloads)),
        Grant("R", "hget hmget hstrlen", (keys.applied, keys.pushed, keys.tokens, keys.rejected,
                                          keys.pins)),
        Grant("R", "hgetall", (keys.pins,)),
        Grant("R", "xread", (keys.news,)),
        Grant("R", "zscore zcard", (keys.push_slots,)),
        Grant("W", "zadd zrem", (keys.push_slots,)),
        Grant("W", "hset", (keys.pushed, keys.tokens)),
        Grant("W", "set persist unlink", (payloads,)),
        Grant("W", "set", (moments,)),
        Grant("W", "xadd", (keys.stream,)),
        Grant("W", "sadd", (keys.pin_requests,)),
    )  # fmt: skip


def _for_first_snapshot(keys: TensorKeys) -> tuple[Grant, ...]:
    snapshots = f"{keys.prefix}s:*"
    old = (keys.applied, keys.pushed, keys.tokens, keys.stream, keys.rejected, keys.push_slots)
    return (
        Grant("W", "set", (keys.meta, snapshots)),
        Grant("W", "unlink", (snapshots, *old)),
        Grant("W", "hset", (keys.applied,)),
        Grant("W", "xadd", (keys.news,)),
    )


class AclUsers:
    """Keeps the worker users of one server in step with the workers that should have access.

    ``scripts`` are those that the users run. A user that is no longer listed is deleted after
    ``linger_seconds``, so that a client that still uses it can learn that its job has ended. So are
    users called ``names`` that an earlier process created.
    """

    def __init__(
        self,
        server: RedisClient,
        scripts: Iterable[str],
        linger_seconds: float,
        names: re.Pattern[str] | None = None,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        self._server = server
        self._names = names
        self._scripts = [server.script(name) for name in scripts]
        self._linger = linger_seconds
        self._clock = clock
        #: User name → the variant that was set, and when the user was last listed.
        self._users: dict[str, tuple[str, float]] = {}

    def sync(
        self, users: Iterable[User], banned: Collection[str] = (), most: int | None = None
    ) -> bool:
        """Create or update ``users``, and delete those that are banned or no longer listed.

        Names in ``banned`` are deleted at once. Sets at most ``most`` users; returns False if that
        left some out. Without changes this takes two round trips. Raises
        :class:`StoreUnavailable`, and :class:`StoreDenied` if this client may not manage users.
        """
        self._load_scripts()
        now = self._clock()
        existing = {name.decode() for name in self._acl("USERS")}
        for name in filter(self._names.fullmatch, existing) if self._names else ():
            self._users.setdefault(name, ("", now))
        due = []
        for user in users:
            variant = self._users.get(user.name, ("", 0.0))[0]
            if user.name not in existing or variant != user.variant:
                due.append(user)
            self._users[user.name] = (variant, now)
        for user in islice(due, most):
            self._acl("SETUSER", user.name, *user.rules)
            self._users[user.name] = (user.variant, now)
        self._delete(banned, now, existing)
        return most is None or len(due) <= most

    def _load_scripts(self) -> None:
        loaded = self._server.script_exists(*(script.sha for script in self._scripts))
        for script, exists in zip(self._scripts, loaded, strict=True):
            if not exists:
                self._server.script_load(script.script)

    def _delete(self, banned: Collection[str], now: float, existing: Collection[str]) -> None:
        expired = [
            name
            for name, (_, listed_at) in self._users.items()
            if now - listed_at > self._linger or name in banned
        ]
        # an earlier process may have created a banned user
        if names := [name for name in {*expired, *banned} if name in existing]:
            self._acl("DELUSER", *names)
        for name in expired:
            del self._users[name]

    def _acl(self, *arguments: str) -> list[bytes]:
        try:
            answer: list[bytes] = self._server.execute_command("ACL", *arguments)
        except StoreDenied as error:
            raise StoreDenied(
                f"can't manage the Redis users of workers: {error.message}",
                remedy="let the user in this URL run ACL, or set VCASGD_JOB_USERS=false",
            ) from error
        return answer
