"""Names of all Redis keys.

The braces are Redis Cluster hash tags: keys that one script uses share a tag, so that they are on
one node.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Sorted set: all jobs, by submission time in µs.
JOBS = "vcasgd:{fleet}:jobs"
#: Set: jobs that have not ended.
ACTIVE = "vcasgd:{fleet}:active"
#: Sorted set: deleted jobs, by the ledger's Unix time, until nothing is written for them any more.
DELETED = "vcasgd:{fleet}:deleted"
#: String: the name of the cluster that owns this ledger.
CLUSTER = "vcasgd:{fleet}:cluster"
#: Hash: the controller's lease, and the time of its last round.
CONTROLLER = "vcasgd:{fleet}:controller"
#: List: requests from the API to the controller.
COMMANDS = "vcasgd:{fleet}:commands"
#: Hash: instance → the controller's view of it, as JSON.
INSTANCES = "vcasgd:{fleet}:instances"
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
#: Hash: machine that joined → the workers that it has to run, with their credentials, as JSON.
JOINED_ORDERS = "vcasgd:{fleet}:joined-orders"
#: Hash: machine that joined → why it has to leave, as JSON.
JOINED_ENDS = "vcasgd:{fleet}:joined-ends"


def request(identifier: str) -> str:
    """Return the name of the key that records a request to the controller, and its result."""
    return f"vcasgd:{{fleet}}:request:{identifier}"


def idempotency(user: str | None, key: str) -> str:
    """Return the name of the key that records an ``Idempotency-Key`` of a user of the API."""
    return f"vcasgd:{{fleet}}:idempotency:{user or ''}:{key}"


@dataclass(frozen=True)
class LedgerKeys:
    """Keys of one job in the ledger.

    Each key belongs to exactly one of :attr:`worker_script_keys` and :attr:`platform_keys`.
    """

    job: str

    def _key(self, name: str) -> str:
        return f"vcasgd:{{fleet}}:job:{self.job}:{name}"

    @property
    def record(self) -> str:
        """Hash: spec and state."""
        return self._key("record")

    @property
    def facts(self) -> str:
        """Hash: ``facts``, the properties of the model and the data that only the user's code
        knows. Workers write it; they can't write the record."""
        return self._key("facts")

    @property
    def work(self) -> str:
        """Hash: finished, total, per_epoch, lead, shards, points (``epochs`` or ``samples``: what
        numbers evaluations), evaluation_at, waiting (why the job has fewer machines than it could
        use), and ``exported:<tracker>`` of an ended job. Read-only for workers."""
        return self._key("work")

    @property
    def counters(self) -> str:
        """Hash: next (the next subtask to lease), highest (it has been at most), tokens, expired,
        overtaken, and ``again:<subtask>`` for a subtask that was leased more than once. Leasing
        writes it, so workers can too."""
        return self._key("counters")

    @property
    def shards(self) -> str:
        """Hash: ``<shard>:`` token, version, finished, totals, samples, point, cleared (the blocks
        before it are deleted), and invalid (why its content can't be read), as reported by
        parameter servers. Read-only for workers."""
        return self._key("shards")

    @property
    def tuning(self) -> str:
        """Hash: values that the controller tunes from measurements, and ``suspect:<owner>``: why an
        owner gets no more work; as JSON. Read-only for workers."""
        return self._key("tuning")

    @property
    def leases(self) -> str:
        """Sorted set: work item → deadline in ms of the server's clock."""
        return self._key("leases")

    @property
    def holders(self) -> str:
        """Hash: work item → ``worker|token``."""
        return self._key("holders")

    @property
    def open(self) -> str:
        """Sorted set: work items that lost their holder; the lowest score is leased first."""
        return self._key("open")

    @property
    def blocks(self) -> str:
        """Hash: ``<shard>:<block>`` → bitmap of the subtasks of a block that the shard has applied;
        see :class:`~vcasgd.learning.subtask_set.SubtaskSet`. Bits of epochs that the shard has
        finished don't count. Read-only for workers."""
        return self._key("blocks")

    @property
    def evaluations(self) -> str:
        """Hash: epoch → result."""
        return self._key("evaluations")

    @property
    def workers(self) -> str:
        """Hash: worker → last heartbeat."""
        return self._key("workers")

    @property
    def beats(self) -> str:
        """Sorted set: worker → number of its last heartbeat in the job; the empty name has the
        newest number."""
        return self._key("beats")

    @property
    def traffic(self) -> str:
        """Hash: bytes that removed workers pushed and fetched."""
        return self._key("traffic")

    @property
    def draining(self) -> str:
        """Set: workers that were asked to leave."""
        return self._key("draining")

    @property
    def quarantine(self) -> str:
        """Hash: worker → why it gets no more work."""
        return self._key("quarantine")

    @property
    def placed(self) -> str:
        """Hash: worker → ``pool|digest of its pass``, written by the controller that starts it."""
        return self._key("placed")

    @property
    def owners(self) -> str:
        """Hash: worker → owner of its machine, for machines of volunteers only. Workers can't
        read it."""
        return self._key("owners")

    @property
    def refused(self) -> str:
        """Hash: worker → the clearance that it last lacked."""
        return self._key("refused")

    @property
    def lost(self) -> str:
        """Sorted set: lost worker → number of its loss; the empty name has the newest number."""
        return self._key("lost")

    @property
    def failures(self) -> str:
        """List: errors of the user's code."""
        return self._key("failures")

    @property
    def vanished(self) -> str:
        """Hash: instance → how the job lost it."""
        return self._key("vanished")

    @property
    def machines(self) -> str:
        """Hash: instance → timeline of what it did for the job."""
        return self._key("machines")

    @property
    def costs(self) -> str:
        """Hash: cost of the job's machines so far, by pool, kind and activity."""
        return self._key("costs")

    @property
    def checkpoints(self) -> str:
        """Hash: checkpoint → description."""
        return self._key("checkpoints")

    @property
    def events(self) -> str:
        """Stream: the job's history."""
        return self._key("events")

    @property
    def announced(self) -> str:
        """Set: names of what :meth:`EventLog.announce` added to the history."""
        return self._key("announced")

    @property
    def metrics(self) -> str:
        """Stream: samples of the totals over time."""
        return self._key("metrics")

    @property
    def thinned(self) -> str:
        """Stream: a part of :attr:`metrics` that is about to replace it."""
        return self._key("thinned")

    @property
    def logs(self) -> str:
        """Stream: lines that workers printed."""
        return self._key("logs")

    @property
    def secrets(self) -> str:
        """String: the job's secrets, encrypted. Workers can't read it."""
        return self._key("secrets")

    @property
    def secret_requests(self) -> str:
        """Hash: worker → public key, to which it wants the job's secrets encrypted, and proof."""
        return self._key("secret-requests")

    @property
    def secret_answers(self) -> str:
        """Hash: worker → the job's secrets, encrypted for it. Read-only for workers."""
        return self._key("secret-answers")

    @property
    def all(self) -> tuple[str, ...]:
        """All keys of the job."""
        return (*self.worker_script_keys, *self.platform_keys)

    @property
    def worker_script_keys(self) -> tuple[str, ...]:
        """Keys that a worker can pass to scripts: those of :data:`vcasgd.store.acl.LEDGER_SCRIPTS`.

        The list is explicit, so that a new key extends the rights of workers only on purpose.
        """
        return (
            self.record,
            self.facts,
            self.work,
            self.counters,
            self.leases,
            self.holders,
            self.open,
            self.blocks,
            self.shards,
            self.evaluations,
            self.workers,
            self.beats,
            self.draining,
            self.quarantine,
            self.placed,
            self.refused,
        )

    @property
    def written_by_workers(self) -> tuple[str, ...]:
        """Keys that workers write, with or without a script."""
        return (
            self.facts,
            self.counters,
            self.leases,
            self.holders,
            self.open,
            self.evaluations,
            self.workers,
            self.beats,
            self.refused,
            self.failures,
            self.logs,
            self.secret_requests,
        )

    @property
    def platform_keys(self) -> tuple[str, ...]:
        """Keys that no script of a worker uses. Single commands on them may still be granted."""
        return (
            self.events,
            self.announced,
            self.tuning,
            self.owners,
            self.lost,
            self.failures,
            self.vanished,
            self.machines,
            self.costs,
            self.checkpoints,
            self.metrics,
            self.thinned,
            self.logs,
            self.traffic,
            self.secrets,
            self.secret_requests,
            self.secret_answers,
        )


