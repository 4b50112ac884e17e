"""Names of all Redis keys.

The braces are Redis Cluster hash tags: keys that one script uses share a tag, so that they are on
one node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

#: Sorted set: all jobs, by submission time in µs.
JOBS = "vcasgd:{fleet}:jobs"
#: Set: jobs that have not ended.
ACTIVE = "vcasgd:{fleet}:active"
#: Sorted set: jobs that ended within a day, by the ledger's Unix time of their end.
ENDED = "vcasgd:{fleet}:ended"
#: Sorted set: deleted jobs, by the ledger's Unix time, until nothing is written for them any more.
DELETED = "vcasgd:{fleet}:deleted"
#: String: the name of the cluster that owns this ledger.
CLUSTER = "vcasgd:{fleet}:cluster"
#: Hash: the format of all stored data, and the version of vcasgd that used it last.
DATA_FORMAT = "vcasgd:{fleet}:data-format"
#: Hash: the controller's lease, and the time of its last round.
CONTROLLER = "vcasgd:{fleet}:controller"
#: List: requests from the API to the controller.
COMMANDS = "vcasgd:{fleet}:commands"
#: Hash: machine → the controller's view of it, as JSON.
MACHINES = "vcasgd:{fleet}:machines"
#: Hash: pool → the controller's view of it, as JSON.
POOLS = "vcasgd:{fleet}:pools"
#: Hash: pool that has or had machines → its configuration as last used, as JSON.
POOL_SPECS = "vcasgd:{fleet}:pool-specs"
#: Hash: pool → launch history, which outlives a controller.
LAUNCHES = "vcasgd:{fleet}:launches"
#: Hash: pool → labels that its machines are cleared for, separated by spaces.
CLEARANCES = "vcasgd:{fleet}:clearances"
#: Hash: machine → time up to which its cost is booked, and the job that pays.
METERS = "vcasgd:{fleet}:meters"
#: Hash: ``month|user``, such as ``2026-11|ann`` → USD that jobs of the user were booked then.
SPEND = "vcasgd:{fleet}:spend"
#: Hash: ``name|task`` of jobs → their measured speed on each type of machine.
WORKLOADS = "vcasgd:{fleet}:workloads"
#: Hash: store node → newest token of its parameter server.
SERVER_TOKENS = "vcasgd:{fleet}:server-tokens"
#: Hash: store node → last heartbeat of its parameter server.
SERVERS = "vcasgd:{fleet}:servers"
#: String: position in the events of all jobs up to which the webhook has them.
WEBHOOK = "vcasgd:{fleet}:webhook"
#: Hash: name of an API token → its scope, limits, and the digest of its secret, as JSON.
API_TOKENS = "vcasgd:{fleet}:api-tokens"
#: Hash: name of an API token → Unix time of its last use, to about a minute.
API_TOKEN_USES = "vcasgd:{fleet}:api-token-uses"

#: Hash: machine that joined → its properties, as JSON.
JOINED = "vcasgd:{fleet}:joined"
#: Hash: machine that joined → its last report, as JSON.
JOINED_REPORTS = "vcasgd:{fleet}:joined-reports"
#: Hash: machine → the workers that it has to run, with their credentials, as JSON.
WORKER_ORDERS = "vcasgd:{fleet}:worker-orders"
#: Hash: machine that joined → why it has to leave, as JSON.
JOINED_ENDS = "vcasgd:{fleet}:joined-ends"
#: String: when a gateway last found that machines can report, by the ledger's clock.
REPORTS_ARRIVE = "vcasgd:{fleet}:reports-arrive"


def request(identifier: str) -> str:
    """Return the name of the key that records a request to the controller, and its result."""
    return f"vcasgd:{{fleet}}:request:{identifier}"


def uploads(token: str) -> str:
    """Return the name of the key that counts the bytes which a token uploads within a day."""
    return f"vcasgd:{{fleet}}:uploads:{token}"


def idempotency(user: str | None, key: str) -> str:
    """Return the name of the key that records an ``Idempotency-Key`` of a user of the API."""
    return f"vcasgd:{{fleet}}:idempotency:{user or ''}:{key}"


class _Key:
    """Attribute with the name of a key: that of the attribute with dashes, or ``suffix``.

    ``script``: workers can pass the key to scripts, those of
    :data:`vcasgd.store.acl.LEDGER_SCRIPTS`; each key says so itself, so that a new one extends the
    rights of workers only on purpose. ``written``: workers write it, with or without a script, and
    it is no string.
    """

    def __init__(self, suffix: str = "", *, script: bool = False, written: bool = False) -> None:
        self.suffix, self.script, self.written = suffix, script, written

    def __set_name__(self, owner: type, name: str) -> None:
        self.suffix = self.suffix or name.replace("_", "-")

    @overload
    def __get__(self, keys: None, owner: type) -> _Key: ...

    @overload
    def __get__(self, keys: _Keys, owner: type) -> str: ...

    def __get__(self, keys: _Keys | None, owner: type) -> _Key | str:
        return self if keys is None else keys.prefix + self.suffix


class _Keys:
    @property
    def prefix(self) -> str:
        """The start of every key."""
        raise NotImplementedError

    @classmethod
    def _declared(cls) -> list[_Key]:
        return [key for key in vars(cls).values() if isinstance(key, _Key)]

    @property
    def all(self) -> tuple[str, ...]:
        """All keys with a fixed name."""
        return tuple(self.prefix + key.suffix for key in self._declared())

    @property
    def worker_script_keys(self) -> tuple[str, ...]:
        """Keys that a worker can pass to scripts."""
        return tuple(self.prefix + key.suffix for key in self._declared() if key.script)

    @property
    def written_by_workers(self) -> tuple[str, ...]:
        """Keys that workers write, with or without a script, except strings."""
        return tuple(self.prefix + key.suffix for key in self._declared() if key.written)


@dataclass(frozen=True)
class LedgerKeys(_Keys):
    """Keys of one job in the ledger."""

    job: str

    @property
    def prefix(self) -> str:
        """The start of every key of the job."""
        return f"vcasgd:{{fleet}}:job:{self.job}:"

    #: Hash: spec and state.
    record = _Key(script=True)
    #: Hash: ``facts``, the properties of the model and the data that only the user's code knows.
    #: Workers write it; they can't write the record.
    facts = _Key(script=True, written=True)
    #: Hash: finished, total, per_epoch, lead, shards, most_workers (that may hold subtasks at a
    #: time; 0: any number), points (``epochs`` or ``samples``: what
    #: numbers evaluations), evaluation_at, waiting (why the job has fewer machines than it could
    #: use), notes (JSON: what the job does otherwise than one process), and
    #: ``exported:<tracker>`` of an ended job. Read-only for workers.
    work = _Key(script=True)
    #: Hash: next (the next subtask to lease), highest (it has been at most), tokens, expired,
    #: overtaken, and ``again:<subtask>`` for a subtask that was leased more than once. Leasing
    #: writes it, so workers can too.
    counters = _Key(script=True, written=True)
    #: Hash: ``<shard>:`` token, version, finished, totals, samples, point, cleared (the blocks
    #: before it are deleted), and invalid (why its content can't be read), as reported by parameter
    #: servers. Read-only for workers.
    shards = _Key(script=True)
    #: Hash: values that the controller tunes from measurements, and ``suspect:<owner>``: why an
    #: owner gets no more work; as JSON. Read-only for workers.
    tuning = _Key()
    #: Sorted set: work item → deadline in ms of the server's clock.
    leases = _Key(script=True, written=True)
    #: Hash: work item → ``worker|token``.
    holders = _Key(script=True, written=True)
    #: Sorted set: work items that lost their holder; the lowest score is leased first.
    open = _Key(script=True, written=True)
    #: Hash: ``<shard>:<block>`` → bitmap of the subtasks of a block that the shard has applied; see
    #: :class:`~vcasgd.learning.applied_record.SubtaskSet`. Bits of epochs that the shard has
    #: finished don't count. Read-only for workers.
    blocks = _Key(script=True)
    #: Hash: epoch → result.
    evaluations = _Key(script=True, written=True)
    #: Hash: worker → last heartbeat.
    workers = _Key(script=True, written=True)
    #: Hash: bytes that removed workers pushed and fetched.
    traffic = _Key()
    #: Set: workers that were asked to leave.
    draining = _Key(script=True)
    #: Hash: worker → why it gets no more work.
    quarantine = _Key(script=True)
    #: Hash: worker → ``pool|digest of its pass``, written by the controller that starts it.
    placed = _Key(script=True)
    #: Hash: worker → owner of its machine, for machines of volunteers only. Workers can't read it.
    owners = _Key()
    #: Hash: worker → the clearance that it last lacked.
    refused = _Key(script=True, written=True)
    #: Sorted set: lost worker → number of its loss; the empty name has the newest number.
    lost = _Key()
    #: List: errors of the user's code.
    failures = _Key(written=True)
    #: Hash: machine → how the job lost it.
    vanished = _Key()
    #: Hash: machine → timeline of what it did for the job.
    machines = _Key()
    #: Hash: cost of the job's machines so far, by pool, kind and activity.
    costs = _Key()
    #: Hash: checkpoint → description.
    checkpoints = _Key()
    #: Stream: the job's history.
    events = _Key()
    #: Set: names of what :meth:`EventLog.announce` added to the history.
    announced = _Key()
    #: Stream: samples of the totals over time.
    metrics = _Key()
    #: Stream: lines that workers printed.
    logs = _Key(written=True)
    #: String: the job's secrets, encrypted. Workers can't read it.
    secrets = _Key()
    #: Hash: worker → public key, to which it wants the job's secrets encrypted, and proof.
    secret_requests = _Key(written=True)
    #: Hash: worker → the job's secrets, encrypted for it. Read-only for workers.
    secret_answers = _Key()


#: In patterns of keys: any shard of a job.
ANY_SHARD = "*"


@dataclass(frozen=True)
class TensorKeys(_Keys):
    """Keys of one shard of one job in a tensors server."""

    job: str
    shard: int | str = 0

    @property
    def prefix(self) -> str:
        """The start of every key of the shard; a pattern if ``shard`` is one."""
        return f"vcasgd:{{{self.job}:{self.shard}}}:"

    #: String: the token of the parameter server that may write.
    fence = _Key()
    #: String: the current snapshot's version, size and location of its chunks.
    meta = _Key()
    #: Hash, the applied record: ``finished`` → epochs; subtask → samples applied of it.
    applied = _Key(written=True)
    #: Hash: subtask → ``position|update``, the end of its newest pushed update.
    pushed = _Key(written=True)
    #: Hash: subtask → newest lease token seen.
    tokens = _Key(written=True)
    #: Stream: headers of updates that are not applied yet.
    stream = _Key("updates", written=True)
    #: Sorted set: update → time in ms until which its push slot is reserved; infinity once it is in
    #: the stream.
    push_slots = _Key(written=True)
    #: String: the number of push slots.
    window = _Key()
    #: Stream of one entry, replaced at each commit. Workers block on it.
    news = _Key(written=True)
    #: Hash: update → reason, for the worker that sent it.
    rejected = _Key(written=True)
    #: Hash: name → a snapshot that must be kept.
    pins = _Key()
    #: Set: names under which the current snapshot is to be pinned.
    pin_requests = _Key(written=True)

    def moments(self, name: str) -> str:
        """Return a key of the optimizer's second moments: ``steps`` and ``turn``, strings, or a
        chunk. Workers write them."""
        return f"{self.prefix}o:{name}"

    def repetition(self, name: str) -> str:
        """Return a key of an interval that is repeated: ``request`` and ``task``, strings, or a
        chunk. Read-only for workers."""
        return f"{self.prefix}r:{name}"

    def snapshot_chunk(self, version: int, token: int, name: str) -> str:
        """Return the key of one chunk of a snapshot."""
        return f"{self.prefix}s:{version}.{token}:{name}"

    def payload_chunk(self, update: str, index: int) -> str:
        """Return the key of one chunk of an update's payload."""
        return f"{self.prefix}u:{update}:{index}"