@dataclass(frozen=True)
class TensorKeys:
    """Keys of one shard of one job in a tensors server."""

    job: str
    shard: int = 0

    @property
    def prefix(self) -> str:
        """The start of every key of the shard."""
        return f"vcasgd:{{{self.job}:{self.shard}}}:"

    def _key(self, name: str) -> str:
        return f"{self.prefix}{name}"

    @property
    def fence(self) -> str:
        """String: the token of the parameter server that may write."""
        return self._key("fence")

    @property
    def meta(self) -> str:
        """String: the current snapshot's version, size and location of its chunks."""
        return self._key("meta")

    @property
    def applied(self) -> str:
        """Hash, the applied record: ``finished`` → epochs; subtask → samples applied of it."""
        return self._key("applied")

    @property
    def pushed(self) -> str:
        """Hash: subtask → ``position|update``, the end of its newest pushed update."""
        return self._key("pushed")

    @property
    def tokens(self) -> str:
        """Hash: subtask → newest lease token seen."""
        return self._key("tokens")

    @property
    def stream(self) -> str:
        """Stream: headers of updates that are not applied yet."""
        return self._key("updates")

    @property
    def places(self) -> str:
        """Sorted set: update → time in ms until which its push slot is reserved; infinity once it
        is in the stream."""
        return self._key("places")

    @property
    def window(self) -> str:
        """String: the number of push slots."""
        return self._key("window")

    @property
    def news(self) -> str:
        """Stream of one entry, replaced at each commit. Workers block on it."""
        return self._key("news")

    @property
    def rejected(self) -> str:
        """Hash: update → reason, for the worker that sent it."""
        return self._key("rejected")

    @property
    def pins(self) -> str:
        """Hash: name → a snapshot that must be kept."""
        return self._key("pins")

    @property
    def wanted(self) -> str:
        """Set: names under which the current snapshot is to be pinned."""
        return self._key("wanted")

    @property
    def written_by_workers(self) -> tuple[str, ...]:
        """Keys that workers write and a parameter server reads, except strings."""
        return (
            self.applied,
            self.pushed,
            self.tokens,
            self.stream,
            self.places,
            self.wanted,
            self.rejected,
            self.news,
        )

    def moments(self, name: str) -> str:
        """Return a key of the optimizer's second moments: ``steps`` and ``turn``, strings, or a
        chunk. Workers write them."""
        return self._key(f"o:{name}")

    def repetition(self, name: str) -> str:
        """Return a key of an interval that is repeated: ``request`` and ``task``, strings, or a
        chunk. Read-only for workers."""
        return self._key(f"r:{name}")

    def snapshot_chunk(self, version: int, token: int, name: str) -> str:
        """Return the key of one chunk of a snapshot."""
        return self._key(f"s:{version}.{token}:{name}")

    def payload_chunk(self, update: str, index: int) -> str:
        """Return the key of one chunk of an update's payload."""
        return self._key(f"u:{update}:{index}")
